"""The gate's decision: a baseline and current records in, a report out. Pure.

The looks are replayed from the first at every call, so the report depends only on the
records, not on how many calls it took to collect them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.gate import reasons
from keelbench.gate.baseline import (
    Baseline,
    carried_out,
    hardware_of,
    label_of,
)
from keelbench.gate.judge import Judgement, judge
from keelbench.gate.lanes import Lane, lanes_of
from keelbench.gate.matching import Match, allowed_fields, check_compatible, match_cells
from keelbench.gate.sequential import Look, plan
from keelbench.gate.trial import (
    Trial,
    make_trial,
    margin_of,
    pairs_at,
    report_of,
    sample_of,
    structural,
)
from keelbench.gate.verdicts import (
    CellReport,
    CellVerdict,
    GateReport,
    PairKind,
)
from keelbench.records import Record
from keelbench.specs import CellSpec
from keelbench.stats import Estimate


def decide(
    baseline: Baseline,
    records: Sequence[Record],
    *,
    asked: Sequence[CellSpec] | None = None,
    looks: Sequence[Look] | None = None,
    margin: float | None = None,
    allow: Iterable[str] = (),
    strict: bool = False,
    more: bool = True,
) -> GateReport:
    """Compare records with a baseline, cell by cell, paired by seed.

    Args:
        baseline: what to hold the records to.
        records: all lanes run so far; none yet is fine if ``asked`` says what will be run.
        asked: the cells of the sweep; by default those of the records. A baseline cell
            that is not among them is missing.
        looks: from :func:`plan`; by default 3 seeds, then 5.
        margin: largest drop to tolerate, relative; by default what the baseline was
            calibrated to, else 10 %. Never below two quanta of the ramp: see
            :func:`keelbench.gate.trial.log_margin`.
        allow: settings that may differ, and ``hardware``.
        strict: an inconclusive gate returns 4 and not 0.
        more: False if no further seeds can be run: then what is there is decided on.

    Raises:
        KeelbenchError: nothing to compare (5); detector or hardware class differ (3);
            unknown setting in ``allow``, or a margin out of range (2).
    """
    if not records and not asked:
        raise KeelbenchError(
            "there are no results to check", "run the sweep first", ExitCode.FAILED
        )
    if margin is not None and not 0 < margin < 1:
        raise KeelbenchError(f"margin is {margin}: it must lie between 0 and 1 (10% is 0.1)")
    allowed = allowed_fields(allow)
    check_records(baseline, records, allowed)
    looks = tuple(looks or plan())
    matches = match_cells(baseline, current_cells(records, asked), allowed)
    trials = [trial for match in matches if (trial := make_trial(match, margin))]
    _replay(trials, looks, more)
    decided = {trial.baseline.hash: trial for trial in trials}
    cells = tuple(_cell_report(match, decided) for match in matches)
    return GateReport(
        baseline=baseline.name,
        sweep=baseline.sweep,
        hardware=baseline.hardware,
        detector=baseline.detector,
        cells=cells,
        looks=looks,
        is_strict=strict,
        notes=reasons.notes(baseline, records, cells),
    )


def check_records(
    baseline: Baseline, records: Sequence[Record], allowed: frozenset[str]
) -> None:
    """Refuse records of another detector version or hardware class than the baseline's."""
    found = {(record.detector, hardware_of(record)) for record in carried_out(records)}
    for detector, hardware in sorted(found):
        check_compatible(baseline, detector=detector, hardware=hardware, allowed=allowed)


def current_cells(
    records: Sequence[Record], asked: Sequence[CellSpec] | None, *, keep_losses: bool = False
) -> list[tuple[CellSpec, dict[int, Lane]]]:
    """Cells with their lanes; those asked for and not yet run have none."""
    run = lanes_of(records, keep_losses=keep_losses)
    if asked is None:
        return run
    lanes = {spec.hash: found for spec, found in run}
    return [(spec.resolved(), lanes.get(spec.hash, {})) for spec in asked]


def _replay(trials: Sequence[Trial], looks: Sequence[Look], more: bool) -> None:
    """Take look after look until every trial is decided or waits for seeds."""
    for look in looks:
        open_trials = [trial for trial in trials if trial.report is None]
        if not open_trials or (more and _set_wanted(open_trials, look)):
            return
        for trial in open_trials:
            trial.pairs = pairs_at(trial, look)
            trial.report = structural(trial)
        undecided = np.array([trial.report is None for trial in trials])
        found = judge(sample_of(trials), look, undecided)
        for index, trial in enumerate(trials):
            if undecided[index]:
                is_last = look is looks[-1] or len(trial.baseline.lanes) <= look.seeds
                trial.report = _judged(trial, found, index, look, is_last)


def _set_wanted(trials: Sequence[Trial], look: Look) -> bool:
    """Note the seeds that this look needs and that have not been run."""
    for trial in trials:
        seeds = sorted(trial.baseline.lanes)[: look.seeds]
        trial.wanted = tuple(seed for seed in seeds if seed not in trial.lanes)
    return any(trial.wanted for trial in trials)


def _judged(
    trial: Trial, found: Judgement, index: int, look: Look, is_last: bool
) -> CellReport | None:
    """The verdict of a look, or None if more seeds may still decide."""
    half = float(found.half[index])
    estimate = _estimate(trial, half, look)
    p_value = float(min(found.p_down[index], found.p_up[index]))
    is_clouded = trial.count(PairKind.LOST) > 0 or any(p.is_at_most for p in trial.pairs)
    if found.regressed[index]:
        verdict = CellVerdict.REGRESSED
    elif found.improved[index] and not is_clouded:
        verdict = CellVerdict.IMPROVED
    elif found.passed[index] and not is_clouded:
        verdict = CellVerdict.PASS
    elif not is_clouded and (found.no_drop[index] or (is_last and found.no_evidence[index])):
        verdict = CellVerdict.WITHIN_NOISE
    elif is_last:
        verdict = CellVerdict.INCONCLUSIVE
    else:
        return None
    reason = reasons.judged(verdict, trial.pairs, estimate, margin_of(trial.delta), p_value)
    return report_of(trial, verdict, reason, ratio=estimate, p_value=p_value)


def _estimate(trial: Trial, half: float, look: Look) -> Estimate:
    ratios = trial.ratios
    mean = float(ratios.mean()) if len(ratios) else None
    has_interval = mean is not None and math.isfinite(half)
    return Estimate(
        mean=None if mean is None else math.exp(mean),
        low=math.exp(mean - half) if mean is not None and has_interval else None,
        high=math.exp(mean + half) if mean is not None and has_interval else None,
        n=len(ratios),
        censored=sum(bool(p.current and p.current.is_censored) for p in trial.pairs),
        confidence=1 - 2 * look.tail,
    )


def _cell_report(match: Match, trials: Mapping[str, Trial]) -> CellReport:
    """The report of one match: from its trial, or why there is none."""
    trial = trials.get(match.baseline.hash) if match.baseline else None
    if trial is not None and not match.differing:
        if trial.report is not None:
            return trial.report
        reason = reasons.waiting(trial.wanted)
        return replace(
            report_of(trial, CellVerdict.INCONCLUSIVE, reason), wanted_seeds=trial.wanted
        )
    verdict, reason = reasons.unmatched(match)
    return CellReport(
        spec=match.spec, label=label_of(match.spec), verdict=verdict, reason=reason
    )
