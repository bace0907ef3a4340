import math

import numpy as np
import pytest
from gate_sample import cell, lane
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from keelbench.records import VerdictKind
from keelbench.stats import (
    estimate,
    estimate_records,
    half_width,
    holm,
    mean_test,
    paired_ratio,
    paired_test,
    reading_error,
    relative_quantum,
)

VALUES = [0.030, 0.034, 0.027, 0.031, 0.029]
positive = st.floats(1e-5, 1.0)
p_values = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_interval_is_students_t_on_the_logs() -> None:
    logs = np.log(VALUES)
    low, high = stats.t.interval(0.95, 4, logs.mean(), stats.sem(logs))
    found = estimate(VALUES)
    assert found.mean == pytest.approx(stats.gmean(VALUES))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert (found.n, found.censored, found.confidence) == (5, 0, 0.95)


@pytest.mark.parametrize("n", [1, 2])
def test_fewer_than_three_values_claim_no_interval(n: int) -> None:
    found = estimate(VALUES[:n])
    assert found.mean == pytest.approx(stats.gmean(VALUES[:n]))
    assert (found.low, found.high) == (None, None)


def test_no_value_is_no_estimate() -> None:
    found = estimate([])
    assert (found.mean, found.low, found.high, found.n) == (None, None, None, 0)
    assert not found.is_lower_bound


def test_censored_lanes_leave_a_lower_bound_and_never_enter_a_mean() -> None:
    found = estimate([0.02, 0.03], lower_bounds=[0.05])
    assert (found.mean, found.high) == (None, None)
    assert found.low == pytest.approx((0.02 * 0.03 * 0.05) ** (1 / 3))
    assert (found.n, found.censored, found.is_lower_bound) == (2, 1, True)
    assert estimate([], lower_bounds=[0.05] * 3).low == pytest.approx(0.05)


def test_interval_is_never_narrower_than_a_quantum() -> None:
    found = estimate([0.03] * 5, quantum=0.03)
    assert found.high == pytest.approx(0.03 * 1.03)
    assert found.low == pytest.approx(0.03 / 1.03)
    assert estimate([0.03] * 5).low == pytest.approx(0.03)


def test_values_that_are_no_lr_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"), np.errstate(divide="ignore"):
        estimate([0.0, 0.1])


@given(st.lists(positive, min_size=3, max_size=8), st.floats(0, 0.5))
def test_intervals_hold_the_mean_and_grow_with_confidence(
    values: list[float], quantum: float
) -> None:
    narrow = estimate(values, quantum=quantum, confidence=0.8)
    wide = estimate(values, quantum=quantum, confidence=0.99)
    assert wide.low and wide.high and narrow.low and narrow.high and narrow.mean
    slack = 1 + 1e-9
    assert wide.low <= narrow.low * slack and narrow.low <= narrow.mean * slack
    assert narrow.mean <= narrow.high * slack and narrow.high <= wide.high * slack
    assert narrow.high / narrow.mean >= (1 + quantum) / slack


def coverage(logs: np.ndarray, truth: float = 0.0, quantum: float = 0.0) -> float:
    """Share of simulated cells, one per row, whose 95 % interval holds the truth."""
    n = logs.shape[1]
    error = logs.std(axis=1, ddof=1) / math.sqrt(n)
    half = half_width(error, n - 1, 0.95, quantum)
    return float(np.mean(np.abs(logs.mean(axis=1) - truth) <= half))


@pytest.mark.parametrize("n", [3, 4, 5, 8, 10])
def test_95_percent_intervals_cover_92_to_98_percent(n: int) -> None:
    rng = np.random.default_rng(n)
    shape, sd = (20_000, n), 0.1
    gumbel = (rng.gumbel(0, 1, shape) - np.euler_gamma) * math.sqrt(6) / math.pi
    laws = {
        "normal": rng.standard_normal(shape),
        "skewed": gumbel,
        "heavy": rng.standard_t(4, shape) / math.sqrt(2),
    }
    for name, noise in laws.items():
        assert 0.92 <= coverage(sd * noise) <= 0.98, name
    steps = np.floor(30 * np.exp(sd * rng.standard_normal(shape)))
    assert 0.915 <= coverage(np.log(steps), math.log(30), quantum=1 / 30) <= 0.98


def test_coverage_helper_is_the_interval_of_estimate() -> None:
    rng = np.random.default_rng(0)
    logs = 0.1 * rng.standard_normal((200, 5))
    found = [estimate(np.exp(row).tolist()) for row in logs]
    held = np.mean([one.low <= 1 <= one.high for one in found if one.low and one.high])
    assert held == coverage(logs)


def test_bca_would_not_cover_at_five_seeds() -> None:
    """Why intervals are not the bootstrap: keep the reason measured."""
    logs = 0.1 * np.random.default_rng(0).standard_normal((500, 5))
    result = stats.bootstrap(
        (logs,), np.mean, axis=-1, n_resamples=499, method="BCa", rng=np.random.default_rng(1)
    )
    low, high = result.confidence_interval
    assert np.mean((low <= 0) & (high >= 0)) < 0.90


def test_paired_ratio_takes_only_shared_seeds() -> None:
    found = paired_ratio({0: 0.02, 1: 0.04, 2: 0.03, 9: 1.0}, {0: 0.04, 1: 0.08, 2: 0.06})
    assert found.mean == pytest.approx(0.5)
    assert found.n == 3
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))
    assert paired_ratio({1: 1.0}, {2: 1.0}).mean is None


def test_paired_ratio_is_not_blurred_by_the_spread_of_seeds() -> None:
    seeds = {seed: 0.03 * 1.5**seed for seed in range(5)}
    lower = {seed: 0.8 * value for seed, value in seeds.items()}
    found = paired_ratio(lower, seeds, quantum=0.01)
    assert (found.low, found.high) == pytest.approx((0.8 / 1.01, 0.8 * 1.01))


def test_paired_test_is_scipys_where_there_is_a_spread() -> None:
    rng = np.random.default_rng(0)
    old = dict(enumerate(rng.uniform(0.02, 0.04, 5)))
    new = {seed: value * rng.uniform(0.7, 1.1) for seed, value in old.items()}
    for alternative in ("less", "greater"):
        expected = stats.ttest_rel(
            np.log(list(new.values())), np.log(list(old.values())), alternative=alternative
        )
        found = paired_test(new, old, alternative=alternative)  # type: ignore[arg-type]
        assert found == pytest.approx(float(expected.pvalue))


def test_paired_test_without_spread_is_certain_or_blank() -> None:
    old = {0: 0.03, 1: 0.04, 2: 0.05}
    lower = {seed: value / 2 for seed, value in old.items()}
    assert paired_test(old, old) == 1.0
    assert paired_test(lower, old) < 1e-6
    assert paired_test(lower, old, alternative="greater") > 1 - 1e-6
    assert 0 < paired_test(lower, old, quantum=0.03) < 1e-3
    assert paired_test({0: 0.01}, old) == 1.0


def test_certain_means() -> None:
    mean = np.array([-0.1, 0.0, 0.1])
    assert mean_test(mean, np.zeros(3), 2, "less").tolist() == [0.0, 1.0, 1.0]
    assert mean_test(mean, np.zeros(3), 2, "greater").tolist() == [1.0, 1.0, 0.0]


def test_reading_error_is_that_of_two_roundings() -> None:
    rng = np.random.default_rng(0)
    exact = rng.uniform(100, 200, (2, 100_000))
    difference = np.diff(np.floor(exact) - exact, axis=0)
    assert float(reading_error(0.01)) == pytest.approx(0.01 * difference.std(), rel=0.01)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([[0.04, 0.01], [0.9, 0.8]]).tolist() == [[0.04, 0.02], [1.0, 1.0]]
    assert holm([]).tolist() == []


@given(p_values)
def test_holm_lies_between_raw_and_bonferroni(p: list[float]) -> None:
    adjusted = holm(p)
    assert (adjusted >= np.array(p)).all()
    assert (adjusted <= np.minimum(1, len(p) * np.array(p)) + 1e-15).all()
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()


@given(p_values, st.integers(0, 11))
def test_holm_rejects_no_more_when_a_p_value_rises(p: list[float], index: int) -> None:
    """The sequential gate sets settled cells to p = 1 and relies on this."""
    raised = list(p)
    raised[index % len(p)] = 1.0
    others = np.arange(len(p)) != index % len(p)
    assert (holm(raised)[others] >= holm(p)[others] - 1e-15).all()


def test_quantum_is_one_step_of_the_ramp() -> None:
    spec = cell(slope=1e-4)
    assert relative_quantum(spec, 0.02) == pytest.approx(0.005)
    hold = cell(protocol="hold", hold_resolution=0.05)
    assert relative_quantum(hold, 0.02) == 0.05


def test_estimate_of_records_reads_values_bounds_and_quantum() -> None:
    spec = cell(slope=3e-4)
    values = [lane(spec, seed, 0.03) for seed in range(3)]
    found = estimate_records(values)
    assert found.high == pytest.approx(0.03 * 1.01)
    survived = lane(spec, 3, kind=VerdictKind.SURVIVED)
    never = lane(spec, 4, kind=VerdictKind.NEVER_LEARNED)
    bound = estimate_records([*values, survived, never])
    assert (bound.mean, bound.n, bound.censored) == (None, 3, 1)
    assert bound.low and bound.low > 0.03
