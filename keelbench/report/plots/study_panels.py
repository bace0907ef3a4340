"""What the figures of studies share: panels, lines with intervals, one legend."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from keelbench.errors import KeelbenchError
from keelbench.report.plots.canvas import LETTER_INCHES, calm, handle
from keelbench.report.plots.looks import (
    COLUMN_INCHES,
    MUTED,
    PAGE_INCHES,
    PAPER,
    Look,
    looks_of,
)

Row = dict[str, Any]

PANEL_INCHES = 2.1
"""Height of a panel."""

LEGEND_INCHES = 0.4

DOTTED = (0, (1, 2))
"""Dash of reference lines."""


def panels(
    titles: Sequence[str], *, columns: int | None = None, width: float | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with a titled panel per entry, as wide as a column or a page."""
    count = len(titles)
    columns = columns or min(count, 3)
    rows = math.ceil(count / columns)
    width = width or (COLUMN_INCHES if columns == 1 else PAGE_INCHES)
    figure = Figure(figsize=(width, PANEL_INCHES * rows + LEGEND_INCHES), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[count:]:
        axes.remove()
    shown = list(grid.flat[:count])
    for axes, title in zip(shown, titles, strict=True):
        axes.set_title(title, loc="left", pad=3, color=MUTED)
        calm(axes, "both")
    return figure, shown


def looks_in(rows: Iterable[Row]) -> dict[str, Look]:
    """The look of every architecture in these rows.

    Raises:
        KeelbenchError: if there are no rows.
    """
    looks = looks_of(row["arch"] for row in rows)
    if not looks:
        raise KeelbenchError("there is nothing to draw")
    return looks


def legend(
    figure: Figure,
    looks: Iterable[Look],
    *,
    has_markers: bool = True,
    strokes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """One legend above all panels.

    Args:
        has_markers: False where the curves have none.
        strokes: what further kinds of lines mean, and their style.
    """
    handles = [handle(look) for look in looks]
    if not has_markers:
        for entry in handles:
            entry.set_marker("none")
    handles += [
        Line2D([], [], **{"color": MUTED, "linewidth": 1.2, "label": text, **style})
        for text, style in strokes.items()
    ]
    longest = max(len(str(entry.get_label())) for entry in handles)
    fitting = max(1, int(figure.get_figwidth() / (0.5 + LETTER_INCHES * longest)))
    rows = math.ceil(len(handles) / fitting)
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=math.ceil(len(handles) / rows),
        frameon=False,
        handlelength=2.6,
        columnspacing=1.2,
        handletextpad=0.5,
        borderaxespad=0,
    )


def label_rows(grid: Iterable[Axes], text: str) -> None:
    """The same y label at the left of every row of panels."""
    for axes in grid:
        place = axes.get_subplotspec()
        if place is not None and place.is_first_col():
            axes.set_ylabel(text)


def apart(count: int, low: float, high: float) -> list[float]:
    """Factors that move so many lines apart on a log axis, so that no interval hides another.

    Neighbours are 1.2 % of the axis apart.
    """
    step = max(high / low, 2.0) ** 0.012
    return [float(step ** (position - (count - 1) / 2)) for position in range(count)]


def line(
    axes: Axes, rows: Sequence[Row], look: Look, x: str, y: str, *, moved: float = 1.0
) -> None:
    """A line through the rows that have a value, with their intervals where there are any.

    ``moved``: a factor on x, from ``apart``.
    """
    found = [row for row in sorted(rows, key=lambda row: float(row[x])) if row[y] is not None]
    axes.plot(
        [row[x] * moved for row in found],
        [row[y] for row in found],
        color=look.color,
        linestyle=look.dash,
        linewidth=1.1,
        marker=look.marker,
        markersize=4,
        markeredgecolor=PAPER,
        markeredgewidth=0.4,
        zorder=3,
    )
    for row in found:
        low, high = row.get(f"{y}_low"), row.get(f"{y}_high")
        if low is not None and high is not None:
            place = row[x] * moved
            axes.plot([place, place], [low, high], color=look.color, linewidth=1.0, zorder=2)


def by(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """Rows grouped by the values of some fields, in the order of their first row."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        found.setdefault(key[0] if len(names) == 1 else key, []).append(row)
    return found


def finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
