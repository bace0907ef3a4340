"""Small multiples of whole ramps: loss and gradient norm against LR."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keelbench.records import FloatArray, Record, Trace
from keelbench.report.plots.canvas import (
    calm,
    handle,
    log_axis,
    lr_text,
    message,
    padded,
    styled,
)
from keelbench.report.plots.looks import (
    COLUMN_INCHES,
    MUTED,
    PAGE_INCHES,
    PAPER,
    Look,
    looks_of,
)
from keelbench.report.plots.panels import LrAxis, Panel, lr_axis, panels_of

PANEL_INCHES = 2.1
"""Height of a panel."""

BINS = 400
"""Points that a curve keeps over the width of a panel: its extremes in each of these bins."""

HEADROOM_NATS = 0.2
"""The loss axis ends this much above the highest loss at the first step, however high a
diverged loss rises."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One lane's line and the point at which its Max LR was read."""

    arch: str
    x: FloatArray
    y: FloatArray
    onset: tuple[float, float] | None
    survived: bool


Reader = Callable[[Trace], tuple[FloatArray, FloatArray]]
"""LR and measured values of a trace."""


@styled
def loss_figure(records: Sequence[Record], *, width: float | None = None) -> Figure:
    """Loss against LR, a panel per setting: every seed, onsets marked.

    The probe loss where there is one, else the train loss. The level of a model that has
    learned nothing from context, the unigram entropy, is drawn as a line.

    Args:
        records: of any number of cells.
        width: of the figure, in inches; by default one column of a paper for one panel, and
            the whole page for several.

    Raises:
        KeelbenchError: if there are no records.
    """
    panels = panels_of(records)
    small = SmallMultiples(panels, width, _loss)
    limits = _loss_limits(small.curves)
    for axes, panel in zip(small.axes, panels, strict=True):
        axes.set_ylim(limits)
        _entropy_line(axes, panel, limits)
    traces = [lane.trace for panel in panels for cell in panel.cells for lane in cell.lanes]
    names = {"train loss" if trace.probe is None else "probe loss" for trace in traces}
    small.finish(f"{' or '.join(sorted(names))} (nats per token)")
    return small.figure


@styled
def grad_norm_figure(records: Sequence[Record], *, width: float | None = None) -> Figure:
    """Global gradient norm before clipping against LR, a panel per setting.

    Args:
        records: of any number of cells.
        width: of the figure, in inches, as in :func:`loss_figure`.

    Raises:
        KeelbenchError: if there are no records.
    """
    panels = panels_of(records)
    small = SmallMultiples(panels, width, _grad_norm)
    limits = _norm_limits(small.curves)
    for axes in small.axes:
        log_axis(axes, "y", *limits, labels=5)
        calm(axes, "both")
    small.finish("gradient norm before clipping")
    return small.figure


class SmallMultiples:
    """A panel per setting with one curve per lane, over a shared LR axis."""

    def __init__(self, panels: Sequence[Panel], width: float | None, read: Reader) -> None:
        cells = [cell for panel in panels for cell in panel.cells]
        self.lr = lr_axis(cells)
        self.looks = looks_of(cell.spec.model.arch for cell in cells)
        self.figure, self.axes = _grid(len(panels), width)
        by_panel = [_curves(panel, self.lr, read) for panel in panels]
        self.curves = [curve for curves in by_panel for curve in curves]
        limits = _x_limits(self.curves)
        for axes, panel, curves in zip(self.axes, panels, by_panel, strict=True):
            axes.set_title(panel.title, loc="left", pad=3, color=MUTED)
            log_axis(axes, "x", *limits, labels=4, text=lr_text)
            calm(axes, "both")
            for curve in curves:
                _draw_curve(axes, curve, self.looks[curve.arch])
            if not any(np.isfinite(curve.y).any() for curve in curves):
                message(axes, "nothing finite was measured")

    def finish(self, y_label: str) -> None:
        """Labels and legend, once for all panels."""
        self.figure.supxlabel(self.lr.label("LR"), fontsize=7.5)
        self.figure.supylabel(y_label, fontsize=7.5)
        width = self.figure.get_figwidth()
        self.figure.legend(
            handles=[handle(look) for look in self.looks.values()],
            loc="outside upper center",
            ncols=min(len(self.looks), max(2, round(width * 0.9))),
            frameon=False,
            handlelength=2.6,
            columnspacing=1.2,
            handletextpad=0.5,
            borderaxespad=0,
        )


def _grid(count: int, width: float | None) -> tuple[Figure, list[Axes]]:
    width = width or (COLUMN_INCHES if count == 1 else PAGE_INCHES)
    columns = min(count, max(1, round(width / 2.6)))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width, PANEL_INCHES * rows + 0.45), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[count:]:
        axes.remove()
    for axes in grid.flat[max(0, count - columns) : count]:
        axes.tick_params(labelbottom=True)
    return figure, list(grid.flat[:count])


def _curves(panel: Panel, lr: LrAxis, read: Reader) -> list[Curve]:
    found = []
    for cell in panel.cells:
        for lane in cell.lanes:
            x, y = read(lane.trace)
            x, y = x * lr.factor(cell), np.where(np.isfinite(y), y, np.nan)
            usable = np.isfinite(y)
            onset = None
            if lane.max_lr is not None and usable.any():
                at = lane.max_lr * lr.factor(cell)
                onset = (at, float(np.interp(at, x[usable], y[usable])))
            x, y = thinned(x, y)
            found.append(Curve(cell.spec.model.arch, x, y, onset, lane.is_censored))
    return found


def _loss(trace: Trace) -> tuple[FloatArray, FloatArray]:
    if trace.probe is None or trace.probe_step is None:
        return trace.lr, trace.loss
    return trace.lr[trace.probe_step], trace.probe


def _grad_norm(trace: Trace) -> tuple[FloatArray, FloatArray]:
    if trace.grad_norm is None:
        return trace.lr[:0], trace.lr[:0]
    return trace.lr, np.where(trace.grad_norm > 0, trace.grad_norm, np.nan)


def thinned(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The same picture with fewer points: the extremes of each bin of log LR."""
    positive = x > 0
    x, y = x[positive], y[positive]
    if len(x) <= 2 * BINS:
        return x, y
    place = np.log(x / x[0]) / np.log(x[-1] / x[0]) * BINS
    kept: set[int] = {0, len(x) - 1}
    edges = np.flatnonzero(np.diff(place.astype(int))) + 1
    for part in np.split(np.arange(len(x)), edges):
        finite = part[np.isfinite(y[part])]
        members = finite if len(finite) else part
        kept |= {int(members[y[members].argmin()]), int(members[y[members].argmax()])}
    order = sorted(kept)
    return x[order], y[order]


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
    if curve.survived and len(curve.x):
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


def _entropy_line(axes: Axes, panel: Panel, limits: tuple[float, float]) -> None:
    levels = [
        lane.trace.unigram_entropy
        for cell in panel.cells
        for lane in cell.lanes
        if lane.trace.unigram_entropy is not None
    ]
    if not levels:
        return
    level = float(np.median(levels))
    if not limits[0] < level < limits[1]:
        return
    axes.axhline(level, color=MUTED, linewidth=0.7, zorder=1)
    axes.annotate(
        f"unigram entropy {level:.2f}",
        (0.015, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, -2),
        textcoords="offset points",
        va="top",
        fontsize=6.5,
        color=MUTED,
    )


def _x_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    ends = [float(x) for curve in curves if len(curve.x) for x in (curve.x[0], curve.x[-1])]
    if not ends:
        return 1e-4, 1e-1
    low, high = padded(min(ends), max(ends), 0.0)
    return low, high * 1.03


def _loss_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """From just below the lowest loss to just above the highest first loss."""
    finite = [curve.y[np.isfinite(curve.y)] for curve in curves]
    finite = [values for values in finite if len(values)]
    if not finite:
        return 0.0, 1.0
    low = min(float(values.min()) for values in finite)
    high = max(float(values[0]) for values in finite)
    return low - 0.1, max(high, low) + HEADROOM_NATS


def _norm_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Up to 30 times the 99th percentile: a single explosion does not squash the rest."""
    finite = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in curves])
    if not len(finite):
        return 0.1, 10.0
    high = min(float(finite.max()), 30 * float(np.quantile(finite, 0.99)))
    return padded(float(finite.min()), high, 0.05)
