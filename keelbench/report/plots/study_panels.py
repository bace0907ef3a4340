"""What the figures of studies share: panels, lines with intervals, one legend."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def legend(figure: Figure, looks: Iterable[Look]) -> None:
    """One legend above all panels."""
    looks = list(looks)
    longest = max(len(look.title) for look in looks)
    fitting = max(1, int(figure.get_figwidth() / (0.5 + LETTER_INCHES * longest)))
    rows = math.ceil(len(looks) / fitting)
    figure.legend(
        handles=[handle(look) for look in looks],
        loc="outside upper center",
        ncols=math.ceil(len(looks) / rows),
        frameon=False,
        handlelength=2.6,
        columnspacing=1.2,
        handletextpad=0.5,
        borderaxespad=0,
    )


def line(axes: Axes, rows: Sequence[Row], look: Look, x: str, y: str) -> None:
    """A line through the rows that have a value, with their intervals where there are any."""
    found = [row for row in sorted(rows, key=lambda row: float(row[x])) if row[y] is not None]
    axes.plot(
        [row[x] for row in found],
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
            axes.plot([row[x], row[x]], [low, high], color=look.color, linewidth=1.0, zorder=2)


def by(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """Rows grouped by the values of some fields, in the order of their first row."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        found.setdefault(key[0] if len(names) == 1 else key, []).append(row)
    return found


def finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
