"""How much the same code differs from itself: the margin that a gate can honour."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from keelbench.errors import KeelbenchError
from keelbench.gate.baseline import Calibration, label_of
from keelbench.gate.decision import DEFAULT_MARGIN, margin_of
from keelbench.gate.sequential import MAX_SEEDS, TAIL
from keelbench.records import Record

PASS_CHANCE = 0.95
"""How often an unchanged cell is to pass at the calibrated margin."""


def calibrate(
    records: Sequence[Record], *, seeds: int = MAX_SEEDS, minimum: float = DEFAULT_MARGIN
) -> dict[str, Calibration]:
    """Noise and margin of each cell, from repeats of the same code.

    With x = ln(Max LR), v the variance of x between repeats of one seed (pooled over seeds, df
    degrees of freedom), a paired difference has standard deviation sd = sqrt(2 v). An
    unchanged cell passes if |mean| + half-width stays below the margin, so

        ln-margin = (z(1 - (1 - chance) / 2) + t(df, 1 - tail)) sd / sqrt(seeds)

    and the margin is never below ``minimum``: repeats on one CPU are bit for bit the same
    (sd = 0), which says nothing of the next machine. Repeats are worth most when they come
    from several machines of the class, torch builds or thread counts.

    Args:
        records: the same cells and seeds several times over, from separate result folders.
        seeds: seeds that the gate will use.
        minimum: smallest margin to return.

    Returns:
        By cell hash, for ``Baseline.calibrated``.

    Raises:
        KeelbenchError: if no lane with a Max LR was repeated.
    """
    values: dict[str, dict[int, list[float]]] = {}
    for record in records:
        if record.max_lr is not None:
            lanes = values.setdefault(record.cell.hash, {})
            lanes.setdefault(record.seed, []).append(math.log(record.max_lr))
    found = {
        key: _calibration(lanes, seeds, minimum)
        for key, lanes in values.items()
        if any(len(repeats) > 1 for repeats in lanes.values())
    }
    if not found:
        labels = ", ".join(sorted({label_of(record.cell) for record in records})) or "no cell"
        raise KeelbenchError(
            f"nothing to calibrate from: {labels} has no seed with two values of Max LR",
            "run the same sweep at least twice, each into a folder of its own",
        )
    return found


def _calibration(lanes: dict[int, list[float]], seeds: int, minimum: float) -> Calibration:
    df = sum(len(repeats) - 1 for repeats in lanes.values())
    squares = sum(float(np.var(repeats)) * len(repeats) for repeats in lanes.values())
    sd = math.sqrt(2 * squares / df)
    factor = stats.norm.isf((1 - PASS_CHANCE) / 2) + stats.t.isf(TAIL, df)
    margin = margin_of(float(factor) * sd / math.sqrt(seeds))
    return Calibration(sd=sd, df=df, margin=max(minimum, margin))
