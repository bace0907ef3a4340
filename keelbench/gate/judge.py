"""The arithmetic of one look, over arrays of cells: check and simulation share it.

All numbers are on ln(Max LR). For cell c with n paired seeds, d = ln(current / baseline) per
seed, m its mean and s its standard deviation, never taken below the reading error:

- variance: v = ((n - 1) s^2 + f s0^2) / (n - 1 + f) with n - 1 + f degrees of freedom, where
  s0 and f are the noise of the same code in this cell, as calibrated (f = 0 if it is not);
- interval: m -+ h, h = max(t(df, 1 - tail) sqrt(v / n), ln(1 + quantum));
- test: one-sided p of t = m / sqrt(v / n), Holm-adjusted over the cells;
- delta: the margin as a log-ratio, -ln(1 - margin).

With 3 to 5 seeds s alone is so uncertain that Student's t must be generous, and a real drop
can go unseen. The calibrated noise estimates the same variance with more degrees of freedom.
Where s is larger than it by more than chance allows (F-tests, of each cell and of the gate as
a whole), this machine or this change is noisier than what was calibrated, and s alone is used:
a calibration can sharpen a gate, but not make it cry wolf. Noise is never borrowed from
other cells: measured spreads differ by a factor of 20 between architectures, and borrowing
raised false alarms to 3 % in such gates.

What all this keeps, measured: benchmarks/gate_power.py.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from keelbench.gate.sequential import Look
from keelbench.records import FloatArray
from keelbench.stats import MIN_VALUES, half_width, holm, mean_test, reading_error

BoolArray = NDArray[np.bool_]

NOISIER_CELL, NOISIER_GATE = 0.02, 0.01
"""Levels of the F-tests that set a calibration aside, for one cell and for all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Paired log-ratios of the cells of a gate, summed up; arrays of shape (..., cells)."""

    n: NDArray[np.int64]
    mean: FloatArray
    sd: FloatArray
    quantum: FloatArray
    delta: FloatArray
    noise_sd: FloatArray
    """Calibrated standard deviation of a paired log-ratio of unchanged code."""
    noise_df: NDArray[np.int64]
    """Degrees of freedom behind it; 0 if there is no calibration."""


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
    """Decide every active cell.

    A cell that an earlier look has settled enters Holm's correction as p = 1. That can only
    take rejections away, so the error of the look stays below its alpha.
    """
    usable = sample.n >= MIN_VALUES
    n = np.maximum(sample.n, MIN_VALUES)
    variance, df = pooled_variance(sample, n - 1, usable)
    error = np.sqrt(variance / n)
    half = np.where(usable, half_width(error, df, 1 - 2 * look.tail, sample.quantum), np.inf)
    tested = usable & active
    p_down = holm(np.where(tested, mean_test(sample.mean, error, df, "less"), 1.0))
    p_up = holm(np.where(tested, mean_test(sample.mean, error, df, "greater"), 1.0))
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


def pooled_variance(
    sample: Sample, own_df: NDArray[np.int64], usable: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """Variance of a paired log-ratio in each cell, and its degrees of freedom."""
    floor = reading_error(sample.quantum)
    own = np.maximum(sample.sd, floor) ** 2
    noise = np.maximum(sample.noise_sd, floor) ** 2
    alone = is_noisier(own, own_df, noise, np.where(usable, sample.noise_df, 0))
    df = own_df + sample.noise_df
    shared = (own_df * own + sample.noise_df * noise) / df
    return np.where(alone, own, shared), np.where(alone, own_df, df).astype(np.float64)


def is_noisier(
    own: FloatArray,
    own_df: NDArray[np.int64],
    noise: FloatArray,
    noise_df: NDArray[np.int64],
) -> BoolArray:
    """Cells for which the calibrated variance must not be used; all without one.

    Each cell by F = own / noise, and all together by the mean of their F, since a noisier
    machine shows in every cell. In that mean no F counts for more than the level of one cell
    allows, so that a single wild cell does not speak for the gate.
    """
    known = noise_df > 0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(known, own / noise, 0.0)
    limit = stats.f.isf(NOISIER_CELL, own_df, np.maximum(noise_df, 1))
    weight = np.where(known, own_df, 0)
    total = np.maximum(weight.sum(axis=-1), 1)
    mean = (weight * np.minimum(ratio, limit)).sum(axis=-1) / total
    behind = np.maximum(noise_df.sum(axis=-1), 1)
    all_noisier = stats.f.sf(mean, total, behind) < NOISIER_GATE
    return np.asarray(~known | (ratio > limit) | all_noisier[..., np.newaxis])
