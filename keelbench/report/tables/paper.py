"""Our numbers beside Table 1 of arXiv 2601.19895: value, ratio, rank, and Kendall's tau."""

from collections.abc import Sequence

from scipy import stats

from keelbench.errors import KeelbenchError
from keelbench.records import Record, Rule
from keelbench.report.cells import group
from keelbench.report.names import title_of
from keelbench.report.numbers import estimate_number, lr_text
from keelbench.report.summary import Row, rows_of, summarise
from keelbench.report.tables.caption import caption
from keelbench.report.tables.table import Column, Face, Table

PAPER_TABLE_1: dict[int, dict[str, float]] = {
    64: {
        "post_ln": 3.0e-4,
        "deepnorm": 3.5e-4,
        "hybridnorm": 4.9e-4,
        "mix_ln": 8.6e-4,
        "pre_ln": 7.65e-3,
        "keel": 1.01e-2,
    },
    512: {
        "post_ln": 2.8e-4,
        "deepnorm": 3.5e-4,
        "hybridnorm": 3.5e-4,
        "mix_ln": 3.5e-4,
        "pre_ln": 4.67e-3,
        "keel": 6.31e-3,
    },
}
"""Max LR by depth in sub-layers: single runs at width 1024 (section 5.1, Table 1)."""


def paper_tables(records: Sequence[Record]) -> list[Table]:
    """A table for each setting that the records hold: what differs is never mixed.

    Raises:
        KeelbenchError: if no record is of one of the paper's cells.
    """
    families: dict[str, list[Record]] = {}
    for cell in group(records):
        if cell.spec.model.arch in PAPER_TABLE_1.get(cell.spec.model.depth, {}):
            families.setdefault(cell.family, []).extend(cell.lanes)
    return [paper_table(lanes) for lanes in families.values()] or [paper_table(records)]


def paper_table(records: Sequence[Record]) -> Table:
    """One row per cell of the paper's table that was measured, in the paper's order.

    The records agree in everything but architecture, depth and seed. The rank counts from 1
    for the highest; a cell without a value, or of which most lanes stagnated, ranks below all
    others (it never learned from context). Ties share a mean rank.

    Raises:
        KeelbenchError: if no record is of one of the paper's cells.
    """
    stuck = _stagnated(records)
    rows: list[Row] = []
    notes = []
    found = rows_of(summarise(records, reference=None))
    for depth, paper in PAPER_TABLE_1.items():
        ours = {
            row["arch"]: row for row in found if row["depth"] == depth and row["arch"] in paper
        }
        names = [arch for arch in paper if arch in ours]
        if not names:
            continue
        values = [_rank_value(ours[arch], (arch, depth) in stuck) for arch in names]
        our_ranks = stats.rankdata([-value for value in values])
        paper_ranks = stats.rankdata([-paper[arch] for arch in names])
        for arch, our_rank, paper_rank in zip(names, our_ranks, paper_ranks, strict=True):
            row = ours[arch]
            ratio = None if row["normalized"] is None else row["normalized"] / paper[arch]
            rows.append(
                {
                    **row,
                    "paper": paper[arch],
                    "to_paper": ratio,
                    "our_rank": our_rank,
                    "paper_rank": paper_rank,
                }
            )
        if len(names) > 2:
            tau = stats.kendalltau(values, [paper[arch] for arch in names]).statistic
            notes.append(f"depth {depth}: Kendall's tau-b with the paper's order {tau:.2f}")
    if not rows:
        raise KeelbenchError(
            "no record is of a cell in the paper's Table 1 (its six architectures at depth "
            "64 or 512)",
            "measure them with: keelbench compare sweeps/table1-proxy.yaml",
        )
    notes.append("paper: arXiv 2601.19895, Table 1, single runs at width 1024, slope 1e-5")
    return Table(
        columns=_columns(),
        rows=tuple(rows),
        caption=caption(rows, []),
        notes=tuple(notes),
        sections=("depth",),
    )


def _columns() -> tuple[Column, ...]:
    return (
        Column("arch", "architecture", lambda row, _: title_of(row["arch"]), "left"),
        Column("depth", "depth", lambda row, _: str(row["depth"])),
        Column("paper", "paper", lambda row, _: lr_text(row["paper"])),
        Column("normalized", "ours, normalized\n[95 % interval]", _normalized, "left"),
        Column("to_paper", "ours /\npaper", _ratio),
        Column("paper_rank", "rank,\npaper", lambda row, _: f"{row['paper_rank']:g}"),
        Column("our_rank", "rank,\nours", lambda row, _: f"{row['our_rank']:g}"),
    )


def _normalized(row: Row, face: Face) -> str:
    number = estimate_number(row, "normalized")
    if number is None:
        return face.missing
    return ("" if row["max_lr"] is not None else face.at_least) + face.number(number)


def _ratio(row: Row, face: Face) -> str:
    return face.missing if row["to_paper"] is None else f"{row['to_paper']:.2f}"


def _rank_value(row: Row, is_stagnated: bool) -> float:
    if is_stagnated:
        return 0.0
    return float(row["normalized"] or row["normalized_low"] or 0.0)


def _stagnated(records: Sequence[Record]) -> set[tuple[str, int]]:
    """(architecture, depth) of which most lanes stopped at the level of no context."""
    lanes: dict[tuple[str, int], list[bool]] = {}
    for record in records:
        key = (record.cell.model.arch, record.cell.model.depth)
        lanes.setdefault(key, []).append(record.verdict.rule is Rule.STAGNATION)
    return {key for key, stuck in lanes.items() if 2 * sum(stuck) > len(stuck)}
