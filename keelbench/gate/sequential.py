"""Sequential testing: few seeds first, more only while undecided, with the error rate kept.

A *look* is one decision on the seeds run so far. Deciding at several looks gives noise
several chances, so the allowed error is spent over them (Lan & DeMets 1983) by the
O'Brien-Fleming-like function: with t the share of the seeds that have been run,

    spent(t) = 2 (1 - Phi(z(1 - error / 2) / sqrt(t)))

and a look may use what its seeds add, spent(t_k) - spent(t_(k-1)). Little is spent early, so
the last look is almost as sharp as a test without earlier ones. That the errors of the looks
add up to no more than the whole is the union bound: it needs no assumption on how the looks
depend on each other, nor on the rule that stops.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from keelbench.errors import KeelbenchError

ALPHA = 0.01
"""Chance that a gate with nothing slower in it reports any cell as regressed, all looks and
cells together."""

TAIL = 0.05
"""Chance that the truth lies beyond one given end of a cell's interval, all looks together:
with one look, the interval is the two-sided 90 % one of an equivalence test (TOST)."""

MIN_SEEDS, MAX_SEEDS = 3, 5
GROWTH = 1.5
"""Each look has at least this many times the seeds of the one before: 3, 5, 8, 12."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One decision: how many seeds it needs and what error it may spend."""

    seeds: int
    alpha: float
    """For the paired test, after Holm's correction over cells."""
    tail: float
    """For each end of each cell's interval."""


def plan(
    min_seeds: int = MIN_SEEDS,
    max_seeds: int = MAX_SEEDS,
    *,
    alpha: float = ALPHA,
    tail: float = TAIL,
) -> tuple[Look, ...]:
    """The looks from the first seeds to the last; ``plan(n, n)`` is a single look.

    Raises:
        KeelbenchError: if the numbers of seeds or the error rates make no sense.
    """
    if not 1 <= min_seeds <= max_seeds:
        raise KeelbenchError(
            f"cannot plan from {min_seeds} to {max_seeds} seeds: "
            "the first number must be at least 1 and not above the second"
        )
    if not (0 < alpha < 0.5 and 0 < tail < 0.5):
        raise KeelbenchError(
            f"error rates are {alpha} and {tail}: each must lie between 0 and 0.5"
        )
    seeds = [min_seeds]
    while (more := math.ceil(GROWTH * seeds[-1])) < max_seeds:
        seeds.append(more)
    if max_seeds > min_seeds:
        seeds.append(max_seeds)
    alphas, tails = spend(seeds, alpha), spend(seeds, tail)
    return tuple(
        Look(seeds=n, alpha=a, tail=t) for n, a, t in zip(seeds, alphas, tails, strict=True)
    )


def spend(seeds: list[int], error: float) -> list[float]:
    """The part of the error that each look may use; the parts add up to the whole."""
    share = np.asarray(seeds) / seeds[-1]
    spent = 2 * stats.norm.sf(stats.norm.isf(error / 2) / np.sqrt(share))
    return [float(part) for part in np.diff(spent, prepend=0.0)]
