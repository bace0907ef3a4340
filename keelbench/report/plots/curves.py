"""Small multiples of whole ramps: loss and gradient norm against LR."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keelbench.records import FloatArray, Record
from keelbench.report.plots.canvas import calm, log_axis, padded, styled
from keelbench.report.plots.looks import MUTED, Look
from keelbench.report.plots.panels import Panel, panels_of
from keelbench.report.plots.small_multiples import Curve, SmallMultiples
from keelbench.report.plots.traces import binned_norms, grad_norm_of, loss_of

HEADROOM_NATS = 0.2
"""The loss axis ends this much above the highest loss at the first step, however high a
diverged loss rises."""


@styled
def loss_figure(records: Sequence[Record], *, width: float | None = None) -> Figure:
    """Loss against LR, a panel per setting: every seed, onsets marked.

    Against steps if every LR was held (the hold protocol). The probe loss where there is one,
    else the train loss. The level of a model that has learned nothing from context, the
    unigram entropy, is drawn as a line.

    Args:
        records: of any number of cells.
        width: of the figure, in inches; by default one column of a paper for one panel, and
            the whole page for several.

    Raises:
        KeelbenchError: if there are no records.
    """
    panels = panels_of(records)
    small = SmallMultiples(panels, width, loss_of)
    limits = _loss_limits(small.curves)
    for axes, panel, curves in zip(small.axes, panels, small.by_panel, strict=True):
        axes.set_ylim(limits)
        _entropy_line(axes, panel, curves)
    small.finish(f"{_loss_name(panels)} (nats per token)")
    return small.figure


@styled
def grad_norm_figure(records: Sequence[Record], *, width: float | None = None) -> Figure:
    """Global gradient norm before clipping against LR, a panel per setting.

    A line per seed through the medians of narrow bins of LR, over the range within them.

    Args:
        records: of any number of cells.
        width: of the figure, in inches, as in :func:`loss_figure`.

    Raises:
        KeelbenchError: if there are no records.
    """
    panels = panels_of(records)
    small = SmallMultiples(panels, width, grad_norm_of)
    limits = _norm_limits(panels)
    for axes, panel in zip(small.axes, panels, strict=True):
        log_axis(axes, "y", *limits, labels=5)
        calm(axes, "both")
        for cell in panel.cells:
            for lane in cell.lanes:
                x, bins = binned_norms(lane.trace, small.x_of(cell, lane))
                _draw_range(axes, x, bins, small.looks[cell.spec.model.arch])
    small.finish("gradient norm before clipping")
    return small.figure


def _loss_name(panels: Sequence[Panel]) -> str:
    traces = [lane.trace for panel in panels for cell in panel.cells for lane in cell.lanes]
    shown = [trace for trace in traces if np.isfinite(loss_of(trace, trace.lr)[1]).any()]
    names = {"train loss" if trace.probe is None else "probe loss" for trace in shown}
    return " or ".join(sorted(names)) or "loss"


def _draw_range(axes: Axes, x: FloatArray, bins: Sequence[FloatArray], look: Look) -> None:
    """From the lowest to the highest norm in each bin: spikes stay visible, faintly."""
    if len(bins) > 1:
        low, high = [values.min() for values in bins], [values.max() for values in bins]
        axes.fill_between(x, low, high, color=look.color, alpha=0.13, linewidth=0)


def _entropy_line(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    """The unigram entropy, labelled where the fewest curves pass."""
    levels = [
        lane.trace.unigram_entropy
        for cell in panel.cells
        for lane in cell.lanes
        if lane.trace.unigram_entropy is not None
    ]
    low, high = axes.get_ylim()
    level = float(np.median(levels)) if levels else low
    if not low < level < high:
        return
    axes.axhline(level, color=MUTED, linewidth=0.7, zorder=1)
    share = (level - low) / (high - low)
    sides = [("left", "top"), ("left", "bottom"), ("right", "bottom"), ("right", "top")]
    fits = {"top": share > LABEL_HEIGHT, "bottom": share < 1 - LABEL_HEIGHT}
    places = [place for place in sides if fits[place[1]]]
    side, hangs = min(places, key=lambda place: _crowd(axes, level, curves, *place))
    axes.annotate(
        f"unigram\nentropy {level:.2f}",
        (0.015 if side == "left" else 0.99, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, -2 if hangs == "top" else 1.5),
        textcoords="offset points",
        ha=side,
        va=hangs,
        fontsize=6.5,
        color=MUTED,
    )


def _crowd(axes: Axes, level: float, curves: Sequence[Curve], side: str, hangs: str) -> int:
    """Points of curves in the place that the label would take."""
    (left, right), (low, high) = np.log(axes.get_xlim()), axes.get_ylim()
    count = 0
    for curve in curves:
        x = (np.log(curve.x) - left) / (right - left)
        across = x < LABEL_WIDTH if side == "left" else x > 1 - LABEL_WIDTH
        up = (curve.y - level) / (high - low)
        up = -up if hangs == "top" else up
        count += int((across & (x >= 0) & (up > 0.015) & (up < LABEL_HEIGHT)).sum())
    return count


LABEL_WIDTH, LABEL_HEIGHT = 0.3, 0.15
"""Shares of a panel that the label of the unigram entropy takes."""


def _loss_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """From just below the lowest loss to just above the highest first loss."""
    finite = [curve.y[np.isfinite(curve.y)] for curve in curves]
    finite = [values for values in finite if len(values)]
    if not finite:
        return 0.0, 1.0
    low = min(float(values.min()) for values in finite)
    high = max(float(values[0]) for values in finite)
    return low - 0.1, max(high, low) + HEADROOM_NATS


def _norm_limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """All but the most extreme norms: one explosion does not squash the rest."""
    bins = [
        values
        for panel in panels
        for cell in panel.cells
        for lane in cell.lanes
        for values in binned_norms(lane.trace, lane.trace.lr)[1]
    ]
    if not bins:
        return 0.1, 10.0
    norms = np.concatenate(bins)
    low, middle, high = np.quantile(norms, (0.002, 0.99, 1.0))
    return padded(float(low), min(float(high), 100 * float(middle)), 0.05)
