"""The main table: one row per cell."""

from collections.abc import Callable, Sequence

from keelbench.records import Record, VerdictKind
from keelbench.report.cells import group, varying_settings
from keelbench.report.names import title_of
from keelbench.report.numbers import Number, decimal, estimate_number, plain_value
from keelbench.report.summary import DEFAULT_REFERENCE, Row, rows_of, summarise
from keelbench.report.tables.caption import caption, notes
from keelbench.report.tables.table import IN_CAPTION, Column, Face, Table


def cells_table(
    records: Sequence[Record], *, reference: str | None = DEFAULT_REFERENCE
) -> Table:
    """The table of all cells, best first within a depth.

    Raises:
        KeelbenchError: if there are no records.
    """
    rows = rows_of(summarise(records, reference=reference))
    varying = varying_settings([cell.spec for cell in group(records)])
    return Table(
        columns=tuple(_columns(rows, varying)),
        rows=tuple(rows),
        caption=caption(rows, varying),
        notes=tuple(notes(rows)),
        sections=("depth", "width", "setting"),
    )


def setting_column(name: str) -> Column:
    """A column for a setting in which the cells differ."""
    header = name.rpartition(".")[2]
    unit = "\n(LR/step)" if header == "slope" else ""
    return Column(name, header + unit, lambda row, _: plain_value(row[name]), heads=True)


def width_column(rows: Sequence[Row]) -> Column:
    """The width: shown if it differs, else left to the caption where space is short."""
    many = len({row["width"] for row in rows}) > 1
    importance = 0 if many else IN_CAPTION
    return Column(
        "width", "width", plain("width"), importance=importance, in_papers=many, heads=True
    )


def plain(field: str) -> Callable[[Row, Face], str]:
    """The text of a whole number or a word."""
    return lambda row, face: face.missing if row[field] is None else str(row[field])


def seconds_text(row: Row, face: Face) -> str:
    return face.missing if row["seconds"] is None else f"{row['seconds']:.0f}"


def _columns(rows: Sequence[Row], varying: Sequence[str]) -> list[Column]:
    percent = f"{100 * rows[0]['confidence']:.0f} %"
    reference = next((row["reference"] for row in rows if row["reference"]), None)
    columns = [
        Column("arch", "architecture", _arch_text, "left"),
        Column("depth", "depth\n(blocks)", depth_text),
        width_column(rows),
        *(setting_column(name) for name in varying),
        Column("n", "n", _n_text, importance=1),
        Column("max_lr", f"Max LR\n[{percent} interval]", _max_lr_text, "left"),
        Column("normalized", "normalized\n(w = 1024)", _normalized, "left", importance=2),
        Column(
            "verdicts",
            "verdicts",
            _verdicts_text,
            "left",
            importance=3,
            in_papers=False,
            breaks=True,
        ),
    ]
    if reference is not None:
        header = f"ratio to {title_of(reference)}\n[{percent} interval]"
        columns.append(Column("ratio", header, _ratio_text, "left", importance=4))
    percent_header = "ramp step\n(% of Max LR)"
    return [
        *columns,
        Column("quantum_percent", percent_header, _quantum_text, importance=5, in_papers=False),
        Column("steps", "steps", plain("steps"), importance=6, in_papers=False),
        Column("seconds", "time\n(s)", seconds_text, importance=7, in_papers=False),
    ]


def _arch_text(row: Row, face: Face) -> str:
    return face.arch(row["arch"], row["standing"])


def depth_text(row: Row, face: Face) -> str:
    """Sub-layers, and blocks in brackets."""
    return f"{row['depth']} ({row['blocks']})"


def _n_text(row: Row, face: Face) -> str:
    return str(row["n"]) if row["n"] == row["lanes"] else f"{row['n']}/{row['lanes']}"


def _max_lr_text(row: Row, face: Face) -> str:
    return _estimate_text(estimate_number(row, "max_lr"), row, face)


def _normalized(row: Row, face: Face) -> str:
    """Without its interval, which is the same in relation to the value."""
    number = estimate_number(row, "normalized")
    return _estimate_text(number and number.without_interval(), row, face)


def _estimate_text(number: Number | None, row: Row, face: Face) -> str:
    if number is None:
        return face.missing
    return ("" if row["max_lr"] is not None else face.at_least) + face.number(number)


def _ratio_text(row: Row, face: Face) -> str:
    if row["arch"] == row["reference"]:
        return "1"
    if row["ratio"] is None:
        return face.missing
    return face.number(decimal(row["ratio"], row["ratio_low"], row["ratio_high"]))


def _quantum_text(row: Row, face: Face) -> str:
    value = row["quantum_percent"]
    return face.missing if value is None else f"{value:.2g}"


def _verdicts_text(row: Row, face: Face) -> str:
    kinds = ((kind, row[str(kind)]) for kind in VerdictKind)
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds if count)
