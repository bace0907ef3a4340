"""``--exact``: the same losses, bit for bit, for runs that are deterministic.

On one CPU, the same code and seed give the same losses to the last bit, so any difference is
a change of the code. Across machines, torch releases or thread counts rounding differs, and
the statistical gate is the right one.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.gate import reasons
from keelbench.gate.baseline import Baseline, label_of
from keelbench.gate.decision import check_records, current_cells
from keelbench.gate.lanes import Lane
from keelbench.gate.matching import Match, allowed_fields, match_cells
from keelbench.gate.verdicts import CellReport, CellVerdict, GateReport, LanePair
from keelbench.records import Record
from keelbench.specs import CellSpec


def compare_exact(
    baseline: Baseline,
    records: Sequence[Record],
    *,
    asked: Sequence[CellSpec] | None = None,
    allow: Iterable[str] = (),
    strict: bool = False,
) -> GateReport:
    """Compare the losses of every lane that both sides have.

    A cell passes if all are equal, ``differs`` (exit 1) if one is not: its reason names the
    first lane and step. A NaN equals any other NaN.

    Raises:
        KeelbenchError: as :func:`keelbench.gate.decide`.
    """
    if not records:
        raise KeelbenchError(
            "there are no results to check", "run the sweep first", ExitCode.FAILED
        )
    allowed = allowed_fields(allow)
    check_records(baseline, records, allowed)
    current = current_cells(records, asked, keep_losses=True)
    cells = tuple(_cell_report(match) for match in match_cells(baseline, current, allowed))
    return GateReport(
        baseline=baseline.name,
        sweep=baseline.sweep,
        hardware=baseline.hardware,
        detector=baseline.detector,
        cells=cells,
        is_strict=strict,
        is_exact=True,
        notes=reasons.notes(baseline, records, cells),
    )


def _cell_report(match: Match) -> CellReport:
    pairs: tuple[LanePair, ...] = ()
    if match.baseline is None or match.current is None or match.differing:
        verdict, reason = reasons.unmatched(match)
    else:
        old, new = match.baseline.lanes, match.current
        pairs = tuple(
            LanePair(seed=seed, baseline=old[seed], current=new[seed])
            for seed in sorted(old.keys() & new.keys())
        )
        verdict, reason = _decide(pairs)
    return CellReport(
        spec=match.spec,
        label=label_of(match.spec),
        verdict=verdict,
        reason=reason,
        pairs=pairs,
        is_environment_fault=verdict is CellVerdict.FAILED,
    )


def _decide(pairs: Sequence[LanePair]) -> tuple[CellVerdict, str]:
    if not pairs:
        return CellVerdict.FAILED, "it has no result for a seed of the baseline"
    lanes = [pair.current for pair in pairs if pair.current]
    if faults := [lane for lane in lanes if not lane.was_carried_out]:
        return CellVerdict.FAILED, reasons.fault(faults)
    different = [pair for pair in pairs if not pair.is_identical]
    if not different:
        return CellVerdict.PASS, reasons.identical(pairs)
    first = different[0]
    assert first.baseline and first.current
    where = first_difference(first.baseline, first.current)
    text = f"{len(different)} of {len(pairs)} lanes differ; seed {first.seed}: {where}"
    return CellVerdict.DIFFERS, text


def first_difference(old: Lane, new: Lane) -> str:
    """Where two lanes part: the step and both losses, every digit of them."""
    if old.losses is None or new.losses is None:
        return "the checksums differ (the baseline holds no losses to name the step)"
    steps = min(len(old.losses), len(new.losses))
    a, b = (np.ascontiguousarray(x[:steps], "<f8") for x in (old.losses, new.losses))
    unequal = np.flatnonzero(a.view(np.uint64) != b.view(np.uint64))
    if len(unequal):
        step = int(unequal[0])
        return f"first difference at step {step}: {a[step]!s} in the baseline, {b[step]!s} now"
    return (
        f"equal for {steps} steps, then the baseline has {len(old.losses)} steps "
        f"and this run {len(new.losses)}"
    )
