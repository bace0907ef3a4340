"""The arithmetic of one look, over arrays of cells: check and simulation share it.

All numbers are on ln(Max LR). For cell c with n paired seeds, d = ln(current / baseline) per
seed, m its mean and s its standard deviation:

- spread: s* = max(s, reading error, pooled spread of the gate's cells);
- interval: m -+ h, h = max(t(df, 1 - tail) s* / sqrt(n), ln(1 + quantum));
- test: one-sided p of t = m / (s* / sqrt(n)), Holm-adjusted over the cells;
- delta: the margin as a log-ratio, -ln(1 - margin).

Pooling: with 3 to 5 seeds a cell's own s is so uncertain that Student's t must be generous,
and a real drop goes unseen. All cells of a gate share its noise, so the median of their
variances (each divided by the median of its chi-square law to be unbiased) is a steady
estimate, and one wild cell does not move it. A cell noisier than the others keeps its own s:
the larger one counts. The test borrows the pooled degrees of freedom only from 5 seeds on;
with fewer, a cell's own s can not yet show that it is noisier than the rest. What this keeps,
measured: benchmarks/gate_power.py.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from keelbench.gate.sequential import Look
from keelbench.records import FloatArray
from keelbench.stats import MIN_VALUES, half_width, holm, mean_test, reading_error

BoolArray = NDArray[np.bool_]

MIN_POOLED_CELLS = 3
"""With two cells a median could not outvote a wild one."""

MIN_POOLED_SEEDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Paired log-ratios of the cells of a gate, summed up; arrays of shape (..., cells)."""

    n: NDArray[np.int64]
    mean: FloatArray
    sd: FloatArray
    quantum: FloatArray
    delta: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What one look says of each cell; flags are False for cells that are not active."""

    half: FloatArray
    """Half-width of the interval; infinite with fewer than 3 pairs."""
    p_down: FloatArray
    """Holm-adjusted p-value of a drop."""
    p_up: FloatArray
    regressed: BoolArray
    improved: BoolArray
    passed: BoolArray
    """Equivalent: the interval lies within the margin on both sides."""
    no_drop: BoolArray
    """A drop beyond the margin is excluded."""
    no_evidence: BoolArray
    """The interval holds 0 and is narrower than the margin: nothing to see, seen well."""


def judge(sample: Sample, look: Look, active: BoolArray) -> Judgement:
    """Decide every active cell; the others lend their spread and count in Holm's correction.

    A cell that an earlier look has settled enters Holm's correction as p = 1. That can only
    take rejections away, so the error of the look stays below its alpha.
    """
    usable = sample.n >= MIN_VALUES
    n = np.maximum(sample.n, MIN_VALUES)
    sd, df = pooled_spread(
        np.maximum(sample.sd, reading_error(sample.quantum)), np.where(usable, n - 1, 0)
    )
    error = sd / np.sqrt(n)
    half = np.where(usable, half_width(error, df, 1 - 2 * look.tail, sample.quantum), np.inf)
    test_df = np.where(n >= MIN_POOLED_SEEDS, df, n - 1)
    tested = usable & active
    p_down = holm(np.where(tested, mean_test(sample.mean, error, test_df, "less"), 1.0))
    p_up = holm(np.where(tested, mean_test(sample.mean, error, test_df, "greater"), 1.0))
    low, high, delta = sample.mean - half, sample.mean + half, sample.delta
    regressed = tested & (high < -delta) & (p_down <= look.alpha)
    improved = tested & (low > delta) & (p_up <= look.alpha)
    passed = tested & (low >= -delta) & (high <= delta)
    no_drop = tested & (low >= -delta)
    no_evidence = tested & (low <= 0) & (high >= 0) & (half < delta)
    return Judgement(
        half=half,
        p_down=p_down,
        p_up=p_up,
        regressed=regressed,
        improved=improved,
        passed=passed,
        no_drop=no_drop,
        no_evidence=no_evidence,
    )


def pooled_spread(sd: FloatArray, df: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Spread and degrees of freedom to use for each cell; cells with df = 0 do not count."""
    usable = df > 0
    own_df = np.maximum(df, 1)
    count = usable.sum(axis=-1, keepdims=True)
    variance = np.where(usable, sd**2 * own_df / stats.chi2.median(own_df), np.nan)
    enough = np.broadcast_to(count >= MIN_POOLED_CELLS, sd.shape)
    pooled = np.zeros(sd.shape[:-1])
    if variance.shape[-1]:
        filled = np.where(count > 0, variance, 0.0)
        pooled = np.nanmedian(filled, axis=-1)
    shared = np.maximum(sd, np.sqrt(pooled)[..., np.newaxis])
    total = np.broadcast_to(df.sum(axis=-1, keepdims=True), sd.shape)
    return (
        np.where(enough & usable, shared, sd),
        np.where(enough & usable, total, own_df).astype(np.float64),
    )
