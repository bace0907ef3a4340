"""Our numbers beside the paper's. Run: pytest tests/test_paper_table.py"""

import pytest
from sample import record, study

from keelbench.errors import KeelbenchError
from keelbench.records import Rule, VerdictKind
from keelbench.report.tables import render_paper
from keelbench.report.tables.paper import PAPER_TABLE_1, paper_table


def lanes(arch, onset, *, rule=Rule.INSTABILITY, depth=64):
    return [record(arch, depth, seed, onset=onset, rule=rule) for seed in range(3)]


def test_ratio_is_normalized_over_paper():
    (row,) = paper_table(lanes("keel", 101)).rows
    assert row["normalized"] == pytest.approx(1.6e-4 * 100 * 64 / 1024, rel=0.2)
    assert row["to_paper"] == pytest.approx(row["normalized"] / 1.01e-2)


def test_the_papers_own_order_has_tau_one():
    order = sorted(PAPER_TABLE_1[64], key=PAPER_TABLE_1[64].__getitem__)
    records = [r for i, arch in enumerate(order) for r in lanes(arch, 40 + 40 * i)]
    table = paper_table(records)
    assert "tau-b with the paper's order 1.00" in table.notes[0]
    assert [row["our_rank"] for row in table.rows] == [row["paper_rank"] for row in table.rows]


def test_a_reversed_order_has_tau_minus_one():
    order = sorted(PAPER_TABLE_1[64], key=PAPER_TABLE_1[64].__getitem__, reverse=True)
    records = [r for i, arch in enumerate(order) for r in lanes(arch, 40 + 40 * i)]
    assert "-1.00" in paper_table(records).notes[0]


def test_stagnated_cells_share_the_lowest_rank_with_those_that_never_learned():
    records = lanes("hybridnorm", 90, rule=Rule.STAGNATION) + lanes("post_ln", 60)
    records += [record("mix_ln", 64, s, kind=VerdictKind.NEVER_LEARNED) for s in range(3)]
    ranks = {row["arch"]: row["our_rank"] for row in paper_table(records).rows}
    assert ranks == {"post_ln": 1.0, "hybridnorm": 2.5, "mix_ln": 2.5}


def test_a_bound_stays_a_bound():
    records = [record("keel", 64, seed, kind=VerdictKind.SURVIVED) for seed in range(3)]
    text = render_paper(records)
    assert ">=" in text or "≥" in text
    assert paper_table(records).rows[0]["to_paper"] is None


@pytest.mark.parametrize("skin", ["terminal", "markdown", "csv", "json", "latex"])
def test_every_skin_renders(skin):
    text = render_paper(study(), skin)
    assert "1.01e-2" in text or "0.0101" in text or r"10^{-2}" in text
    if skin == "terminal":
        assert max(map(len, text.splitlines())) <= 80


def test_settings_are_never_mixed():
    larger = [record("keel", 64, seed, onset=200, data__batch=32) for seed in range(3)]
    records = lanes("keel", 101) + lanes("pre_ln", 120) + larger
    text = render_paper(records)
    assert text.count("rank,\n".strip()) == 4 and text.count("Keel") == 2
    assert "batch 8 × 64" in text and "batch 32 × 64" in text and "8 / 32" not in text
    assert render_paper(records, "csv").count("\n") == 4


def test_records_of_other_cells_are_refused():
    with pytest.raises(KeelbenchError, match="Table 1"):
        paper_table(lanes("keel", 100, depth=16))
