"""Max LR against each setting that was changed alone: what the number depends on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keelbench.records import Record
from keelbench.report.cells import Cell, group, setting_of, written_settings
from keelbench.report.numbers import lr_text, plain_value
from keelbench.report.plots.canvas import at_least_arrow, log_axis, message, padded, styled
from keelbench.report.plots.looks import COLUMN_INCHES, GRID, MUTED, PAPER
from keelbench.report.plots.study_panels import (
    Row,
    by,
    finite,
    legend,
    line,
    looks_in,
    panels,
)
from keelbench.report.summary import rows_of, summarise
from keelbench.specs import FIELD_NAMES

APART = 0.13
"""Distance between architectures at one value, in units of that between values."""


@styled
def settings_figure(
    changed: Mapping[str, Sequence[Row]], *, width: float | None = None
) -> Figure:
    """A panel per setting that was changed alone, with its values side by side.

    A panel holds the cells that agree with the most common cell in everything but its setting;
    that cell's value is shaded. Max LR is normalized to width 1024. Lower bounds have an arrow;
    a value at which an architecture has no Max LR stays empty.

    Args:
        changed: from :func:`single_changes`.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if no setting was changed alone.
    """
    rows = [row for found in changed.values() for row in found]
    looks = looks_in(rows)
    columns = 1 if width and width <= COLUMN_INCHES else min(3, len(changed))
    figure, shown = panels([_title(name) for name in changed], columns=columns, width=width)
    values = finite(row[key] for row in rows for key in ("shown", "shown_low", "shown_high"))
    for axes, found in zip(shown, changed.values(), strict=True):
        if values:
            log_axis(axes, "y", *padded(min(values), max(values)), text=lr_text, labels=5)
        else:
            message(axes, "no lane has a Max LR")
        _value_axis(axes, found)
        for number, (arch, points) in enumerate(by(found, "arch").items()):
            shift = APART * (number - (len(looks) - 1) / 2)
            placed = [{**row, "x": row["place"] + shift} for row in points]
            line(axes, placed, looks[arch], "x", "shown")
            for row in placed:
                if row["is_bound"]:
                    color = looks[arch].color
                    axes.plot(row["x"], row["shown"], "o", color=PAPER, markersize=2, zorder=4)
                    at_least_arrow(axes, row["x"], row["shown"], color, (0, 12))
    for axes in shown[::columns]:
        axes.set_ylabel("Max LR × width / 1024")
    legend(figure, looks.values())
    return figure


def single_changes(records: Sequence[Record]) -> dict[str, list[Row]]:
    """Rows by the dotted setting that was changed alone; without depth, which has a figure.

    An architecture counts where it was measured at two values or more. Each row has ``arch``,
    ``value``, its ``place`` among the panel's values, the normalized Max LR ``shown`` with its
    interval (or a lower bound: ``is_bound``), and ``is_base``.
    """
    cells = group(records)
    summary = rows_of(summarise(records))
    summaries = {(row["cell"], row["detector"]): row for row in summary}
    written = [
        {name: str(value) for name, value in written_settings(cell.spec).items()}
        for cell in cells
    ]
    names = [name for name in FIELD_NAMES if name != "model.arch"]
    base = {name: Counter(one[name] for one in written).most_common(1)[0][0] for name in names}
    unlike = [{name for name in names if one[name] != base[name]} for one in written]
    found: dict[str, list[Row]] = {}
    for name in (name for name in names if name != "model.depth"):
        members = [
            (cell, setting_of(cell.spec, name), not diff)
            for cell, diff in zip(cells, unlike, strict=True)
            if diff <= {name}
        ]
        points = {(cell.spec.model.arch, value) for cell, value, _ in members}
        compared = Counter(arch for arch, _ in points)
        members = [one for one in members if compared[one[0].spec.model.arch] > 1]
        places = sorted({value for _, value, _ in members}, key=_order)
        if members:
            found[name] = [
                _row(cell, summaries[cell.id, cell.detector])
                | {"value": value, "place": float(places.index(value)), "is_base": is_base}
                for cell, value, is_base in members
            ]
    return found


def _row(cell: Cell, row: Mapping[str, Any]) -> Row:
    is_bound = row["normalized"] is None and row["normalized_low"] is not None
    return {
        "arch": cell.spec.model.arch,
        "shown": row["normalized_low"] if is_bound else row["normalized"],
        "shown_low": None if is_bound else row["normalized_low"],
        "shown_high": None if is_bound else row["normalized_high"],
        "is_bound": is_bound,
    }


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then words."""
    is_number = isinstance(value, int | float)
    return (0, float(value), "") if is_number else (1, 0.0, str(value))


def _title(name: str) -> str:
    words = {"source": "text", "seq": "tokens per sequence", "batch": "sequences per step"}
    words |= {"slope": "slope (LR per step)", "dtype": "precision", "init_std": "initial std"}
    inner = name.rpartition(".")[2]
    return words.get(inner, inner.replace("_", " "))


def _value_axis(axes: Axes, rows: Sequence[Row]) -> None:
    labels = {row["place"]: plain_value(row["value"]) for row in rows}
    places = sorted(labels)
    axes.set_xlim(places[0] - 0.5, places[-1] + 0.5)
    axes.set_xticks(places, [labels[place] for place in places])
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", length=0)
    for place in {row["place"] for row in rows if row["is_base"]}:
        axes.axvspan(place - 0.5, place + 0.5, color=GRID, alpha=0.5, linewidth=0, zorder=0)
        axes.get_xticklabels()[places.index(place)].set_color(MUTED)
