"""How the cost of a step grows with depth, width and lanes: fitted exponents and a figure."""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import Shape, keelbench

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


def _draw(found: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(9, 2.8), layout="constrained")
    for axis, (name, line) in zip(axes, found.items(), strict=True):
        axis.loglog(line["sizes"], line["milliseconds"], "o-")
        axis.set_xticks(line["sizes"], [str(size) for size in line["sizes"]])
        axis.minorticks_off()
        axis.set_xlabel("depth L (sub-layers)" if name == "depth" else name)
        axis.set_title(f"cost ~ {name}^{line['exponent']:.2f}", fontsize=10)
    axes[0].set_ylabel("ms per step, one thread")
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
