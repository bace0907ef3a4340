"""The dot plot: Max LR by architecture."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keelbench.records import Record, VerdictKind
from keelbench.report.cells import Cell
from keelbench.report.numbers import estimate_number, lr_text
from keelbench.report.plots.canvas import (
    at_least_arrow,
    calm,
    label_room,
    log_axis,
    padded,
    styled,
)
from keelbench.report.plots.looks import COLUMN_INCHES, INK, MUTED, PAPER, Look, looks_of
from keelbench.report.plots.panels import LrAxis, Panel, lr_axis, panels_of
from keelbench.report.summary import Row

ROW_INCHES = 0.25
"""Height of one architecture."""

SEED_OFFSET = 0.2
"""Seeds are drawn this much above the mean and its interval, in rows."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where a row is drawn."""

    axes: Axes
    position: float
    factor: float
    normalized: bool
    limits: tuple[float, float]


@styled
def max_lr_figure(records: Sequence[Record], *, width: float = COLUMN_INCHES) -> Figure:
    """Max LR by architecture, one panel per depth: mean and interval, every seed as a dot.

    A lane that survived is a dot at its peak with an arrow. The number at the right is the
    geometric mean, or the lower bound of it.

    Args:
        records: of any number of cells.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if there are no records.
    """
    panels = panels_of(records)
    cells = [cell for panel in panels for cell in panel.cells]
    looks = looks_of(cell.spec.model.arch for cell in cells)
    lr = lr_axis(cells)
    limits = _limits(panels, lr)
    rows = [len(panel.rows) for panel in panels]
    figure = Figure(
        figsize=(width, 0.5 + ROW_INCHES * (sum(rows) + 1.0 * len(panels))),
        layout="constrained",
    )
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=rows)
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _prepare(axes, panel, looks, limits, label_room(looks.values(), width))
        for position, (row, cell) in enumerate(zip(panel.rows, panel.cells, strict=True)):
            frame = _Frame(axes, -position, lr.factor(cell), lr.normalized, limits)
            _draw_cell(frame, row, cell, looks[row["arch"]])
    for axes in grid[:-1, 0]:
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="x", which="both", length=0)
    grid[-1, 0].set_xlabel(lr.label("Max LR"))
    return figure


def _prepare(
    axes: Axes,
    panel: Panel,
    looks: dict[str, Look],
    limits: tuple[float, float],
    labels: int,
) -> None:
    count = len(panel.rows)
    axes.set_title(panel.title, loc="left", pad=3, color=MUTED)
    log_axis(axes, "x", *limits, labels=labels, text=lr_text)
    calm(axes, "x")
    axes.set_ylim(-count + 0.4, 0.6)
    names = [looks[row["arch"]].axis_title for row in panel.rows]
    axes.set_yticks([-position for position in range(count)], names)
    axes.tick_params(axis="y", which="both", length=0, pad=4)
    axes.spines["left"].set_visible(False)


def _draw_cell(frame: _Frame, row: Row, cell: Cell, look: Look) -> None:
    for lane in cell.lanes:
        value = lane.max_lr if lane.max_lr is not None else lane.lower_bound
        if value is None:
            continue
        x, y = value * frame.factor, frame.position + SEED_OFFSET
        frame.axes.plot(
            x,
            y,
            "o",
            markersize=2.8,
            markerfacecolor=PAPER,
            markeredgecolor=look.color,
            markeredgewidth=0.8,
            zorder=3,
        )
        if lane.max_lr is None:
            at_least_arrow(frame.axes, x, y, look.color)
    _draw_mean(frame, row, look)


def _draw_mean(frame: _Frame, row: Row, look: Look) -> None:
    axes, y = frame.axes, frame.position - 0.08
    values = [row[name] for name in ("max_lr", "max_lr_low", "max_lr_high")]
    mean, low, high = (None if value is None else value * frame.factor for value in values)
    if mean is None and low is None:
        kinds = [kind for kind in VerdictKind if row[str(kind)]]
        text = ", ".join(kind.replace("_", " ") for kind in kinds)
        axes.text(frame.limits[0], y, text, ha="left", va="center", color=MUTED, style="italic")
        return
    if mean is None:
        assert low is not None
        axes.plot(low, y, look.marker, color=look.color, markersize=4.5, markeredgewidth=0)
        at_least_arrow(axes, low, y, look.color)
    else:
        if low is not None and high is not None:
            axes.plot([low, high], [y, y], color=look.color, linewidth=1.4, zorder=2)
        axes.plot(
            mean,
            y,
            look.marker,
            color=look.color,
            markersize=5,
            markeredgecolor=PAPER,
            markeredgewidth=0.6,
            zorder=4,
        )
    number = estimate_number(row, "normalized" if frame.normalized else "max_lr")
    assert number is not None
    axes.annotate(
        ("" if mean is not None else "≥ ") + number.plain,
        (1, y),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=INK,
        fontsize=7,
        annotation_clip=False,
    )


def _limits(panels: Sequence[Panel], lr: LrAxis) -> tuple[float, float]:
    """From the lowest to the highest value or interval end, with a margin."""
    values, open_ended = [], False
    for panel in panels:
        for row, cell in zip(panel.rows, panel.cells, strict=True):
            found = [row["max_lr_low"], row["max_lr_high"]]
            for lane in cell.lanes:
                found.append(lane.max_lr if lane.max_lr is not None else lane.lower_bound)
                open_ended |= lane.is_censored
            values += [value * lr.factor(cell) for value in found if value is not None]
    if not values:
        return 1e-4, 1e-1
    low, high = padded(min(values), max(values))
    return low, high * (high / low) ** 0.07 if open_ended else high
