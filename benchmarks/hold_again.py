"""Does a sustained LR hold again? ``python -m benchmarks.hold_again results/hold-small``

Takes the geometric mean that a hold search found, and holds fresh seeds at 0.9 and at 1.5
times it: most should pass at the one and fail at the other.
"""

import sys
from pathlib import Path

import numpy as np

from keelbench.hold import hold_trials
from keelbench.search import threads
from keelbench.store import Store

FACTORS = (0.9, 1.5)
FRESH_SEEDS = range(100, 110)


def main(folder: Path) -> None:
    records = [record for record in Store(folder).records() if record.max_lr is not None]
    cell = records[0].cell
    sustained = float(np.exp(np.mean(np.log([record.max_lr for record in records]))))
    print(f"{cell.model.arch} L={cell.model.depth} width {cell.model.width}: {sustained:.4g}")
    passed = dict.fromkeys(FACTORS, 0)
    with threads(cell.threads):
        for seed in FRESH_SEEDS:
            trials = hold_trials(cell, seed, [factor * sustained for factor in FACTORS])
            for factor, trial in zip(FACTORS, trials, strict=True):
                passed[factor] += trial.has_passed
    for factor, count in passed.items():
        print(f"{count} of {len(FRESH_SEEDS)} fresh seeds pass at {factor:g} x")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
