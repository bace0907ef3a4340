"""The figure of before and after: two values per cell, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from keelbench.report.numbers import lr_text
from keelbench.report.plots.canvas import (
    LETTER_INCHES,
    at_least_arrow,
    calm,
    label_room,
    log_axis,
    padded,
    styled,
)
from keelbench.report.plots.looks import COLUMN_INCHES, INK, MUTED, PAPER, Look, looks_of
from keelbench.stats import Estimate

ROW_INCHES = 0.27
"""Height of one cell."""

OFFSET = 0.17
"""Distance of the two values from the middle of a row, in rows."""


@dataclass(frozen=True, slots=True)
class Span:
    """A value with its interval, or a lower bound."""

    value: float
    low: float | None = None
    high: float | None = None
    is_bound: bool = False

    @classmethod
    def of(cls, estimate: Estimate, scale: float = 1.0) -> Self | None:
        """None if the estimate has neither a value nor a bound."""
        if estimate.mean is None:
            return None if estimate.low is None else cls(estimate.low * scale, is_bound=True)
        if estimate.low is None or estimate.high is None:
            return cls(estimate.mean * scale)
        return cls(estimate.mean * scale, estimate.low * scale, estimate.high * scale)

    @property
    def ends(self) -> list[float]:
        return [end for end in (self.value, self.low, self.high) if end is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedRow:
    """One cell before and after."""

    panel: str
    """What rows of one panel share, such as ``depth 64``."""
    arch: str
    first: Span | None
    second: Span | None
    note: str = ""
    """Written at the right: a ratio, a verdict."""


@styled
def paired_figure(
    rows: Sequence[PairedRow],
    names: tuple[str, str],
    *,
    label: str = "Max LR",
    width: float = COLUMN_INCHES,
) -> Figure:
    """Two values per row: the first hollow and above, the second filled and below it.

    Args:
        rows: in the order in which they are drawn; those of one panel follow each other.
        names: of the first and the second values.
        label: of the LR axis.
        width: of the figure, in inches.
    """
    looks = looks_of(row.arch for row in rows)
    panels: dict[str, list[PairedRow]] = {}
    for row in rows:
        panels.setdefault(row.panel, []).append(row)
    sizes = [len(members) for members in panels.values()]
    figure = Figure(
        figsize=(width, 0.75 + ROW_INCHES * (sum(sizes) + 1.0 * len(panels))),
        layout="constrained",
    )
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=sizes)
    limits = _limits(rows)
    longest = max(len(row.note) for row in rows)
    labels = label_room(looks.values(), width - LETTER_INCHES * max(0, longest - 8))
    for axes, (title, members) in zip(grid[:, 0], panels.items(), strict=True):
        axes.set_title(title, loc="left", pad=3, color=MUTED)
        log_axis(axes, "x", *limits, labels=labels, text=lr_text)
        calm(axes, "x")
        _names(axes, [looks[row.arch].axis_title for row in members])
        for position, row in enumerate(members):
            _draw_row(axes, -position, row, looks[row.arch])
    _finish(figure, list(grid[:, 0]), label, names)
    return figure


def _names(axes: Axes, names: Sequence[str]) -> None:
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.set_yticks([-position for position in range(len(names))], names)
    axes.tick_params(axis="y", which="both", length=0, pad=4)
    axes.spines["left"].set_visible(False)


def _draw_row(axes: Axes, position: float, row: PairedRow, look: Look) -> None:
    if row.first is not None:
        _draw_span(axes, position + OFFSET, row.first, look.marker, MUTED, PAPER)
    if row.second is not None:
        _draw_span(axes, position - OFFSET, row.second, look.marker, look.color, look.color)
    axes.annotate(
        row.note,
        (1, position),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=INK,
        fontsize=7,
        annotation_clip=False,
    )


def _draw_span(axes: Axes, y: float, span: Span, marker: str, color: str, face: str) -> None:
    if span.low is not None and span.high is not None:
        axes.plot([span.low, span.high], [y, y], color=color, linewidth=1.2, zorder=2)
    axes.plot(
        span.value,
        y,
        marker,
        markersize=4.5,
        markerfacecolor=face,
        markeredgecolor=color if face == PAPER else PAPER,
        markeredgewidth=0.9 if face == PAPER else 0.5,
        zorder=3,
    )
    if span.is_bound:
        at_least_arrow(axes, span.value, y, color)


def _finish(figure: Figure, axes: Sequence[Axes], label: str, names: tuple[str, str]) -> None:
    for upper in axes[:-1]:
        upper.spines["bottom"].set_visible(False)
        upper.tick_params(axis="x", which="both", length=0)
    axes[-1].set_xlabel(label)
    figure.legend(
        handles=[
            Line2D(
                [],
                [],
                linestyle="none",
                marker="o",
                markersize=4.5,
                markerfacecolor=face,
                markeredgecolor=MUTED,
                markeredgewidth=0.9,
                label=name,
            )
            for name, face in zip(names, (PAPER, MUTED), strict=True)
        ],
        loc="outside upper right",
        ncols=2,
        frameon=False,
        handletextpad=0.1,
        columnspacing=1.0,
        borderaxespad=0,
    )


def _limits(rows: Sequence[PairedRow]) -> tuple[float, float]:
    spans = [span for row in rows for span in (row.first, row.second) if span is not None]
    if not spans:
        return 1e-4, 1e-1
    ends = [end for span in spans for end in span.ends]
    low, high = padded(min(ends), max(ends))
    return low, high * (high / low) ** 0.07 if any(s.is_bound for s in spans) else high
