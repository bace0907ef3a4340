"""The hold protocol: which LRs are tried, what counts as sustained, and a search end to end."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny_cell
from hypothesis import given
from hypothesis import strategies as st

from keelbench.hold import (
    GRID_RATIO,
    HOLD_PROBES,
    MOST_ROUNDS,
    RUN_SEEDS,
    RUNS,
    Lane,
    Trial,
    bracket,
    hold_lrs,
    hold_steps,
    hold_trials,
    next_lanes,
    probe_change,
    run_hold,
    sustained,
)
from keelbench.records import Record, Trace, VerdictKind

CELL = tiny_cell("pre_ln", depth=8, slope=2e-3, peak=0.5, hold_steps=32).replaced(
    {"ramp.protocol": "hold"}
)


def trial(lr: float, run: int, has_passed: bool) -> Trial:
    rule = None if has_passed else "stagnation"
    return Trial(lr=lr, run=run, has_passed=has_passed, rule=rule, probe_change=0.0)


def searched(passes: Callable[[Lane], bool], lanes: list[Lane]) -> tuple[list[Trial], int]:
    """A search over runs that pass or fail as they are told; all trials and the rounds."""
    trials: list[Trial] = []
    for round_ in range(MOST_ROUNDS):
        trials += [trial(*lane, passes(lane)) for lane in lanes]
        lanes = next_lanes(trials, CELL)
        if not lanes:
            return trials, round_ + 1
    return trials, MOST_ROUNDS + 1


@given(st.floats(0.004, 0.45))
def test_a_sharp_limit_is_found_to_the_resolution(limit: float) -> None:
    trials, rounds = searched(lambda lane: lane[0] <= limit, [(0.05, 0), (0.06, 0)])
    found = sustained(trials)
    assert found is not None and found <= limit < found * 1.0500001
    assert rounds <= MOST_ROUNDS
    assert len({(t.lr, t.run) for t in trials}) == len(trials), "nothing runs twice"


@given(st.sets(st.integers(0, 40)), st.integers(0, RUNS - 1))
def test_what_is_sustained_passed_in_every_run_and_nothing_below_failed(
    bad: set[int], unlucky: int
) -> None:
    """Failures anywhere: an LR whose number is bad fails in one of its runs."""

    def passes(lane: Lane) -> bool:
        number = round(math.log(lane[0] / 0.01) / math.log(1.05))
        return not (number in bad and lane[1] == unlucky) and lane[0] < 0.2

    trials, rounds = searched(passes, [(0.05, 0), (0.06, 0)])
    found = sustained(trials)
    assert rounds <= MOST_ROUNDS + 1
    if found is not None:
        assert [t.has_passed for t in trials if t.lr == found] == [True] * RUNS
        assert all(t.has_passed for t in trials if t.lr < found)


def test_one_lucky_run_is_not_enough() -> None:
    lucky = [trial(0.1, 0, True), trial(0.1, 1, False), trial(0.1, 2, True)]
    below = [trial(0.09, run, True) for run in range(RUNS)]
    assert sustained(lucky + below) == 0.09
    assert bracket(lucky + below) == (0.09, 0.1)
    assert sustained(below[:2]) is None


def test_where_everything_passes_the_peak_itself_is_held_in_every_run() -> None:
    trials, _ = searched(lambda _: True, [(0.2, 0)])
    assert sustained(trials) == CELL.ramp.peak
    assert bracket(trials) == (CELL.ramp.peak, None)


def test_where_everything_fails_the_search_goes_down_to_one_step_of_the_ramp() -> None:
    trials, _ = searched(lambda _: False, [(0.05, 0)])
    assert sustained(trials) is None
    assert CELL.ramp.slope is not None
    assert CELL.ramp.slope <= min(t.lr for t in trials) < CELL.ramp.slope * GRID_RATIO


def test_the_lr_rises_at_the_slope_and_is_then_held() -> None:
    begin, steps = hold_steps(CELL, 0.01)
    assert (begin, steps) == (4, 4 + CELL.ramp.hold_steps)
    lrs = hold_lrs(CELL, [0.01, 0.02], 0, 12)
    assert lrs[:, 0].tolist() == pytest.approx([0.002, 0.004, 0.006, 0.008] + [0.01] * 8)
    assert lrs[:, 1].tolist() == pytest.approx([0.002 * k for k in range(1, 11)] + [0.02] * 2)


def test_the_probe_is_compared_with_its_level_when_the_hold_began() -> None:
    steps = np.arange(0, 160, 4)
    probe = np.where(steps < 80, 3.0, 2.5)
    probe[-HOLD_PROBES:] += 0.1
    flat = np.zeros(160)
    trace = Trace(lr=flat, loss=flat, probe_step=steps, probe=probe)
    assert probe_change(trace, 100) == pytest.approx(0.1)
    assert probe_change(trace, 40) == pytest.approx(-0.4)


@pytest.fixture(scope="module")
def record() -> Record:
    (found,) = run_hold(CELL, [3])
    return found


def test_a_search_end_to_end_stores_every_trial(record: Record) -> None:
    assert record.verdict.kind is VerdictKind.DIVERGED and record.diagnosis is not None
    trials = [Trial(**values) for values in record.diagnosis["trials"]]
    assert record.max_lr == sustained(trials)
    assert record.max_lr is not None
    assert 0 < record.diagnosis["resolution"] <= CELL.ramp.hold_resolution + 1e-9
    failed = [t for t in trials if not t.has_passed]
    assert record.trace.lr.max() == pytest.approx(min(t.lr for t in failed), rel=1e-6)


def test_a_run_is_that_of_its_own_seed_alone(record: Record) -> None:
    assert record.diagnosis is not None
    stored = [Trial(**values) for values in record.diagnosis["trials"]]
    for run in range(RUNS):
        some = next(t for t in stored if t.run == run)
        (again,) = hold_trials(CELL, 3 + RUN_SEEDS * run, [some.lr])
        assert replace(again, run=run) == some
