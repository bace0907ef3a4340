"""Where a curve turned: the location of an onset, once the detector is sure that there is one.

Deciding *that* a run diverged needs thresholds (see divergence.py). Saying *where* it began
must not depend on them, or the number would move with every opinion about how far is far.
So nothing here knows a threshold; the curve is read with one fixed ruler, and the answer is a
least-squares fit of a broken line.

The definition, for every kind of rise: the onset is the first step after the loss was last at
its floor. A bathtub is fitted to the bottom of the curve: a line down, a floor, a line up,
continuous, both knots free. The knot at which the floor ends is the last good step. Hence

* a sudden jump has its onset at the first probe that saw it (between that probe and the last
  good one nothing is known, and no step is accused without evidence),
* a slow rise has it where the rise starts, between probes if the fit says so,
* a flat-bottomed bowl has it where its rising side, followed downwards, meets its floor, and
  never before the best probe: an excursion is a departure from the best level,
* a slow drift that ends in a collapse has it where the drift started, not the collapse. (LRs
  held constant agree: Keel at the LR of step 200 collapses, long before step 260 to 350, where
  it does on a ramp.)

Why not the minimum, or "x nats above the minimum for good"? The minimum of a flat floor is
where the noise happened to be lowest. A crossing at x nats comes late by x / slope, a
different number for every run, and moves with x.
"""

from typing import NamedTuple

import numpy as np

from keelbench.records import FloatArray, IntArray

RULER = 0.2
"""Height in nats of the part of the curve that is read, from the floor up.

What lies higher is clipped to this height: how far a collapse goes says nothing about when it
began. The ruler is a part of the definition of the onset (and so of DETECTOR_VERSION), not a
threshold: nothing is decided by it. It is many times the probe's noise (0.01 to 0.03 nats), and
four fifths of the smallest rise that is called divergence: by the time the detector asks, all
of it has been passed for good, even if that threshold is lowered by 20 %. A ruler 20 % longer
or shorter moves the onsets of the recorded traces by 0 to 14 %, most by less than 5 %."""

SHORT_RULER = RULER / 2
"""The same for curves that do not end above the ruler: what has hardly learned has little to
lose, and falls back to where it was by as little as that."""

NOISE_HEIGHTS = 3.0
"""The ruler is at least this many standard deviations of the curve's noise long: below, noise
alone would climb it. Only a bare train loss (0.1 nats) is noisy enough for this to matter."""

LINE_POINTS = 2
"""Points between the floor and the first one above the ruler that make a rise. With fewer there
is no line to follow, only noise on the last good point: it was a jump."""

COARSE_KNOTS = 64
"""Longer curves are searched with about this many candidate knots first, then more finely."""


def noise_level(loss: FloatArray) -> float:
    """Standard deviation (nats) of the noise: from second differences, blind to any trend.

    Their median makes it blind to spikes and jumps too. 0 for curves too short to tell.
    """
    if len(loss) < 16:
        return 0.0
    bend = loss[1:-1] - (loss[:-2] + loss[2:]) / 2
    median_of_normal = 0.6745
    return float(np.median(np.abs(bend)) / median_of_normal / np.sqrt(1.5))


def despiked(loss: FloatArray) -> FloatArray:
    """Running median of three: removes single points, leaves edges where they are."""
    if len(loss) < 3:
        return loss
    smooth = loss.copy()
    smooth[1:-1] = np.median(np.stack([loss[:-2], loss[1:-1], loss[2:]]), axis=0)
    return smooth


def rise_start(steps: IntArray, loss: FloatArray) -> int:
    """First step of the rise that ends this curve.

    Args:
        steps: increasing step numbers, shape (points,), at least two.
        loss: the curve (nats), finite. Its end is known to lie above its floor for good.
    """
    smooth = despiked(loss)
    lowest = int(np.argmin(smooth))
    floor = float(smooth[lowest])
    noise = NOISE_HEIGHTS * noise_level(loss)
    height = max(RULER, noise)
    if _bottom(smooth, lowest, floor, height)[1] == len(loss) - 1:
        height = max(SHORT_RULER, noise)
    for _ in range(4):  # the window depends on the floor and the floor on the window
        first, last = _bottom(smooth, lowest, floor, height)
        window = slice(first, last + 1)
        clipped = np.minimum(smooth[window], floor + height)
        fit = _fit_bathtub(steps[window], clipped)
        if abs(fit.floor - floor) < 1e-3:
            break
        floor = fit.floor
    between = (steps[window] > fit.up) & (steps[window] < steps[last])
    knot = fit.up if np.count_nonzero(between) >= LINE_POINTS else float(steps[last])
    best = float(steps[np.argmin(loss[: last + 1])])
    return int(min(np.floor(max(knot, best)) + 1, steps[last]))


def plateau_start(steps: IntArray, loss: FloatArray) -> int:
    """First step of the plateau that ends this curve: where the descent's last leg meets it."""
    floor = float(np.median(loss[len(loss) // 2 :]))
    height = max(RULER, NOISE_HEIGHTS * noise_level(loss))
    above = np.clip(loss - floor - height, -height, height)
    first = max(int(np.argmax(_sums(above))) - 1, 0)
    fit = _fit_bathtub(steps[first:], np.minimum(loss[first:], floor + height), rises=False)
    return int(np.floor(fit.down)) + 1


def has_left_floor(loss: FloatArray) -> bool:
    """Whether a curve that goes nowhere stays above its lowest level, instead of on it.

    Then its onset is where it left that level, not where it came to it.
    """
    level = float(np.median(loss[len(loss) // 2 :]))
    height = max(SHORT_RULER, NOISE_HEIGHTS * noise_level(loss))
    return level > float(despiked(loss).min()) + height


def _bottom(loss: FloatArray, lowest: int, floor: float, height: float) -> tuple[int, int]:
    """Last point above the ruler on the way down, first one above it for good on the way up.

    A cumulative sum (Page 1954) decides what "for good" means: its extremes are the moments
    after (before) which the curve lies above the ruler on balance. Single probes that stray
    across, and spikes that recover, do not move them, nor does anything that comes later.
    """
    above = np.clip(loss - floor - height, -height, height)
    down = int(np.argmax(_sums(above[: lowest + 1])))
    up = lowest + 1 + int(np.argmin(_sums(above[lowest + 1 :])))
    return max(down - 1, 0), min(up, len(loss) - 1)


def _sums(values: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(values)])


class _Bathtub(NamedTuple):
    down: float
    """Step at which the descent meets the floor."""
    up: float
    """Step at which the floor ends."""
    floor: float


def _fit_bathtub(steps: IntArray, loss: FloatArray, *, rises: bool = True) -> _Bathtub:
    """The least-squares bathtub; without a rising side if the curve is known to stay down."""
    at = steps.astype(float)
    down = at[:: -(-len(at) // COARSE_KNOTS)]
    from_end = np.geomspace(1, len(at), COARSE_KNOTS).astype(int)  # dense where jumps are
    up = at[np.unique(len(at) - from_end)] if rises else at[-1:]
    for _ in range(3):  # each round is 16 times finer than the one before
        residual, floor = _bathtub_residuals(at, loss, down, up)
        i, j = np.unravel_index(int(np.argmin(residual)), residual.shape)
        fit = _Bathtub(float(down[i]), float(up[j]), float(floor[i, j]))
        down = _between_neighbours(down, int(i))
        up = _between_neighbours(up, int(j)) if rises else up
    return fit


def _bathtub_residuals(
    at: FloatArray, loss: FloatArray, down: FloatArray, up: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Residual sum of squares and floor for every pair of knots, shape (down, up).

    The model is ``floor + a * max(down - t, 0) + b * max(t - up, 0)``. For down <= up the two
    sides do not overlap, so that each takes its own share out of the normal equations.
    """
    mean = loss.mean()
    centred = loss - mean
    left = _side(np.maximum(down[:, None] - at, 0), centred)
    right = _side(np.maximum(at - up[:, None], 0), centred)
    weight = len(at) - left.weight[:, None] - right.weight
    solvable = (down[:, None] <= up) & (weight > 1e-9)
    total = -left.total[:, None] - right.total  # the centred curve itself sums to nothing
    floor = total / np.where(solvable, weight, 1.0)
    residual = centred @ centred - left.square[:, None] - right.square - floor * total
    return np.where(solvable, np.maximum(residual, 0.0), np.inf), floor + mean


class _Side(NamedTuple):
    """What fitting one side's slope takes away from the sums for the floor, per knot."""

    weight: FloatArray
    total: FloatArray
    square: FloatArray


def _side(shape: FloatArray, centred: FloatArray) -> _Side:
    total, moment = shape.sum(axis=1), shape @ centred
    norm = (shape * shape).sum(axis=1)
    norm = np.where(norm == 0, 1.0, norm)  # a knot without points has nothing to fit
    return _Side(total * total / norm, total * moment / norm, moment * moment / norm)


def _between_neighbours(knots: FloatArray, index: int) -> FloatArray:
    """A fine grid from the knot before to the knot after, both included."""
    left, right = knots[max(index - 1, 0)], knots[min(index + 1, len(knots) - 1)]
    middle = knots[index]
    grid = [np.linspace(left, middle, 17), np.linspace(middle, right, 17)]
    return np.unique(np.concatenate(grid))
