"""``keelbench check``: run a few seeds, decide, run more only where it is still open."""

from collections.abc import Callable, Iterable, Sequence

from keelbench.errors import KeelbenchError
from keelbench.gate.baseline import Baseline
from keelbench.gate.decision import decide
from keelbench.gate.exact import compare_exact
from keelbench.gate.sequential import Look, plan
from keelbench.gate.verdicts import GateReport
from keelbench.records import Record
from keelbench.specs import CellSpec

Run = Callable[[Sequence[CellSpec], Sequence[int]], Sequence[Record]]
"""Runs cells for seeds and returns all their records, failed lanes included."""


def run_check(
    baseline: Baseline,
    cells: Sequence[CellSpec],
    run: Run,
    *,
    looks: Sequence[Look] | None = None,
    margin: float | None = None,
    allow: Iterable[str] = (),
    strict: bool = False,
    on_look: Callable[[GateReport], None] | None = None,
) -> GateReport:
    """Check cells against a baseline, running only the seeds that the decision needs.

    Cells without a counterpart in the baseline, or with other settings, are reported but not
    run. A cell of which ``run`` returns no lane has failed.

    Args:
        on_look: called with every interim report, for progress.
    """
    allow = tuple(allow)
    looks = tuple(looks or plan())
    records: list[Record] = []
    for remaining in range(len(looks), -1, -1):
        report = decide(
            baseline,
            records,
            asked=cells,
            looks=looks,
            margin=margin,
            allow=allow,
            strict=strict,
            more=remaining > 0,
        )
        if on_look:
            on_look(report)
        for seeds, specs in report.wanted_seeds().items():
            records.extend(run(specs, seeds))
        if not report.wanted_seeds():
            break
    return report


def run_exact(
    baseline: Baseline,
    cells: Sequence[CellSpec],
    run: Run,
    *,
    seeds: int,
    allow: Iterable[str] = (),
) -> GateReport:
    """Run the baseline's first seeds of every cell and compare losses bit for bit.

    Raises:
        KeelbenchError: if the cells share no seed in the baseline.
    """
    shared = baseline.seeds[:seeds]
    if not shared:
        raise KeelbenchError(
            f"the cells of baseline '{baseline.name}' have no seed in common",
            "save it again with the same seeds for every cell",
        )
    return compare_exact(baseline, run(cells, shared), asked=cells, allow=allow)
