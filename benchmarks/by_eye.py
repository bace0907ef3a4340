"""Where a reader of the curves would put the break, beside the onset.

`python -m benchmarks.by_eye results/NAME`: for every lane the normalized LR at the onset (Max
LR) and at the step from which the probe stays ``RISE`` nats above its best level for good. A
slow drift that ends in a collapse has its onset where it starts; eyes see the collapse.
"""

import argparse
from pathlib import Path

import numpy as np

from keelbench.changepoint import despiked
from keelbench.divergence import DEFAULT_THRESHOLDS
from keelbench.records import Record
from keelbench.specs import PAPER_WIDTH
from keelbench.store import Store

RISE = DEFAULT_THRESHOLDS.rise
"""nats."""


def visible_step(record: Record) -> int | None:
    """First probed step of a rise that never comes back below ``RISE``; None without one."""
    trace = record.trace
    if trace.probe is None or trace.probe_step is None or not np.isfinite(trace.probe).any():
        return None
    loss = despiked(np.where(np.isfinite(trace.probe), trace.probe, np.inf))
    low = np.flatnonzero(loss <= loss.min() + RISE)
    after = trace.probe_step[int(low[-1]) + 1 :]
    return int(after[0]) if len(after) else None


COLUMNS = ("architecture", "depth", "width", "batch", "seed", "at onset", "by eye")


def row(record: Record) -> tuple[str, ...]:
    """Normalized LRs of one lane; a dash where there is none."""
    model, step = record.cell.model, visible_step(record)
    seen = None if step is None else record.trace.lr[step] * model.width / PAPER_WIDTH
    values = (record.normalized_max_lr, seen)
    return (
        model.arch,
        *map(str, (model.depth, model.width, record.cell.data.batch, record.seed)),
        *("-" if value is None else f"{value:.2e}" for value in values),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    records = Store(parser.parse_args().results).records()
    for cells in [COLUMNS, *map(row, records)]:
        print(f"{cells[0]:<24}", *(f"{cell:>8}" for cell in cells[1:]))


if __name__ == "__main__":
    main()
