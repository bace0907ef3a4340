"""The second table: every seed's verdict, one row per lane."""

from collections.abc import Sequence

from keelbench.records import Record
from keelbench.report.cells import Cell, group, setting_of, varying_settings
from keelbench.report.names import title_of
from keelbench.report.numbers import scientific, seeds_text
from keelbench.report.results_json import lane_json
from keelbench.report.summary import WITHOUT_VALUE, Row, rows_of, summarise
from keelbench.report.tables.caption import caption
from keelbench.report.tables.cells_table import (
    plain,
    seconds_text,
    setting_column,
    width_column,
)
from keelbench.report.tables.table import Column, Face, Table
from keelbench.stats import quantum_of


def lanes_table(records: Sequence[Record]) -> Table:
    """The table of all lanes, cells in the order of the main table.

    Raises:
        KeelbenchError: if there are no records.
    """
    cells = {(cell.id, cell.detector): cell for cell in group(records)}
    varying = varying_settings([cell.spec for cell in cells.values()])
    cell_rows = rows_of(summarise(records))
    rows = [
        row
        for cell_row in cell_rows
        for row in _lane_rows(cells[cell_row["cell"], cell_row["detector"]], varying)
    ]
    return Table(
        columns=tuple(_columns(rows, varying)),
        rows=tuple(rows),
        caption=caption(cell_rows, varying),
        notes=tuple(_notes(rows)),
        sections=("cell", "detector"),
    )


def _lane_rows(cell: Cell, varying: Sequence[str]) -> list[Row]:
    model = cell.spec.model
    return [
        {
            "arch": model.arch,
            "depth": model.depth,
            "width": model.width,
            **{name: setting_of(cell.spec, name) for name in varying},
            **lane_json(lane),
            "quantum_lr": quantum_of(lane) * (lane.max_lr or 0.0) or cell.quantum,
            "cell": cell.id,
            "detector": cell.detector,
            "first_to_move": first_to_move(lane),
        }
        for lane in cell.lanes
    ]


def _columns(rows: Sequence[Row], varying: Sequence[str]) -> list[Column]:
    return [
        Column("arch", "arch", lambda row, face: face.arch(row["arch"]), "left"),
        Column("depth", "depth", plain("depth")),
        width_column(rows),
        *(setting_column(name) for name in varying),
        Column("seed", "seed", plain("seed")),
        Column("verdict", "verdict", _verdict_text, "left"),
        Column("onset_step", "onset\n(step)", plain("onset_step"), importance=1),
        Column(
            "detected_step",
            "noticed\n(step)",
            plain("detected_step"),
            importance=4,
            in_papers=False,
        ),
        Column("max_lr", "Max LR", _max_lr_text, "left"),
        *_moves_column(rows),
        Column("steps", "steps", plain("steps"), importance=2, in_papers=False),
        Column("seconds", "time\n(s)", seconds_text, importance=3, in_papers=False),
        Column("id", "record", plain("id"), "left", importance=4, in_papers=False),
        Column("reason", "reason", plain("reason"), "left", importance=8, in_papers=False),
    ]


def first_to_move(lane: Record) -> str | None:
    """What ``maxlr --diagnose`` found: ``5 ffn, step 50``; None if nobody looked."""
    found = (lane.diagnosis or {}).get("first_to_move")
    if found is None:
        return None
    if found["site"] is None:
        return "none"
    return f"{found['site']} {found['branch']}, step {found['step']}"


def _moves_column(rows: Sequence[Row]) -> list[Column]:
    """The sub-layer that moved first, where any lane was diagnosed."""
    if all(row["first_to_move"] is None for row in rows):
        return []
    return [Column("first_to_move", "moved first\n(sub-layer)", plain("first_to_move"), "left")]


def _verdict_text(row: Row, face: Face) -> str:
    kind = str(row["verdict"]).replace("_", " ")
    if not row["rule"]:
        return kind
    rule = str(row["rule"])
    return f"{kind}: {rule if face.titles else rule.removeprefix('irrecoverable ')}"


def _max_lr_text(row: Row, face: Face) -> str:
    value = row["max_lr"] if row["max_lr"] is not None else row["at_least"]
    if value is None:
        return face.missing
    number = face.number(scientific(value, quantum=row["quantum_lr"]))
    return number if row["max_lr"] is not None else face.at_least + number


def _notes(rows: Sequence[Row]) -> list[str]:
    """Each reason once, with the seeds that it holds for."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["reason"] and row["verdict"] in WITHOUT_VALUE:
            key = (f"{title_of(row['arch'])} at depth {row['depth']}", row["reason"])
            seeds.setdefault(key, []).append(int(row["seed"]))
    return [
        f"{cell}, {seeds_text(numbers)}: {reason}" for (cell, reason), numbers in seeds.items()
    ]
