"""Two results side by side, one row per cell."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keelbench.records import Record
from keelbench.report.names import title_of
from keelbench.report.numbers import decimal, estimate_number
from keelbench.report.pairs import Pair, Side, pair_cells
from keelbench.report.summary import Row
from keelbench.report.tables.caption import caption
from keelbench.report.tables.cells_table import depth_text, width_column
from keelbench.report.tables.table import Column, Face, Table
from keelbench.stats import MIN_VALUES

SIDES = ("first", "second")


def comparison_table(
    first: Sequence[Record],
    second: Sequence[Record],
    first_name: str = "baseline",
    second_name: str = "current",
) -> Table:
    """Max LR of the same cells in two sets of records, and the ratio of second to first.

    Raises:
        KeelbenchError: if a set has no records.
    """
    pairs = pair_cells(first, second)
    rows = [_row(pair) for pair in pairs]
    sides = [side.row for pair in pairs for side in (pair.first, pair.second) if side]
    return Table(
        columns=tuple(_columns(rows, first_name, second_name)),
        rows=tuple(rows),
        caption=caption(sides),
        notes=tuple(_notes(rows, first_name, second_name)),
        sections=("depth", "width", "setting"),
    )


def _row(pair: Pair) -> Row:
    row = pair.either.row
    ratio = pair.ratio
    fields: dict[str, Any] = {
        name: row[name]
        for name in ("arch", "depth", "blocks", "width", "setting", "confidence")
    }
    for name, side in zip(SIDES, (pair.first, pair.second), strict=True):
        fields |= {f"{name}_{key}": value for key, value in _side_fields(side).items()}
    return {
        **fields,
        "ratio": None if ratio is None else ratio.mean,
        "ratio_low": None if ratio is None else ratio.low,
        "ratio_high": None if ratio is None else ratio.high,
        "change": _change(pair),
        "differences": ", ".join(pair.differences),
    }


def _side_fields(side: Side | None) -> dict[str, Any]:
    return {name: None if side is None else side.row[name] for name in _SIDE_FIELDS}


_SIDE_FIELDS = (
    "cell",
    "n",
    "lanes",
    "censored",
    "max_lr",
    "max_lr_low",
    "max_lr_high",
    "quantum_percent",
    "slope",
)


def _change(pair: Pair) -> str:
    ratio = pair.ratio
    if pair.first is None or pair.second is None:
        return "one side only"
    if ratio is None or ratio.mean is None:
        return "no ratio"
    if ratio.low is None or ratio.high is None:
        return "not tested"
    if ratio.low > 1:
        return "higher"
    return "lower" if ratio.high < 1 else "not shown"


def _columns(rows: Sequence[Row], first_name: str, second_name: str) -> list[Column]:
    percent = f"{100 * rows[0]['confidence']:.0f} %"
    columns = [
        Column("arch", "architecture", lambda row, face: face.arch(row["arch"]), "left"),
        Column("depth", "depth\n(blocks)", depth_text),
        width_column(rows),
        Column("first", f"{first_name}\nMax LR", _side_text("first"), "left"),
        Column("second", f"{second_name}\nMax LR", _side_text("second"), "left"),
        Column("ratio", f"ratio\n[{percent} interval]", _ratio_text, "left"),
        Column("change", "change", lambda row, _: str(row["change"]), "left", importance=1),
        Column("n", "n", _n_text, importance=2),
    ]
    if any(row["differences"] for row in rows):
        columns.append(
            Column(
                "differences",
                "settings\nthat differ",
                lambda row, face: row["differences"] or face.missing,
                "left",
                importance=3,
                breaks=True,
            )
        )
    return columns


def _side_text(name: str) -> Callable[[Row, Face], str]:
    """Max LR of one side; the interval that counts is that of the ratio."""

    def text(row: Row, face: Face) -> str:
        if row[f"{name}_cell"] is None:
            return face.missing
        side = {key: row[f"{name}_{key}"] for key in _SIDE_FIELDS}
        number = estimate_number(side, "max_lr")
        if number is None:
            return face.missing
        bound = "" if side["max_lr"] is not None else face.at_least
        return bound + face.number(number.without_interval())

    return text


def _ratio_text(row: Row, face: Face) -> str:
    if row["ratio"] is None:
        return face.missing
    return face.number(decimal(row["ratio"], row["ratio_low"], row["ratio_high"]))


def _n_text(row: Row, face: Face) -> str:
    counts = [row[f"{name}_n"] for name in SIDES]
    return " / ".join(face.missing if count is None else str(count) for count in counts)


def _notes(rows: Sequence[Row], first_name: str, second_name: str) -> Iterator[str]:
    yield (
        f"ratio: {second_name} / {first_name}, paired by seed; none where a lane survived. "
        "Several cells at once: some will differ by chance (keelbench check corrects for that)"
    )
    if any(row["change"] == "not tested" for row in rows):
        yield f"fewer than {MIN_VALUES} seeds in common: the ratio is not tested"
    differing: dict[str, list[str]] = {}
    for row in rows:
        if row["differences"]:
            cell = f"{title_of(row['arch'])} at depth {row['depth']}"
            differing.setdefault(row["differences"], []).append(cell)
    for text, cells in differing.items():
        both = sum(row["change"] != "one side only" for row in rows)
        subject = "all pairs differ" if len(cells) == both else f"{'; '.join(cells)} differ"
        yield f"{subject} in {text}"
