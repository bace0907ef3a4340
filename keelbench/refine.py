"""A second, slower ramp where one step of the first is a coarse reading.

At the default slope the weak architectures break within some 30 steps, where one step is
3 % of the LR. A fresh ramp at a lower slope resolves such a value; since Max LR depends on
the slope, it is a result of its own beside the first, never a correction of it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from keelbench.records import Record
from keelbench.specs import CellSpec

REFINE_QUANTUM = 0.01
"""One step as a share of Max LR, above which a value counts as coarse."""

REFINE_FACTOR = 8
"""By how much the second ramp is slower: 3 % becomes 0.4 %."""

REFINE_PEAK = 4.0
"""The second ramp ends at this multiple of the largest first value: a bound on its cost."""


def refined_cell(cell: CellSpec, records: Sequence[Record]) -> CellSpec | None:
    """The cell of the second ramp, or None if the first is fine or has no value."""
    values = [
        record.max_lr
        for record in records
        if record.cell.hash == cell.hash and record.max_lr is not None
    ]
    slope, peak = cell.ramp.slope, cell.ramp.peak
    assert slope is not None and peak is not None
    if cell.ramp.protocol != "ramp" or not values:
        return None
    if slope / float(np.median(values)) <= REFINE_QUANTUM:
        return None
    ramp = replace(
        cell.ramp, slope=slope / REFINE_FACTOR, peak=min(peak, REFINE_PEAK * max(values))
    )
    return replace(cell, ramp=ramp)
