"""How the cost of a step grows with depth, width and lanes: fitted exponents and a figure."""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.contenders import Shape, keelbench
from keelbench.report.plots.canvas import calm, log_axis, padded, save, styled
from keelbench.report.plots.looks import INK, MUTED, PAGE_INCHES

BASE = Shape(64, 64, 8, 64, 1)
AXES: dict[str, list[Shape]] = {
    "depth": [Shape(depth, 64, 8, 64, 1) for depth in (16, 32, 64, 128, 256)],
    "width": [Shape(64, width, 8, 64, 1) for width in (32, 64, 128, 256)],
    "lanes": [Shape(64, 64, 8, 64, lanes) for lanes in (1, 2, 4, 8)],
}
FIGURE = Path(__file__).parent.parent / "docs" / "images" / "performance-scaling.png"
ROUNDS = 5


def scaling() -> dict[str, Any]:
    """Milliseconds of CPU time per step along each axis; cost ~ size ** exponent."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for axis, shapes in AXES.items():
        sizes = [getattr(shape, axis) for shape in shapes]
        times = _times(shapes)
        slope = float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
        found[axis] = {
            "sizes": sizes,
            "milliseconds": [round(value, 2) for value in times],
            "exponent": round(slope, 3),
        }
        print(axis, found[axis], flush=True)
    _draw(found)
    return found


def _times(shapes: list[Shape]) -> list[float]:
    """Medians of rounds in which all shapes take turns."""
    runs = [keelbench(shape) for shape in shapes]
    for run in runs:
        run(4)
    rounds = [[_milliseconds(run) for run in runs] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def _milliseconds(run: Any) -> float:
    started = time.thread_time()
    run(4)
    return (time.thread_time() - started) / 4 * 1e3


@styled
def figure(found: dict[str, Any]) -> Figure:
    """A panel per axis: measured medians, and the power law fitted to them."""
    drawn = Figure(figsize=(PAGE_INCHES, 2.2), layout="constrained")
    times = [value for line in found.values() for value in line["milliseconds"]]
    grid = drawn.subplots(1, len(found), sharey=True)
    for axes, (name, line) in zip(grid, found.items(), strict=True):
        sizes, milliseconds = line["sizes"], line["milliseconds"]
        log_axis(axes, "x", *padded(sizes[0], sizes[-1]))
        log_axis(axes, "y", *padded(min(times), max(times)))
        calm(axes, "both")
        fit = np.polyfit(np.log(sizes), np.log(milliseconds), 1)
        axes.plot(sizes, np.exp(np.polyval(fit, np.log(sizes))), color=MUTED, linewidth=0.8)
        axes.plot(sizes, milliseconds, "o", color=INK, markersize=3.5)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("depth (sub-layers)" if name == "depth" else name)
        axes.set_title(f"{name}$^{{{line['exponent']:.2f}}}$", loc="left", pad=3, color=MUTED)
    grid[0].set_ylabel("ms per step, one thread")
    return drawn


def _draw(found: dict[str, Any]) -> None:
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    save(figure(found), FIGURE.with_suffix(""))
