"""Protocols: what is asked of a cell, and the one function that workers call."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from keelbench.hold import run_hold
from keelbench.ramp import Progress, run_ramp
from keelbench.records import Record
from keelbench.specs import CellSpec

RUNNERS: dict[str, Callable[..., Iterator[Record]]] = {"ramp": run_ramp, "hold": run_hold}


def run_lanes(
    cell: CellSpec,
    seeds: Sequence[int],
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[Record]:
    """Run the cell's protocol on every seed; yields a record as each lane ends.

    The number of CPU threads is set for the run and put back afterwards; the state of
    torch's global random generator is not touched.
    """
    with threads(cell.threads):
        yield from RUNNERS[cell.ramp.protocol](cell, seeds, on_progress=on_progress)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this many CPU threads and without denormal numbers, then put both back.

    Gradients of a deep collapsed model shrink below 1e-38, where float32 arithmetic gets
    several times slower; they are flushed to zero, which no update can tell from them.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
