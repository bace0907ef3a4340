"""The tidy summary and the JSON of results: what is claimed, and what is not."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import sample

from keelbench.errors import KeelbenchError
from keelbench.records import Record, Rule, Trace, Verdict, VerdictKind
from keelbench.report.cells import group, varying_settings
from keelbench.report.pairs import pair_cells
from keelbench.report.results_json import (
    RESULTS_SCHEMA,
    lane_json,
    lanes_json,
    results_json,
    to_text,
    verdict_json,
)
from keelbench.report.summary import BEST, TIED, Row, rows_of, summarise
from keelbench.stats import estimate_records, paired_ratio

ROOT = Path(__file__).parents[1]


def rows(records: list[Record], reference: str | None = "pre_ln") -> dict[str, Row]:
    """Rows of cells at one depth by architecture."""
    return {row["arch"]: row for row in rows_of(summarise(records, reference=reference))}


def test_value_and_interval_are_those_of_stats() -> None:
    lanes = [sample.record("keel", 64, seed) for seed in range(5)]
    row, expected = rows(lanes)["keel"], estimate_records(lanes)
    assert (row["max_lr"], row["max_lr_low"], row["max_lr_high"]) == (
        expected.mean,
        expected.low,
        expected.high,
    )
    assert (row["n"], row["censored"], row["lanes"]) == (5, 0, 5)
    assert row["normalized"] == pytest.approx(row["max_lr"] * 64 / 1024)
    assert row["quantum_percent"] == pytest.approx(100 * 1.6e-4 / row["max_lr"], rel=0.05)


def test_censored_lanes_never_enter_a_mean() -> None:
    row = rows(sample.mixed())["keel"]
    assert row["max_lr"] is None and row["max_lr_high"] is None
    values = [lane.max_lr or lane.lower_bound for lane in sample.mixed()[6:9]]
    bound = math.exp(sum(math.log(value) for value in values if value) / 3)
    assert row["max_lr_low"] == pytest.approx(bound)
    assert (row["n"], row["censored"], row["ratio"]) == (1, 2, None)


@pytest.mark.parametrize("arch", ["mix_ln", "hybridnorm"])
def test_never_learned_and_failed_have_no_value_but_a_reason(arch: str) -> None:
    row = rows(sample.mixed())[arch]
    names = ("max_lr", "max_lr_low", "normalized", "ratio", "quantum_percent")
    assert [row[name] for name in names] == [None] * 5
    assert row["reason"]


def test_verdicts_are_counted() -> None:
    row = rows(sample.mixed())["keel"]
    kinds = [row[str(kind)] for kind in VerdictKind]
    assert kinds == [1, 2, 0, 0]
    assert row["rules"] == "1 irrecoverable instability"


def test_fewer_than_three_seeds_claim_no_interval() -> None:
    row = rows(sample.study(archs=("keel", "pre_ln"), depths=(64,), seeds=2))["keel"]
    assert row["max_lr"] is not None and row["ratio"] is not None
    assert row["max_lr_low"] is None and row["ratio_low"] is None
    assert row["standing"] == ""


def test_ratio_is_paired_by_seed() -> None:
    records = sample.study(archs=("keel", "pre_ln"), depths=(64,))
    values = {
        arch: {
            lane.seed: lane.max_lr or 0.0 for lane in records if lane.cell.model.arch == arch
        }
        for arch in ("keel", "pre_ln")
    }
    row = rows(records)["keel"]
    expected = paired_ratio(values["keel"], values["pre_ln"])
    assert row["ratio"] == pytest.approx(expected.mean)
    assert row["ratio_low"] == pytest.approx(expected.low)
    assert rows(records)["pre_ln"]["ratio"] is None, "the reference is not compared with itself"
    assert rows(records, reference=None)["keel"]["reference"] is None
    assert rows(records, reference="deepnorm")["keel"]["reference"] is None


def test_ratio_needs_the_same_setting() -> None:
    records = [
        *sample.study(archs=("pre_ln",), depths=(64,), data__batch=16),
        *sample.study(archs=("keel",), depths=(64,)),
    ]
    assert rows(records)["keel"]["reference"] is None


def test_settings_that_differ_are_columns() -> None:
    records = [*sample.study(depths=(64,)), *sample.study(depths=(64,), data__batch=16)]
    table = summarise(records)
    assert sorted(table["data.batch"].unique()) == [8, 16]
    assert len(table) == 12


def test_settings_that_follow_from_the_width_are_not_columns_but_the_slope_is() -> None:
    specs = [sample.cell(width=64), sample.cell(width=256)]
    assert varying_settings(specs) == ["ramp.slope"]
    assert varying_settings([sample.cell(), sample.cell(model__heads=2)]) == ["model.heads"]
    assert varying_settings([sample.cell()]) == []


def test_rank_is_within_equal_settings() -> None:
    table = summarise([*sample.study(), *sample.study(depths=(64,), ramp__slope=3.2e-4)])
    assert (table.groupby("setting")["rank"].apply(list) == [[1, 2, 3, 4, 5, 6]] * 3).all()
    best = table[table["standing"] == BEST]
    assert list(best["arch"]) == ["pre_ln"] * 3
    slopes = list(table[table["depth"] == 64]["slope"])
    assert slopes == sorted(slopes), "settings come in order of their values"


def test_what_cannot_be_told_from_the_best_is_tied() -> None:
    onsets = {"keel": (300, 330, 310), "pre_ln": (305, 310, 320), "post_ln": (20, 21, 22)}
    table = rows(
        [
            sample.record(arch, 64, seed, onset=onset)
            for arch, series in onsets.items()
            for seed, onset in enumerate(series)
        ]
    )
    standings = {arch: row["standing"] for arch, row in table.items()}
    assert standings == {"keel": BEST, "pre_ln": TIED, "post_ln": ""}


def test_nothing_is_best_while_a_survivor_may_be_higher() -> None:
    assert {row["standing"] for row in rows(sample.mixed()).values()} == {""}


def test_a_record_counts_once_and_detectors_do_not_mix() -> None:
    lane = sample.record()
    (cell,) = group([lane, lane])
    assert len(cell.lanes) == 1
    assert len(group([lane, sample.record(detector="2")])) == 2


def test_no_records_are_refused() -> None:
    with pytest.raises(KeelbenchError, match="no records"):
        summarise([])


def test_every_awkward_input_has_a_summary_and_json() -> None:
    for name, records in sample.awkward().items():
        assert len(summarise(records)) == len(group(records)), name
        assert "NaN" not in to_text(results_json(records)), name


def test_json_follows_the_schema() -> None:
    values = results_json(sample.mixed())
    assert list(values)[:2] == ["schema", "cells"]
    assert values["schema"] == RESULTS_SCHEMA == "keelbench.results/1"
    cell = values["cells"][0]
    agreed = ("arch", "depth", "width", "slope", "batch", "seq", "data", "dtype")
    assert {*agreed, "max_lr", "normalized_max_lr", "lanes", "detector"} <= set(cell)
    assert list(cell["max_lr"]) == ["mean", "low", "high", "n", "censored"]
    lane = ("seed", "verdict", "rule", "onset_step", "detected_step", "max_lr", "steps")
    assert {*lane, "seconds"} <= set(cell["lanes"][0])
    assert values["environment"]["torch"] == "2.13.0"
    assert json.loads(to_text(values)) == values


def test_json_has_null_for_what_does_not_exist() -> None:
    cells = {cell["arch"]: cell for cell in results_json(sample.mixed())["cells"]}
    none = {"mean": None, "low": None, "high": None, "n": 0, "censored": 0}
    assert cells["mix_ln"]["max_lr"] == none
    assert cells["deepnorm"]["max_lr"]["mean"] is None
    assert cells["deepnorm"]["max_lr"]["low"] == pytest.approx(0.064)
    failed = cells["hybridnorm"]["lanes"][0]
    assert (failed["rule"], failed["onset_step"], failed["max_lr"]) == (None, None, None)
    survivor = cells["deepnorm"]["lanes"][0]
    assert survivor["max_lr"] is None and survivor["at_least"] == pytest.approx(0.064)


def test_json_agrees_with_the_summary() -> None:
    records = sample.mixed()
    for cell, row in zip(
        results_json(records)["cells"], rows_of(summarise(records)), strict=True
    ):
        ends = {"mean": "max_lr", "low": "max_lr_low", "high": "max_lr_high"}
        assert {key: cell["max_lr"][key] for key in ends} == {
            key: row[name] for key, name in ends.items()
        }


def test_json_lists_every_environment() -> None:
    lanes = sample.study(archs=("keel",), depths=(64,))
    other = dataclasses.replace(lanes[0].environment, torch="2.14.0")
    values = results_json([*lanes[:2], dataclasses.replace(lanes[2], environment=other)])
    assert values["environment"]["torch"] == "2.13.0"
    assert [found["torch"] for found in values["other_environments"]] == ["2.14.0"]


def test_lane_json_is_what_a_judged_log_gives() -> None:
    lane = sample.record()
    judged = verdict_json(lane.trace, lane.verdict, lane.max_lr)
    assert judged.items() <= lane_json(lane).items()
    assert len(lanes_json(sample.mixed())) == 16


def test_a_not_finite_number_becomes_null() -> None:
    lane = Trace(lr=sample.np.array([1.0]), loss=sample.np.array([1.0]))
    verdict = Verdict(kind=VerdictKind.DIVERGED, rule=Rule.NON_FINITE, onset_step=1)
    assert verdict_json(lane, verdict, float("nan"))["max_lr"] is None


def test_pairs_find_equal_cells_and_what_changed() -> None:
    first = sample.study(archs=("keel", "pre_ln", "mix_ln"), depths=(64,))
    second = sample.study(archs=("keel", "pre_ln"), depths=(64, 128), data__batch=16)
    pairs = pair_cells(first, second)
    both = [pair for pair in pairs if pair.first and pair.second]
    assert [pair.either.row["arch"] for pair in both] == ["pre_ln", "keel"]
    assert both[0].differences == ["data.batch 8 -> 16"]
    assert both[0].ratio is not None and both[0].ratio.mean == pytest.approx(1.0)
    assert len(pairs) == 5
    same = pair_cells(first, first)
    assert all(pair.differences == [] for pair in same) and len(same) == 3


def test_reporting_needs_no_torch_and_no_global_figures() -> None:
    code = (
        "import sys, keelbench.report.html, keelbench.report.lane, keelbench.report.tables\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules), sys.modules.keys()\n"
        "import keelbench.report\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, keelbench.report\n"
        "assert not {'torch', 'pandas', 'matplotlib', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
