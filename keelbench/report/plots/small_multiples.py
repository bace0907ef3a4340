"""A panel per setting with one curve per lane: what loss and gradient norm figures share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keelbench.records import FloatArray, Record, Trace
from keelbench.report.cells import Cell
from keelbench.report.numbers import lr_text, short
from keelbench.report.plots.canvas import LETTER_INCHES, calm, handle, log_axis, message, padded
from keelbench.report.plots.looks import (
    COLUMN_INCHES,
    MUTED,
    PAGE_INCHES,
    PAPER,
    Look,
    looks_of,
)
from keelbench.report.plots.panels import Panel, lr_axis
from keelbench.report.plots.traces import SHOWN_RANGE, thinned

PANEL_INCHES = 2.1
"""Height of a panel."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One lane's line and the point at which its Max LR was read."""

    arch: str
    x: FloatArray
    y: FloatArray
    onset: tuple[float, float] | None
    survived: bool


Reader = Callable[[Trace, FloatArray], tuple[FloatArray, FloatArray]]
"""From a trace and what each of its steps is drawn against, x and y of its curve."""


class SmallMultiples:
    """A panel per setting with one curve per lane, over a shared LR axis."""

    def __init__(self, panels: Sequence[Panel], width: float | None, read: Reader) -> None:
        cells = [cell for panel in panels for cell in panel.cells]
        self.lr = lr_axis(cells)
        self.by_step = all(cell.spec.ramp.protocol == "hold" for cell in cells)
        self.looks = looks_of(cell.spec.model.arch for cell in cells)
        self.figure, self.axes = _grid(len(panels), width)
        self.by_panel = [_curves(panel, self.x_of, read) for panel in panels]
        self.curves = [curve for curves in self.by_panel for curve in curves]
        limits = _x_limits(self.curves)
        for axes, panel, curves in zip(self.axes, panels, self.by_panel, strict=True):
            axes.set_title(panel.title, loc="left", pad=3, color=MUTED)
            text = short if self.by_step else lr_text
            log_axis(axes, "x", *limits, labels=4, text=text)
            calm(axes, "both")
            for curve in curves:
                _draw_curve(axes, curve, self.looks[curve.arch])
            if not any(np.isfinite(curve.y).any() for curve in curves):
                message(axes, "nothing finite was measured")

    def x_of(self, cell: Cell, lane: Record) -> FloatArray:
        """What each step is drawn against: its LR or, where LRs are held, its number."""
        if self.by_step:
            return np.arange(1.0, lane.trace.steps + 1)
        return lane.trace.lr * self.lr.factor(cell)

    def finish(self, y_label: str) -> None:
        """What depends on the limits of the panels, and labels and legend, once for all."""
        for axes, curves in zip(self.axes, self.by_panel, strict=True):
            for curve in curves:
                _mark_survivor(axes, curve, self.looks[curve.arch])
        label = self.lr.label("step" if self.by_step else "LR")
        self.figure.supxlabel(label, fontsize=7.5)
        self.figure.supylabel(y_label, fontsize=7.5)
        longest = max(len(look.title) for look in self.looks.values())
        fitting = max(1, int(self.figure.get_figwidth() / (0.5 + LETTER_INCHES * longest)))
        rows = math.ceil(len(self.looks) / fitting)
        self.figure.legend(
            handles=[handle(look) for look in self.looks.values()],
            loc="outside upper center",
            ncols=math.ceil(len(self.looks) / rows),
            frameon=False,
            handlelength=2.6,
            columnspacing=1.2,
            handletextpad=0.5,
            borderaxespad=0,
        )


def _grid(count: int, width: float | None) -> tuple[Figure, list[Axes]]:
    width = width or (COLUMN_INCHES if count == 1 else PAGE_INCHES)
    most = min(count, max(1, round(width / 2.3)))
    columns = min(range(most, 0, -1), key=lambda n: (n < min(2, most), -count % n, -n))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width, PANEL_INCHES * rows + 0.45), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.02, w_pad=0.02, hspace=0.03)  # type: ignore[union-attr,call-arg]
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[count:]:
        axes.remove()
    for axes in grid.flat[max(0, count - columns) : count]:
        axes.tick_params(labelbottom=True)
    return figure, list(grid.flat[:count])


def _curves(
    panel: Panel, x_of: Callable[[Cell, Record], FloatArray], read: Reader
) -> list[Curve]:
    found = []
    for cell in panel.cells:
        for lane in cell.lanes:
            steps = x_of(cell, lane)
            x, y = read(lane.trace, steps)
            y = np.where(np.isfinite(y), y, np.nan)
            usable = np.isfinite(y)
            onset = None
            if lane.verdict.onset_step and usable.any():
                at = float(steps[lane.verdict.onset_step - 1])
                onset = (at, float(np.interp(at, x[usable], y[usable])))
            x, y = thinned(x, y)
            found.append(Curve(cell.spec.model.arch, x, y, onset, lane.is_censored))
    return found


def _draw_curve(axes: Axes, curve: Curve, look: Look) -> None:
    single = {"marker": look.marker, "markersize": 3} if len(curve.x) == 1 else {}
    axes.plot(
        curve.x,
        curve.y,
        color=look.color,
        linestyle=look.dash,
        linewidth=0.8,
        alpha=0.85,
        **single,  # type: ignore[arg-type]
    )
    if curve.onset is not None:
        axes.plot(
            *curve.onset,
            look.marker,
            color=look.color,
            markersize=4.5,
            markeredgecolor=PAPER,
            markeredgewidth=0.5,
            zorder=4,
        )


def _mark_survivor(axes: Axes, curve: Curve, look: Look) -> None:
    """A hollow arrowhead at the end of a curve that goes on, half outside the panel."""
    low, high = axes.get_ylim()
    if not (curve.survived and len(curve.x) and low <= curve.y[-1] <= high):
        return  # a loss that has left the panel ends there
    axes.plot(
        curve.x[-1],
        curve.y[-1],
        ">",
        markerfacecolor=PAPER,
        markeredgecolor=look.color,
        markersize=4,
        markeredgewidth=0.8,
        zorder=4,
        clip_on=False,
    )


def _x_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    ends = [float(x) for curve in curves if len(curve.x) for x in (curve.x[0], curve.x[-1])]
    if not ends:
        return 1e-4, 1e-1
    first, last = min(ends), max(ends)
    onsets = [curve.onset[0] / 5 for curve in curves if curve.onset is not None]
    low = max(first, min([last / SHOWN_RANGE, *onsets]))
    return (low, last * 1.03) if last > low else padded(low, last)
