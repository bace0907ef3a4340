"""How much the same code differs from itself: the noise that a gate must look through.

On one CPU the same code and seed repeat bit for bit, yet on the next machine, torch build or
thread count sums are rounded differently, and training amplifies that like any chaotic
system. What it does to Max LR can be measured at home: nudge the initial weights by one part
in a million and run again.
"""

import dataclasses
import math
from collections.abc import Sequence

from scipy import stats

from keelbench.errors import KeelbenchError
from keelbench.gate.baseline import Baseline, Calibration, label_of
from keelbench.gate.check import Run
from keelbench.gate.sequential import MAX_SEEDS, TAIL
from keelbench.gate.trial import DEFAULT_MARGIN, margin_of
from keelbench.records import Record

NUDGE = 1e-6
"""Relative change of the initial weights: some ten roundings of a float32, far below
anything that could matter by itself."""

PASS_CHANCE = 0.95
"""How often an unchanged cell is to pass at the calibrated margin."""


def run_repeats(baseline: Baseline, run: Run, *, repeats: int = 2) -> list[Record]:
    """Run a baseline's lanes again with nudged weights, for :func:`calibrate`.

    The nudged cells are cells of their own in a results folder, so give ``run`` a folder
    that nobody reports from. The records handed back carry the settings of the baseline.
    """
    records = []
    for cell in baseline.cells:
        seeds = sorted(cell.lanes)
        for repeat in range(1, repeats + 1):
            std = cell.spec.resolved().model.init_std
            assert std is not None
            nudged = cell.spec.replaced({"model.init_std": std * (1 + repeat * NUDGE)})
            found = run([nudged], seeds)
            records += [dataclasses.replace(record, cell=cell.spec) for record in found]
    return records


def calibrate(
    records: Sequence[Record],
    *,
    baseline: Baseline | None = None,
    seeds: int = MAX_SEEDS,
    minimum: float = DEFAULT_MARGIN,
) -> dict[str, Calibration]:
    """Noise and margin of each cell, from repeats of the same code.

    With x = ln(Max LR), v the variance of x between repeats of one seed (pooled over seeds, df
    degrees of freedom), a paired difference of unchanged code has the standard deviation
    sd = sqrt(2 v). Such a cell passes if |mean| + half-width stays below the margin, so

        ln-margin = (z((1 + chance) / 2) + t(df, 1 - tail)) sd / sqrt(seeds)

    and the margin is never below ``minimum``.

    Args:
        records: cells and seeds several times over: from :func:`run_repeats`, or better from
            other machines of the class, torch builds or thread counts.
        baseline: its lanes count as one more repeat.
        seeds: seeds that the gate will use.
        minimum: smallest margin to return.

    Returns:
        By cell hash, for ``Baseline.calibrated``.

    Raises:
        KeelbenchError: if no lane with a Max LR was repeated.
    """
    values = _log_values(records, baseline)
    found = {
        key: _calibration(list(lanes.values()), seeds, minimum)
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


def _log_values(
    records: Sequence[Record], baseline: Baseline | None
) -> dict[str, dict[int, list[float]]]:
    """ln(Max LR) by cell and seed."""
    values: dict[str, dict[int, list[float]]] = {}
    cells = baseline.cells if baseline else ()
    found = [
        (cell.hash, lane.seed, lane.max_lr) for cell in cells for lane in cell.lanes.values()
    ]
    found += [(record.cell.hash, record.seed, record.max_lr) for record in records]
    for key, seed, max_lr in found:
        if max_lr is not None:
            values.setdefault(key, {}).setdefault(seed, []).append(math.log(max_lr))
    return values


def _calibration(repeats: Sequence[Sequence[float]], seeds: int, minimum: float) -> Calibration:
    df = sum(len(x) - 1 for x in repeats)
    squares = sum((one - sum(x) / len(x)) ** 2 for x in repeats for one in x)
    sd = math.sqrt(2 * squares / df)
    factor = stats.norm.isf((1 - PASS_CHANCE) / 2) + stats.t.isf(TAIL, df)
    margin = margin_of(float(factor) * sd / math.sqrt(seeds))
    return Calibration(sd=sd, df=df, margin=max(minimum, margin))
