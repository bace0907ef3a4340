"""Statistics of Max LR over seeds: always on ln(Max LR), because effects are ratios.

Intervals are Student's t on ln(Max LR), not the bootstrap. Measured share of 95 % intervals
that cover the truth, 20,000 simulated cells each (tests/test_stats.py repeats a part):

===============================  =====  =====  =====  =====  =====
spread of ln(Max LR)             n = 3  n = 4  n = 5  n = 8  n = 10
===============================  =====  =====  =====  =====  =====
Student t, normal                0.951  0.953  0.951  0.951  0.951
Student t, skewed (Gumbel)       0.938  0.935  0.934  0.933  0.935
Student t, heavy tails (t, 4)    0.961  0.957  0.961  0.960  0.956
Student t, read to 3.3 % steps   0.947  0.948  0.943  0.933  0.922
BCa bootstrap, normal            0.727  0.797  0.839  0.883  0.896
BCa bootstrap, skewed (Gumbel)   0.713  0.765  0.827  0.873  0.879
===============================  =====  =====  =====  =====  =====

BCa (Efron 1987) resamples the few values there are and takes their spread for the whole
truth, so with the 3 to 10 seeds of a cell it is too narrow; Student's t pays for the unknown
spread. Where BCa becomes good, at some 30 seeds and more, the two agree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from keelbench.records import FloatArray, Record
from keelbench.specs import CellSpec

CONFIDENCE = 0.95

MIN_VALUES = 3
"""With fewer values no interval is claimed: with two, Student's t spans a factor of 13 sd."""

Alternative = Literal["less", "greater"]
Numbers = float | FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A geometric mean (or a ratio of two) with its interval."""

    mean: float | None
    """None if a lane is censored, or if there is no value: then only ``low`` may be known."""
    low: float | None
    high: float | None
    n: int
    """Lanes with a value, or pairs of them."""
    censored: int
    """Lanes that reached the peak in good health: only a lower bound is known."""
    confidence: float = CONFIDENCE

    @property
    def is_lower_bound(self) -> bool:
        """True if the number to show is ``>= low``."""
        return self.censored > 0 and self.low is not None


def estimate(
    values: Sequence[float],
    *,
    lower_bounds: Sequence[float] = (),
    quantum: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Geometric mean of Max LR over seeds, and its interval.

    With x = ln(Max LR), mean m and standard deviation s (n - 1) over n seeds::

        mean = exp(m)      [low, high] = exp(m -+ h)
        h = max(t(n - 1, (1 + confidence) / 2) s / sqrt(n), ln(1 + quantum))

    - Fewer than 3 values: the mean alone, no interval.
    - Any lane censored: ``low`` is the geometric mean with the bounds in place of the unknown
      values, which the true geometric mean of these lanes can only exceed; ``mean`` and
      ``high`` are None. A bound never enters a mean as if it were a value.
    - Lanes without a value or bound (never learned, failed) are not part of it: count them
      beside it.

    Args:
        values: Max LR of the lanes that have one.
        lower_bounds: peak LR of the lanes that survived.
        quantum: one ramp step relative to Max LR (slope / Max LR): what a reading can not
            resolve, so the interval is never narrower than a factor of (1 + quantum) each way.
        confidence: of the two-sided interval.
    """
    logs = np.log([*values, *lower_bounds])
    if not np.isfinite(logs).all():
        raise ValueError(f"Max LR must be positive: {[*values, *lower_bounds]}")
    n, censored = len(values), len(lower_bounds)
    mean = float(np.exp(logs.mean())) if len(logs) else None
    if censored or mean is None:
        return Estimate(
            mean=None, low=mean, high=None, n=n, censored=censored, confidence=confidence
        )
    return _with_interval(logs, quantum, confidence)


def estimate_records(records: Sequence[Record], *, confidence: float = CONFIDENCE) -> Estimate:
    """The estimate of one cell from its records: values, bounds and quantum read off them."""
    values = [record.max_lr for record in records if record.max_lr is not None]
    bounds = [
        bound
        for record in records
        if record.max_lr is None and (bound := record.lower_bound) is not None
    ]
    return estimate(
        values,
        lower_bounds=bounds,
        quantum=mean_quantum(records),
        confidence=confidence,
    )


def relative_quantum(cell: CellSpec, max_lr: float) -> float:
    """What one reading can not resolve, relative to the Max LR: slope / Max LR.

    In the hold protocol it is the resolution of the search.
    """
    ramp = cell.resolved().ramp
    if ramp.protocol == "hold":
        return ramp.hold_resolution
    assert ramp.slope is not None
    return ramp.slope * (ramp.lr_multiplier or 1.0) / max_lr


def quantum_of(record: Record) -> float:
    """Relative quantum of one record; 0 where there is no value."""
    return 0.0 if record.max_lr is None else relative_quantum(record.cell, record.max_lr)


def mean_quantum(records: Sequence[Record]) -> float:
    """Mean quantum of the lanes that have a value; 0 if none has."""
    quanta = [quantum_of(record) for record in records if record.max_lr is not None]
    return float(np.mean(quanta)) if quanta else 0.0


def log_ratios(values: Mapping[int, float], reference: Mapping[int, float]) -> FloatArray:
    """ln(value / reference) of every seed that both have, in the order of the seeds."""
    seeds = sorted(values.keys() & reference.keys())
    return np.array([math.log(values[seed] / reference[seed]) for seed in seeds])


def paired_ratio(
    values: Mapping[int, float],
    reference: Mapping[int, float],
    *,
    quantum: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Ratio of geometric means over the seeds that both have, with its interval.

    Same seeds see the same data in the same order, so differences are taken per seed:
    d = ln(value / reference), and the ratio is exp(mean d) with the interval of
    :func:`estimate`. Fewer than 3 pairs: no interval; no pair: no ratio.
    """
    ratios = log_ratios(values, reference)
    if not len(ratios):
        return Estimate(mean=None, low=None, high=None, n=0, censored=0, confidence=confidence)
    return _with_interval(ratios, quantum, confidence)


def _with_interval(logs: FloatArray, quantum: float, confidence: float) -> Estimate:
    n, mean = len(logs), float(logs.mean())
    low = high = None
    if n >= MIN_VALUES:
        error = float(logs.std(ddof=1)) / math.sqrt(n)
        half = float(half_width(error, n - 1, confidence, quantum))
        low, high = math.exp(mean - half), math.exp(mean + half)
    return Estimate(
        mean=math.exp(mean), low=low, high=high, n=n, censored=0, confidence=confidence
    )


def half_width(
    standard_error: Numbers, df: Numbers, confidence: float, quantum: Numbers = 0.0
) -> FloatArray:
    """Half of the two-sided Student interval of a mean of logs, at least one quantum."""
    t = stats.t.ppf((1 + confidence) / 2, df)
    return np.maximum(t * np.asarray(standard_error), np.log1p(quantum))


def paired_test(
    values: Mapping[int, float],
    reference: Mapping[int, float],
    *,
    alternative: Alternative = "less",
    quantum: float = 0.0,
) -> float:
    """One-sided p-value of the paired t-test on ln(value / reference).

    Equals ``scipy.stats.ttest_rel`` on the logs, except that the standard deviation is never
    taken to be below the :func:`reading_error`, so that lanes that all moved by exactly the
    same number of steps give a p-value and not a division by zero.

    A rank or sign test would not do: with n pairs its p-value can not fall below 2**-n
    (0.125 for 3 seeds, 0.03 for 5), so it could never reject at 1 %.

    With fewer than 2 pairs nothing can be tested: p = 1.
    """
    ratios = log_ratios(values, reference)
    n = len(ratios)
    if n < 2:
        return 1.0
    sd = max(float(ratios.std(ddof=1)), float(reading_error(quantum)))
    return float(mean_test(float(ratios.mean()), sd / math.sqrt(n), n - 1, alternative))


def mean_test(
    mean: Numbers, standard_error: Numbers, df: Numbers, alternative: Alternative
) -> FloatArray:
    """One-sided p-value of Student's t for a mean against 0.

    A standard error of 0 makes the mean certain: p is 0 where it points in the direction of
    the alternative, and 1 where it does not.
    """
    signed = np.asarray(mean) * (1 if alternative == "less" else -1)
    error = np.asarray(standard_error)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        certain = np.where(signed < 0, -np.inf, np.inf)
        t = np.where(error > 0, signed / error, certain)
    return np.asarray(stats.t.cdf(t, df))


def reading_error(quantum: Numbers) -> FloatArray:
    """Standard deviation that reading to whole steps alone gives a paired log-ratio.

    Each of the two readings is uniform within one quantum q (variance q^2 / 12), so their
    difference has variance q^2 / 6.
    """
    return np.log1p(quantum) / math.sqrt(6)


def holm(p_values: ArrayLike) -> FloatArray:
    """Holm's step-down adjusted p-values along the last axis, in the given order.

    With p(1) <= ... <= p(m): adjusted p(i) = max over j <= i of min(1, (m - j + 1) p(j)).
    Rejecting where the adjusted value is <= alpha keeps the chance of any false rejection
    <= alpha, whatever the dependence (Holm 1979). scipy.stats has no function for it.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, axis=-1, kind="stable")
    steps = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    adjusted = np.empty_like(p)
    running = np.maximum.accumulate(np.minimum(1.0, steps), axis=-1)
    np.put_along_axis(adjusted, order, running, -1)
    return adjusted
