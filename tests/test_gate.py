"""The decision: verdicts, error rates, looks, exact mode, calibration."""

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from gate_sample import (
    ENVIRONMENT,
    agreed,
    cell,
    deal,
    lane,
    lanes,
    noisy,
    not_carried_out,
)
from hypothesis import given
from hypothesis import strategies as st

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.gate import (
    Baseline,
    Calibration,
    CellReport,
    CellVerdict,
    GateReport,
    build_baseline,
    calibrate,
    compare_exact,
    decide,
    plan,
    run_check,
    run_exact,
    run_repeats,
)
from keelbench.gate.judge import Sample, judge, pooled_variance
from keelbench.gate.sequential import ALPHA, TAIL, spend
from keelbench.records import Record, VerdictKind
from keelbench.specs import CellSpec

OLD = [0.030, 0.034, 0.027, 0.031, 0.029]
DIVERGED, SURVIVED = VerdictKind.DIVERGED, VerdictKind.SURVIVED
NEVER, FAILED = VerdictKind.NEVER_LEARNED, VerdictKind.FAILED


def one(values: Sequence[float], **settings: object) -> list[Record]:
    return lanes(cell(**settings), values)


@pytest.fixture
def baseline() -> Baseline:
    return build_baseline("ci", one(OLD))


def the_cell(report: GateReport) -> CellReport:
    assert len(report.cells) == 1
    return report.cells[0]


def scaled(ratio: float, wobble: float = 0.0) -> list[Record]:
    """The lanes of OLD times a ratio, wobbling by alternating signs."""
    return one([v * ratio * math.exp(wobble * (-1) ** i) for i, v in enumerate(OLD)])


# Verdicts of one cell


@pytest.mark.parametrize(
    ("ratio", "wobble", "verdict", "code"),
    [
        (1.0, 0.0, CellVerdict.PASS, 0),
        (0.97, 0.02, CellVerdict.PASS, 0),
        (0.75, 0.0, CellVerdict.REGRESSED, 1),
        (0.70, 0.08, CellVerdict.REGRESSED, 1),
        (1.40, 0.05, CellVerdict.IMPROVED, 0),
        (1.05, 0.08, CellVerdict.WITHIN_NOISE, 0),
        (0.97, 0.10, CellVerdict.WITHIN_NOISE, 0),
        (0.93, 0.30, CellVerdict.INCONCLUSIVE, 0),
        (0.88, 0.05, CellVerdict.INCONCLUSIVE, 0),
    ],
)
def test_verdicts_by_effect(
    baseline: Baseline, ratio: float, wobble: float, verdict: CellVerdict, code: int
) -> None:
    report = decide(baseline, scaled(ratio, wobble), looks=plan(5, 5))
    assert the_cell(report).verdict is verdict
    assert report.verdict is verdict
    assert report.exit_code == code
    assert not report.wanted_seeds()


def test_strict_makes_inconclusive_an_error(baseline: Baseline) -> None:
    records = scaled(0.93, 0.30)
    assert decide(baseline, records, looks=plan(5, 5), strict=True).exit_code == 4
    assert decide(baseline, scaled(1.0), looks=plan(5, 5), strict=True).exit_code == 0


def test_a_regression_needs_the_whole_interval_beyond_the_margin(baseline: Baseline) -> None:
    found = the_cell(decide(baseline, scaled(0.88, 0.02), looks=plan(5, 5)))
    assert found.p_value is not None and found.p_value < 0.01, "significant, but"
    assert found.ratio and found.ratio.high and found.ratio.high > 0.90, "not beyond 10 %"
    assert found.verdict is CellVerdict.INCONCLUSIVE
    tight = decide(baseline, scaled(0.88, 0.02), looks=plan(5, 5), margin=0.05)
    assert the_cell(tight).verdict is CellVerdict.REGRESSED


def test_a_regression_needs_the_test_after_holm() -> None:
    """The same cell regresses alone and not among many: the correction counts."""
    drop = [0.5, 0.75, 0.6, 0.85, 0.55]
    archs = [f"keel(alpha={n})" for n in range(2)]
    alone = build_baseline("ci", one(OLD, arch=archs[0]))
    now = lanes(cell(archs[0]), np.multiply(OLD, drop))
    assert decide(alone, now, looks=plan(5, 5)).exit_code == 1
    both = build_baseline("ci", [*one(OLD, arch=archs[0]), *one(OLD, arch=archs[1])])
    other = lanes(cell(archs[1]), np.multiply(OLD, [1.2, 0.8, 1.1, 0.9, 1.0]))
    found = decide(both, [*now, *other], looks=plan(5, 5)).cells[0]
    alone_p = decide(alone, now, looks=plan(5, 5)).cells[0].p_value
    assert found.p_value == pytest.approx(2 * alone_p)


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_seeds_decide_nothing_and_say_so(n: int) -> None:
    baseline = build_baseline("ci", one(OLD[:n]))
    records = [record for record in scaled(0.5) if record.seed < n]
    found = the_cell(decide(baseline, records))
    assert found.verdict is CellVerdict.INCONCLUSIVE
    assert f"cannot decide with {n} seed" in found.reason


def test_bit_identical_lanes_pass_with_any_number_of_seeds() -> None:
    baseline = build_baseline("ci", one(OLD[:1]))
    found = the_cell(decide(baseline, one(OLD[:1])))
    assert found.verdict is CellVerdict.PASS and "bit for bit" in found.reason


def test_the_reason_has_the_numbers(baseline: Baseline) -> None:
    reason = the_cell(decide(baseline, scaled(0.75), looks=plan(5, 5))).reason
    assert "fell by 25 %" in reason and "90 % interval" in reason and "margin of 10 %" in reason


# Lanes without a value


def replaced(kind: VerdictKind, seeds: Sequence[int], values: Sequence[float] = OLD) -> list:
    """The lanes of OLD, of which some have no Max LR."""
    spec = cell()
    return [
        lane(spec, seed, kind=kind) if seed in seeds else lane(spec, seed, value)
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize("kind", [NEVER, DIVERGED])
@pytest.mark.parametrize("seeds", [(0, 1), range(5)])
def test_lanes_that_lost_their_value_are_a_regression(
    baseline: Baseline, kind: VerdictKind, seeds: Sequence[int]
) -> None:
    report = decide(baseline, replaced(kind, seeds))
    assert the_cell(report).verdict is CellVerdict.REGRESSED
    assert report.exit_code == ExitCode.REGRESSION
    outcome = "never learned" if kind is NEVER else "diverged at once"
    assert outcome in the_cell(report).reason


def test_a_loss_that_is_not_finite_at_the_first_step_is_failed_and_exit_1(
    baseline: Baseline,
) -> None:
    report = decide(baseline, replaced(FAILED, range(5)))
    assert the_cell(report).verdict is CellVerdict.FAILED
    assert report.exit_code == ExitCode.REGRESSION


def test_a_run_that_could_not_be_carried_out_is_failed_and_exit_5(baseline: Baseline) -> None:
    spec = cell()
    report = decide(baseline, [not_carried_out(spec, seed) for seed in range(3)])
    assert the_cell(report).verdict is CellVerdict.FAILED
    assert "out of memory" in the_cell(report).reason
    assert report.exit_code == ExitCode.FAILED
    some = decide(baseline, [not_carried_out(spec, 0), *scaled(1.0)[1:]])
    assert some.exit_code == ExitCode.FAILED


def test_one_lost_lane_of_many_is_neither_a_regression_nor_a_pass(baseline: Baseline) -> None:
    found = the_cell(decide(baseline, replaced(NEVER, [4]), looks=plan(5, 5)))
    assert found.verdict is CellVerdict.INCONCLUSIVE
    assert "1 of 5 lanes lost its Max LR" in found.reason


def test_where_lanes_are_lost_by_habit_a_lost_lane_is_no_regression() -> None:
    baseline = build_baseline("ci", replaced(NEVER, [0]))
    found = the_cell(decide(baseline, replaced(NEVER, [1, 2]), looks=plan(5, 5)))
    assert found.verdict is CellVerdict.INCONCLUSIVE
    all_lost = the_cell(decide(baseline, replaced(NEVER, range(5)), looks=plan(5, 5)))
    assert all_lost.verdict is CellVerdict.REGRESSED


def test_no_value_before_and_now_is_a_pass_and_a_new_value_an_improvement() -> None:
    baseline = build_baseline("ci", replaced(NEVER, range(5)))
    spec = cell()
    still = [lane(spec, seed, kind=NEVER, losses=(5.0, 5.1)) for seed in range(5)]
    assert the_cell(decide(baseline, still)).verdict is CellVerdict.PASS
    assert the_cell(decide(baseline, scaled(1.0))).verdict is CellVerdict.IMPROVED


def test_lanes_that_survive_on_both_sides_are_equal() -> None:
    baseline = build_baseline("ci", replaced(SURVIVED, range(5)))
    spec = cell()
    other = [lane(spec, seed, kind=SURVIVED, losses=(5.0, 2.0)) for seed in range(5)]
    report = decide(baseline, other)
    assert the_cell(report).verdict is CellVerdict.PASS
    assert any("count as their peak" in note for note in report.notes)


def test_a_survivor_that_breaks_far_below_the_peak_is_a_regression() -> None:
    baseline = build_baseline("ci", replaced(SURVIVED, range(5)))
    found = the_cell(decide(baseline, scaled(1.0), looks=plan(5, 5)))
    assert found.verdict is CellVerdict.REGRESSED
    assert "at least" in found.reason


def test_a_survivor_that_breaks_just_below_the_peak_is_not_called_a_pass() -> None:
    baseline = build_baseline("ci", replaced(SURVIVED, range(5)))
    peak = cell().ramp.peak
    found = the_cell(decide(baseline, one([peak * 0.999] * 5), looks=plan(5, 5)))
    assert found.verdict is CellVerdict.INCONCLUSIVE
    assert "only known to be at least" in found.reason


def test_values_that_now_survive_are_an_improvement(baseline: Baseline) -> None:
    found = the_cell(decide(baseline, replaced(SURVIVED, range(5)), looks=plan(5, 5)))
    assert found.verdict is CellVerdict.IMPROVED
    assert found.ratio and found.ratio.censored == 5


# Margin


def test_margin_is_never_below_two_quanta() -> None:
    coarse = {"slope": 3e-3}
    baseline = build_baseline("ci", one([0.03] * 5, **coarse))
    found = the_cell(decide(baseline, one([0.03] * 5, **coarse), margin=0.05))
    assert found.quantum == pytest.approx(0.1)
    assert found.margin == pytest.approx(1 - 1.1**-2)
    shifted = the_cell(decide(baseline, one([0.027] * 5, **coarse), margin=0.05))
    assert shifted.verdict is not CellVerdict.REGRESSED, "one step is not a drop"


def test_margin_comes_from_the_argument_then_calibration_then_default() -> None:
    rng = np.random.default_rng(0)
    repeats = [r for _ in range(4) for r in noisy(rng, {"keel": np.array(OLD)}, 0.15)]
    plain = build_baseline("ci", one(OLD))
    measured = plain.calibrated(calibrate(repeats))
    assert the_cell(decide(plain, scaled(1.0))).margin == pytest.approx(0.10)
    own = the_cell(decide(measured, scaled(1.0))).margin
    assert own == pytest.approx(measured.cells[0].calibration.margin)
    assert own > 0.10
    assert the_cell(decide(measured, scaled(1.0), margin=0.2)).margin == pytest.approx(0.2)


@pytest.mark.parametrize("margin", [0.0, 1.0, -0.1, 10])
def test_margins_out_of_range_are_usage_errors(baseline: Baseline, margin: float) -> None:
    with pytest.raises(KeelbenchError, match="must lie between 0 and 1") as caught:
        decide(baseline, scaled(1.0), margin=margin)
    assert caught.value.exit_code == ExitCode.USAGE


# Cells and settings


def test_settings_that_differ_are_named_and_not_compared(baseline: Baseline) -> None:
    report = decide(baseline, one(OLD, dtype="bfloat16", clip=0.5))
    found = the_cell(report)
    assert found.verdict is CellVerdict.NOT_COMPARABLE
    assert "dtype: float32 -> bfloat16" in found.reason
    assert "optim.clip: 1.0 -> 0.5" in found.reason
    assert "--allow dtype" in found.reason and "--allow optim.clip" in found.reason
    assert report.exit_code == ExitCode.NO_BASELINE


def test_settings_may_differ_where_allowed(baseline: Baseline) -> None:
    records = lanes(cell(dtype="bfloat16", clip=0.5), np.multiply(OLD, 0.7))
    partly = decide(baseline, records, allow=["dtype"])
    assert the_cell(partly).verdict is CellVerdict.NOT_COMPARABLE
    assert "dtype" not in the_cell(partly).reason
    wholly = decide(baseline, records, allow=["dtype", "clip"], looks=plan(5, 5))
    assert the_cell(wholly).verdict is CellVerdict.REGRESSED


def test_a_cell_that_is_not_comparable_does_not_count_among_the_tests() -> None:
    baseline = build_baseline("ci", [*one(OLD), *one(OLD, arch="pre_ln")])
    other = lanes(cell("pre_ln", clip=0.5), np.multiply(OLD, 1.01))
    both = decide(baseline, [*scaled(0.8, 0.05), *other], looks=plan(5, 5))
    alone = decide(baseline, scaled(0.8, 0.05), looks=plan(5, 5))
    assert both.cells[1].verdict is CellVerdict.NOT_COMPARABLE
    assert both.cells[0].p_value == alone.cells[0].p_value


def test_allow_of_an_unknown_setting_is_a_usage_error(baseline: Baseline) -> None:
    with pytest.raises(KeelbenchError, match="did you mean 'dtype'") as caught:
        decide(baseline, scaled(1.0), allow=["dtpye"])
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_cell_added_to_the_sweep(baseline: Baseline) -> None:
    report = decide(baseline, [*scaled(1.0), *one(OLD, arch="pre_ln")])
    assert [c.verdict for c in report.cells] == [CellVerdict.PASS, CellVerdict.NEW]
    assert "no such cell" in report.cells[1].reason
    assert report.exit_code == ExitCode.NO_BASELINE


def test_a_cell_removed_from_the_sweep() -> None:
    baseline = build_baseline("ci", [*one(OLD), *one(OLD, arch="pre_ln")])
    report = decide(baseline, scaled(1.0))
    assert [c.verdict for c in report.cells] == [CellVerdict.PASS, CellVerdict.MISSING]
    assert "no longer" in report.cells[1].reason
    assert report.exit_code == ExitCode.NO_BASELINE


def test_a_cell_asked_for_and_never_run_is_a_failure(baseline: Baseline) -> None:
    report = decide(baseline, [], asked=[cell()], more=False)
    assert the_cell(report).verdict is CellVerdict.FAILED
    assert report.exit_code == ExitCode.FAILED


def test_nothing_to_check(baseline: Baseline) -> None:
    with pytest.raises(KeelbenchError, match="no results") as caught:
        decide(baseline, [])
    assert caught.value.exit_code == ExitCode.FAILED


def test_another_detector(baseline: Baseline) -> None:
    records = [dataclasses.replace(r, detector="8") for r in scaled(1.0)]
    with pytest.raises(KeelbenchError, match=r"read by detector 7, .* detector 8") as caught:
        decide(baseline, records)
    assert caught.value.exit_code == ExitCode.NO_BASELINE


def test_another_hardware_class(baseline: Baseline) -> None:
    arm = dataclasses.replace(ENVIRONMENT, platform="Linux-aarch64")
    records = [dataclasses.replace(r, environment=arm) for r in scaled(1.0)]
    with pytest.raises(KeelbenchError, match=r"is for cpu-x86_64, .* cpu-aarch64") as caught:
        decide(baseline, records)
    assert caught.value.exit_code == ExitCode.NO_BASELINE
    assert decide(baseline, records, allow=["hardware"]).exit_code == 0


def test_another_torch_is_noted_and_compared(baseline: Baseline) -> None:
    newer = dataclasses.replace(ENVIRONMENT, torch="2.14.0")
    records = [dataclasses.replace(r, environment=newer) for r in scaled(1.0)]
    report = decide(baseline, records)
    assert report.exit_code == 0
    assert report.notes == ("torch: 2.13.0 in the baseline, 2.14.0 now",)


def test_the_worst_cell_gives_the_verdict_and_regression_the_exit_code() -> None:
    archs = ("keel", "pre_ln", "post_ln")
    baseline = build_baseline("ci", [r for arch in archs for r in one(OLD, arch=arch)])
    records = [
        *scaled(0.5),
        *(not_carried_out(cell("pre_ln"), seed) for seed in range(3)),
    ]
    report = decide(baseline, records, looks=plan(3, 3))
    verdicts = [c.verdict for c in report.cells]
    assert verdicts == [CellVerdict.REGRESSED, CellVerdict.FAILED, CellVerdict.MISSING]
    assert report.verdict is CellVerdict.REGRESSED
    assert report.exit_code == ExitCode.REGRESSION
    rest = dataclasses.replace(report, cells=report.cells[1:])
    assert rest.exit_code == ExitCode.FAILED


# Looks


@given(st.integers(1, 12), st.integers(0, 20), st.floats(0.001, 0.2))
def test_a_plan_spends_exactly_its_error(first: int, extra: int, error: float) -> None:
    looks = plan(first, first + extra, alpha=error, tail=error)
    assert sum(look.alpha for look in looks) == pytest.approx(error)
    assert sum(look.tail for look in looks) == pytest.approx(error)
    seeds = [look.seeds for look in looks]
    assert seeds[0] == first and seeds[-1] == first + extra
    assert seeds == sorted(set(seeds))
    assert all(look.alpha > 0 for look in looks)


def test_plans() -> None:
    assert [look.seeds for look in plan()] == [3, 5]
    assert [look.seeds for look in plan(3, 8)] == [3, 5, 8]
    (single,) = plan(5, 5)
    assert (single.alpha, single.tail) == pytest.approx((ALPHA, TAIL))
    assert spend([3, 5], 0.01)[1] > 0.9 * 0.01, "the last look is almost as sharp as a lone one"


@pytest.mark.parametrize(("first", "last"), [(0, 3), (5, 3), (-1, -1)])
def test_plans_that_make_no_sense(first: int, last: int) -> None:
    with pytest.raises(KeelbenchError, match="cannot plan"):
        plan(first, last)
    with pytest.raises(KeelbenchError, match="error rates"):
        plan(alpha=0.6)


class Machine:
    """Deals prepared records, and remembers what it was asked to run."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.calls: list[tuple[list[str], tuple[int, ...]]] = []

    def __call__(self, cells: Sequence[CellSpec], seeds: Sequence[int]) -> list[Record]:
        self.calls.append(([spec.model.arch for spec in cells], tuple(seeds)))
        hashes = {spec.hash for spec in cells}
        return [r for r in self.records if r.cell.hash in hashes and r.seed in seeds]


def two_cells(keel_ratio: float, wobble: float) -> tuple[Baseline, Machine, list[CellSpec]]:
    baseline = build_baseline("ci", [*one(OLD), *one(OLD, arch="pre_ln")])
    machine = Machine([*scaled(keel_ratio, wobble), *one(OLD, arch="pre_ln")])
    return baseline, machine, [cell("keel"), cell("pre_ln")]


def test_a_clear_pass_costs_the_first_seeds_only() -> None:
    baseline, machine, cells = two_cells(0.99, 0.01)
    report = run_check(baseline, cells, machine)
    assert report.verdict is CellVerdict.PASS
    assert machine.calls == [(["keel", "pre_ln"], (0, 1, 2))]


def test_a_close_call_costs_more_seeds_of_that_cell_only() -> None:
    baseline, machine, cells = two_cells(0.90, 0.04)
    seen: list[GateReport] = []
    report = run_check(baseline, cells, machine, on_look=seen.append)
    assert machine.calls == [(["keel", "pre_ln"], (0, 1, 2)), (["keel"], (3, 4))]
    assert report.cells[0].verdict is CellVerdict.INCONCLUSIVE
    assert seen[1].cells[0].reason == "undecided: seed 3, 4 is still to be run"
    assert len(report.cells[0].pairs) == 5 and len(report.cells[1].pairs) == 3


def test_settled_cells_stay_settled() -> None:
    """More lanes of a settled cell change nothing: no second chance for noise."""
    baseline, machine, cells = two_cells(0.90, 0.04)
    run = run_check(baseline, cells, machine)
    replay = decide(baseline, machine.records, asked=cells)
    assert [c.verdict for c in replay.cells] == [c.verdict for c in run.cells]
    assert [len(c.pairs) for c in replay.cells] == [5, 3]
    assert replay.cells[0].p_value == run.cells[0].p_value


def test_more_seeds_are_not_wanted_than_the_baseline_has() -> None:
    baseline = build_baseline("ci", one(OLD[:3]))
    machine = Machine(scaled(0.90, 0.04))
    report = run_check(baseline, [cell()], machine, looks=plan(3, 8))
    assert machine.calls == [(["keel"], (0, 1, 2))]
    assert the_cell(report).verdict is CellVerdict.INCONCLUSIVE


def test_a_machine_that_returns_nothing_does_not_loop(baseline: Baseline) -> None:
    machine = Machine([])
    report = run_check(baseline, [cell()], machine)
    assert report.exit_code == ExitCode.FAILED
    assert len(machine.calls) <= 3


def test_new_and_changed_cells_are_not_run(baseline: Baseline) -> None:
    machine = Machine(scaled(1.0))
    report = run_check(baseline, [cell(clip=0.5), cell("pre_ln")], machine)
    assert machine.calls == []
    assert {c.verdict for c in report.cells} == {CellVerdict.NOT_COMPARABLE, CellVerdict.NEW}


# Error rates


def calibrated(baseline: Baseline, sd: float, df: int = 10) -> Baseline:
    """The baseline with this noise in every cell."""
    noise = Calibration(sd=sd, df=df, margin=0.1)
    return baseline.calibrated({one.hash: noise for one in baseline.cells})


def test_100_checks_of_unchanged_code_never_regress() -> None:
    rng = np.random.default_rng(1)
    worst = []
    for gate in range(100):
        values = deal(rng)
        sd = (0.0, 0.02, 0.05, 0.10)[gate % 4]
        report = decide(agreed(values), noisy(rng, values, sd))
        worst.append(report.verdict)
        assert report.exit_code == 0
    assert worst.count(CellVerdict.REGRESSED) == 0
    assert worst[::4] == [CellVerdict.PASS] * 25, "without noise all is equal"


@pytest.mark.parametrize("sd", [0.05, 0.10])
def test_a_drop_of_a_quarter_in_one_cell_of_six_is_seen(sd: float) -> None:
    rng = np.random.default_rng(2)
    seen = 0
    for _ in range(40):
        values = deal(rng)
        report = decide(calibrated(agreed(values), sd), noisy(rng, values, sd, {"keel": 0.75}))
        verdicts = {c.spec.model.arch: c.verdict for c in report.cells}
        seen += verdicts.pop("keel") is CellVerdict.REGRESSED
        assert CellVerdict.REGRESSED not in verdicts.values()
    assert seen >= 37


@pytest.fixture(scope="module")
def power() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gate_power.py"
    spec = importlib.util.spec_from_file_location("gate_power", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gate_power"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cells", [1, 3, 6, 12])
@pytest.mark.parametrize("name", ["all 0.05", "all 0.10", "all 0.20", "0.02 to 0.45"])
@pytest.mark.parametrize(("tails", "df"), [(np.inf, 0), (4, 0), (np.inf, 10), (4, 10)])
def test_false_alarms_stay_below_one_percent_per_gate(
    power: ModuleType, cells: int, name: str, tails: float, df: int
) -> None:
    same = power.Scenario(
        spread=power.SPREADS[name](cells),
        effect=np.zeros(cells),
        tails=tails,
        calibration_df=df,
    )
    found = power.simulate(same, gates=2000, looks=plan(), seed=cells)
    assert found.regressed.any(axis=1).mean() <= 0.0135, "1 % and 1.6 se of the simulation"


@pytest.mark.parametrize("cells", [3, 6, 12])
@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_calibration_on_a_quieter_machine_does_not_cry_wolf(
    power: ModuleType, cells: int, share: float
) -> None:
    noisier = power.Scenario(
        spread=np.full(cells, 0.2),
        effect=np.zeros(cells),
        calibration_df=10,
        calibrated_share=share,
    )
    found = power.simulate(noisier, gates=3000, looks=plan(), seed=cells)
    assert found.regressed.any(axis=1).mean() <= 0.03


@pytest.mark.parametrize(
    ("cells", "sd", "df", "least"),
    [
        (1, 0.10, 10, 0.95),
        (3, 0.10, 10, 0.95),
        (6, 0.10, 10, 0.95),
        (12, 0.07, 10, 0.97),
        (1, 0.07, 0, 0.98),
        (12, 0.05, 0, 0.95),
    ],
)
def test_power_for_a_drop_of_a_quarter(
    power: ModuleType, cells: int, sd: float, df: int, least: float
) -> None:
    effect = np.r_[np.zeros(cells - 1), math.log(0.75)]
    dropped = power.Scenario(spread=np.full(cells, sd), effect=effect, calibration_df=df)
    found = power.simulate(dropped, gates=4000, looks=plan(), seed=cells)
    assert found.regressed[:, -1].mean() >= least


def test_a_drop_of_just_the_margin_is_seldom_called_one(power: ModuleType) -> None:
    edge = power.Scenario(spread=np.full(6, 0.05), effect=np.full(6, math.log(0.9)))
    found = power.simulate(edge, gates=3000, looks=plan(), seed=1)
    assert found.regressed.mean() <= TAIL


def test_the_simulation_takes_the_decisions_of_check(power: ModuleType) -> None:
    """Both share the arithmetic; this holds the order of looks and the stopping together."""
    rng = np.random.default_rng(3)
    archs = ("keel", "pre_ln", "post_ln", "mix_ln")
    values = {arch: np.full(5, 0.03) for arch in archs}
    baseline = agreed(values)
    quantum, delta = 1.6e-4 / 0.03, -math.log(0.9)
    for gate in range(40):
        noise = (0.05, 10) if gate % 2 else (0.0, 0)
        ratio = rng.uniform(0.6, 1.1, 4)
        records = noisy(rng, values, 0.08, dict(zip(archs, ratio, strict=True)))
        report = decide(calibrated(baseline, *noise), records)
        d = np.log([[r.max_lr / 0.03 for r in records[5 * i : 5 * i + 5]] for i in range(4)])
        found = power.replay(d[None], plan(), delta, quantum, *noise)
        regressed = [c.verdict is CellVerdict.REGRESSED for c in report.cells]
        assert regressed == found.regressed[0].tolist()
        assert [c.verdict is CellVerdict.PASS for c in report.cells] == found.passed[0].tolist()
        assert [len(c.pairs) for c in report.cells] == found.seeds[0].tolist()


# The arithmetic of one look

numbers = st.lists(
    st.tuples(st.integers(0, 8), st.floats(-2, 2), st.floats(0, 1), st.floats(0, 0.3)),
    min_size=1,
    max_size=8,
)


@given(numbers)
def test_a_look_is_of_one_mind(cells: list[tuple[int, float, float, float]]) -> None:
    n, mean, sd, quantum = (np.array(column) for column in zip(*cells, strict=True))
    delta = np.maximum(-math.log(0.9), 2 * np.log1p(quantum))
    sample = Sample(
        n=n, mean=mean, sd=sd, quantum=quantum, delta=delta, noise_sd=sd[::-1], noise_df=n[::-1]
    )
    (look,) = plan(5, 5)
    found = judge(sample, look, np.ones(len(n), bool))
    flags = np.array([found.regressed, found.improved, found.passed], int)
    assert (flags.sum(axis=0) <= 1).all()
    assert not (found.regressed & found.no_drop).any()
    assert found.no_drop[found.passed].all() and found.no_drop[found.improved].all()
    assert not (found.regressed & found.no_evidence).any()
    assert (mean[found.regressed] < -delta[found.regressed]).all()
    too_few = n < 3
    assert not flags[:, too_few].any() and np.isinf(found.half[too_few]).all()
    settled = judge(sample, look, np.zeros(len(n), bool))
    assert not (settled.regressed | settled.passed | settled.no_drop).any()


def test_settled_cells_still_count_in_holms_correction() -> None:
    cells = np.ones(4)
    sample = Sample(
        n=np.full(4, 5),
        mean=np.array([-0.2, -2.0, -2.0, -2.0]),
        sd=0.1 * cells,
        quantum=0 * cells,
        delta=0.1 * cells,
        noise_sd=0 * cells,
        noise_df=np.zeros(4, int),
    )
    look = plan(5, 5)[0]
    alone = judge(sample, look, np.arange(4) == 0).p_down
    among = judge(sample, look, np.ones(4, bool)).p_down
    assert alone[0] == pytest.approx(4 * among[0]), "the smallest of four, for all it knows"
    assert alone[1:].tolist() == [1.0, 1.0, 1.0]


def spread_of(
    sd: Sequence[float], noise_sd: Sequence[float], noise_df: Sequence[int], n: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Standard deviation and degrees of freedom used for cells with n pairs each."""
    cells = np.zeros(len(sd))
    sample = Sample(
        n=np.full(len(sd), n),
        mean=cells,
        sd=np.array(sd),
        quantum=cells,
        delta=cells + 0.1,
        noise_sd=np.array(noise_sd),
        noise_df=np.array(noise_df),
    )
    variance, df = pooled_variance(sample, sample.n - 1, sample.n > 2)
    return np.sqrt(variance), df


def test_calibrated_noise_joins_the_spread_by_degrees_of_freedom() -> None:
    sd, df = spread_of([0.05, 0.05], [0.07, 0.0], [12, 0])
    assert sd.tolist() == pytest.approx([math.sqrt((4 * 0.05**2 + 12 * 0.07**2) / 16), 0.05])
    assert df.tolist() == [16, 4]


def test_a_wild_cell_sets_aside_its_own_calibration_only() -> None:
    sd, df = spread_of([0.5, 0.04, 0.05, 0.06], [0.05] * 4, [10] * 4)
    assert sd[0] == 0.5
    assert df.tolist() == [4, 14, 14, 14]


def test_a_noisier_machine_sets_aside_all_calibrations() -> None:
    _, df = spread_of([0.10] * 6, [0.05] * 6, [10] * 6)
    assert df.tolist() == [4] * 6
    _, df = spread_of([0.05] * 6, [0.05] * 6, [10] * 6)
    assert df.tolist() == [14] * 6


def test_repeats_without_any_noise_are_no_calibration(baseline: Baseline) -> None:
    """They only show that one machine is deterministic."""
    records = scaled(0.97, 0.004)
    plain = the_cell(decide(baseline, records, looks=plan(5, 5)))
    silent = the_cell(decide(calibrated(baseline, 0.0), records, looks=plan(5, 5)))
    assert silent.ratio == plain.ratio and silent.p_value == plain.p_value


def test_a_calibration_sharpens_the_gate(baseline: Baseline) -> None:
    records = scaled(0.75, 0.12)
    assert decide(baseline, records, looks=plan(3, 3), more=False).exit_code == 0
    sharper = calibrated(baseline, 0.07)
    assert decide(sharper, records, looks=plan(3, 3), more=False).exit_code == 1


# Exact


def test_exact_passes_on_the_same_bits(baseline: Baseline) -> None:
    report = compare_exact(baseline, one(OLD))
    assert report.verdict is CellVerdict.PASS and report.is_exact


def test_exact_names_the_first_lane_and_step(baseline: Baseline) -> None:
    spec = cell()
    other = np.nextafter(OLD[3], 1)
    wrong = lane(spec, 3, OLD[3], losses=(5.0, 7.0, other, 0.2))
    report = compare_exact(baseline, [*one(OLD[:3]), wrong])
    found = the_cell(report)
    assert found.verdict is CellVerdict.DIFFERS
    assert report.exit_code == ExitCode.REGRESSION
    assert "1 of 4 lanes differ; seed 3: first difference at step 2" in found.reason
    assert str(other) in found.reason and str(OLD[3]) in found.reason


def test_exact_sees_another_length(baseline: Baseline) -> None:
    longer = lane(cell(), 0, OLD[0], losses=(5.0, 4.0, OLD[0], 0.1, 0.1))
    found = the_cell(compare_exact(baseline, [longer]))
    assert "equal for 4 steps, then the baseline has 4 steps and this run 5" in found.reason


def test_exact_on_checksums_alone() -> None:
    lean = build_baseline("ci", one(OLD), max_losses=0)
    assert compare_exact(lean, one(OLD)).exit_code == 0
    found = the_cell(compare_exact(lean, scaled(1.01)))
    assert "5 of 5 lanes differ; seed 0: the checksums differ" in found.reason


def test_exact_takes_nan_for_nan() -> None:
    spec = cell()
    nan = float("nan")
    baseline = build_baseline("ci", [lane(spec, 0, 0.03, losses=(5.0, nan))])
    assert compare_exact(baseline, [lane(spec, 0, 0.03, losses=(5.0, -nan))]).exit_code == 0


def test_exact_failures(baseline: Baseline) -> None:
    crashed = compare_exact(baseline, [not_carried_out(cell(), 0)])
    assert crashed.exit_code == ExitCode.FAILED
    unrun = compare_exact(baseline, [lane(cell(), 99, 0.03)])
    assert unrun.exit_code == ExitCode.FAILED
    assert compare_exact(baseline, one(OLD, clip=0.5)).exit_code == ExitCode.NO_BASELINE
    with pytest.raises(KeelbenchError, match="no results"):
        compare_exact(baseline, [])


def test_run_exact_runs_the_first_seeds(baseline: Baseline) -> None:
    machine = Machine(one(OLD))
    assert run_exact(baseline, [cell()], machine, seeds=2).exit_code == 0
    assert machine.calls == [(["keel"], (0, 1))]
    disjoint = build_baseline("ci", [lane(cell(), 0, 0.03), lane(cell("pre_ln"), 1, 0.03)])
    with pytest.raises(KeelbenchError, match="no seed in common"):
        run_exact(disjoint, [cell()], machine, seeds=2)


# Calibration


def test_calibration_measures_the_noise_between_repeats() -> None:
    rng = np.random.default_rng(4)
    values = deal(rng, archs=("keel", "pre_ln"), seeds=8)
    repeats = [r for _ in range(40) for r in noisy(rng, values, 0.05)]
    found = calibrate(repeats)
    assert set(found) == {cell("keel").hash, cell("pre_ln").hash}
    for one_cell in found.values():
        assert one_cell.df == 8 * 39
        assert one_cell.sd == pytest.approx(0.05 * math.sqrt(2), rel=0.1)


def test_an_unchanged_cell_passes_at_the_calibrated_margin() -> None:
    rng = np.random.default_rng(5)
    values = {"keel": np.full(5, 0.03)}
    noise = 0.15
    baseline = agreed(values)
    repeats = [r for _ in range(30) for r in noisy(rng, values, noise / math.sqrt(2))]
    measured = baseline.calibrated(calibrate(repeats, seeds=5))
    passed = sum(
        the_cell(decide(measured, noisy(rng, values, noise), looks=plan(5, 5))).verdict
        in (CellVerdict.PASS, CellVerdict.WITHIN_NOISE)
        for _ in range(100)
    )
    assert passed >= 85


def test_repeats_without_noise_do_not_lower_the_margin() -> None:
    found = calibrate([*one(OLD), *one(OLD)])
    (only,) = found.values()
    assert (only.sd, only.df, only.margin) == (0.0, 5, pytest.approx(0.10))


def test_the_lanes_of_the_baseline_count_as_a_repeat(baseline: Baseline) -> None:
    records = scaled(1.0, 0.1)
    (both,) = calibrate(records, baseline=baseline).values()
    assert both.df == 5
    assert both.sd == pytest.approx(0.1), "each pair of values differs by a tenth"


def test_repeats_are_run_with_nudged_weights_and_told_as_the_baselines_cells(
    baseline: Baseline,
) -> None:
    asked: list[tuple[CellSpec, tuple[int, ...]]] = []

    def run(cells: Sequence[CellSpec], seeds: Sequence[int]) -> list[Record]:
        asked.extend((spec, tuple(seeds)) for spec in cells)
        return [lane(spec, seed, 0.03) for spec in cells for seed in seeds]

    records = run_repeats(baseline, run, repeats=2)
    assert [seeds for _, seeds in asked] == [(0, 1, 2, 3, 4)] * 2
    std = baseline.cells[0].spec.model.init_std
    nudges = [spec.model.init_std / std - 1 for spec, _ in asked]
    assert nudges == pytest.approx([1e-6, 2e-6], rel=1e-3)
    assert {record.cell.hash for record in records} == {baseline.cells[0].hash}
    assert len(records) == 10


def test_nothing_to_calibrate_from() -> None:
    with pytest.raises(KeelbenchError, match="no seed with two values"):
        calibrate(one(OLD))
    with pytest.raises(KeelbenchError, match="no cell"):
        calibrate([])
