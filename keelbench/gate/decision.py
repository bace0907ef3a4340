"""The gate's decision: a baseline and current records in, a report out. Pure.

The looks are replayed from the first at every call, so the report depends only on the
records, not on how many calls it took to collect them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.gate import reasons
from keelbench.gate.baseline import (
    Baseline,
    BaselineCell,
    carried_out,
    hardware_of,
    label_of,
)
from keelbench.gate.judge import Judgement, Sample, judge
from keelbench.gate.lanes import Lane, lanes_of
from keelbench.gate.matching import Match, allowed_fields, check_compatible, match_cells
from keelbench.gate.sequential import Look, plan
from keelbench.gate.verdicts import (
    CellReport,
    CellVerdict,
    GateReport,
    LanePair,
    PairKind,
)
from keelbench.records import FloatArray, Record, VerdictKind
from keelbench.specs import CellSpec
from keelbench.stats import Estimate, relative_quantum

DEFAULT_MARGIN = 0.10


@dataclass(slots=True)
class Trial:
    """A comparable cell on its way to a verdict."""

    spec: CellSpec
    baseline: BaselineCell
    lanes: Mapping[int, Lane]
    delta: float
    """The margin as a log-ratio."""
    quantum: float
    pairs: tuple[LanePair, ...] = ()
    """Those that the last look saw."""
    report: CellReport | None = None
    """None while undecided."""
    wanted: tuple[int, ...] = ()

    @property
    def ratios(self) -> FloatArray:
        found = [pair.log_ratio for pair in self.pairs]
        return np.array([ratio for ratio in found if ratio is not None])

    @property
    def noise(self) -> tuple[float, int]:
        """Calibrated sd and degrees of freedom; repeats without any noise count as none.

        They only say that this machine is deterministic, not how far another one's rounding
        moves the result.
        """
        found = self.baseline.calibration
        return (found.sd, found.df) if found and found.sd > 0 else (0.0, 0)

    def count(self, kind: PairKind) -> int:
        return sum(pair.kind is kind for pair in self.pairs)


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
            :func:`log_margin`.
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
    trials = [trial for match in matches if (trial := _trial(match, margin))]
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


def log_margin(margin: float, quantum: float) -> float:
    """The margin as a log-ratio: -ln(1 - margin), and at least 2 ln(1 + quantum).

    One quantum because a reading may be one step off, and one more because that is the least
    half-width of an interval: with less, no cell could pass.
    """
    return max(-math.log1p(-margin), 2 * math.log1p(quantum))


def _trial(match: Match, margin: float | None) -> Trial | None:
    """The trial of a match that can be compared, else None."""
    cell = match.baseline
    if cell is None or match.current is None or match.differing:
        return None
    values = [lane.max_lr for lane in cell.lanes.values() if lane.max_lr is not None]
    quanta = [relative_quantum(cell.spec, value) for value in values]
    quantum = float(np.mean(quanta)) if quanta else 0.0
    if margin is None:
        margin = cell.calibration.margin if cell.calibration else DEFAULT_MARGIN
    return Trial(
        spec=match.spec,
        baseline=cell,
        lanes=match.current,
        delta=log_margin(margin, quantum),
        quantum=quantum,
    )


def _replay(trials: Sequence[Trial], looks: Sequence[Look], more: bool) -> None:
    """Take look after look until every trial is decided or waits for seeds."""
    for look in looks:
        open_trials = [trial for trial in trials if trial.report is None]
        if not open_trials or (more and _set_wanted(open_trials, look)):
            return
        for trial in open_trials:
            trial.pairs = _pairs(trial, look)
            trial.report = _structural(trial)
        undecided = np.array([trial.report is None for trial in trials])
        found = judge(_sample(trials), look, undecided)
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


def _pairs(trial: Trial, look: Look) -> tuple[LanePair, ...]:
    seeds = [seed for seed in sorted(trial.baseline.lanes) if seed in trial.lanes]
    return tuple(
        LanePair(seed=seed, baseline=trial.baseline.lanes[seed], current=trial.lanes[seed])
        for seed in seeds[: look.seeds]
    )


def _sample(trials: Sequence[Trial]) -> Sample:
    ratios = [trial.ratios for trial in trials]
    return Sample(
        n=np.array([len(x) for x in ratios], dtype=np.int64),
        mean=np.array([x.mean() if len(x) else 0.0 for x in ratios]),
        sd=np.array([x.std(ddof=1) if len(x) > 1 else 0.0 for x in ratios]),
        quantum=np.array([trial.quantum for trial in trials]),
        delta=np.array([trial.delta for trial in trials]),
        noise_sd=np.array([trial.noise[0] for trial in trials]),
        noise_df=np.array([trial.noise[1] for trial in trials], dtype=np.int64),
    )


def _structural(trial: Trial) -> CellReport | None:
    """Verdicts that need no statistics, or None."""
    if not trial.pairs:
        return _report(trial, CellVerdict.FAILED, "it has no result", fault=True)
    if lost_too_many(trial):
        lost = [p.current for p in trial.pairs if p.kind is PairKind.LOST and p.current]
        is_failed = all(lane.verdict is VerdictKind.FAILED for lane in lost)
        verdict = CellVerdict.FAILED if is_failed else CellVerdict.REGRESSED
        return _report(trial, verdict, reasons.lost(trial.pairs))
    currents = [pair.current for pair in trial.pairs if pair.current]
    faults = [lane for lane in currents if not lane.was_carried_out]
    if faults:
        return _report(trial, CellVerdict.FAILED, reasons.fault(faults), fault=True)
    if all(pair.is_identical for pair in trial.pairs):
        return _report(trial, CellVerdict.PASS, reasons.identical(trial.pairs))
    if len(trial.pairs) == trial.count(PairKind.NEITHER):
        return _report(trial, CellVerdict.PASS, "no lane has a Max LR, as in the baseline")
    gained = trial.count(PairKind.GAINED)
    if gained >= min(2, len(trial.pairs)) and not len(trial.ratios):
        return _report(trial, CellVerdict.IMPROVED, reasons.gained(trial.pairs))
    return None


def lost_too_many(trial: Trial) -> bool:
    """Whether lanes that had a Max LR and now have none make the cell a regression.

    Two lanes do (one, if the baseline has only one), net of lanes that went the other way:
    one lane alone may be chance, and is reported as inconclusive. Where already the baseline
    has lanes without a Max LR, losing one is ordinary: then all of at least 3 must be lost.
    """
    lost, gained = trial.count(PairKind.LOST), trial.count(PairKind.GAINED)
    had = lost + trial.count(PairKind.RATIO)
    if any(lane.restricted is None for lane in trial.baseline.lanes.values()):
        return had >= 3 and lost == had
    return lost > 0 and lost - gained >= min(2, had)


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
    return _report(trial, verdict, reason, ratio=estimate, p_value=p_value)


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


def margin_of(delta: float) -> float:
    """The relative margin of a log-ratio."""
    return -math.expm1(-delta)


def _report(
    trial: Trial,
    verdict: CellVerdict,
    reason: str,
    *,
    ratio: Estimate | None = None,
    p_value: float | None = None,
    fault: bool = False,
) -> CellReport:
    return CellReport(
        spec=trial.spec,
        label=label_of(trial.spec),
        verdict=verdict,
        reason=reason,
        ratio=ratio,
        p_value=p_value,
        margin=margin_of(trial.delta),
        quantum=trial.quantum,
        pairs=trial.pairs,
        is_environment_fault=fault,
    )


def _cell_report(match: Match, trials: Mapping[str, Trial]) -> CellReport:
    """The report of one match: from its trial, or why there is none."""
    trial = trials.get(match.baseline.hash) if match.baseline else None
    if trial is not None and not match.differing:
        if trial.report is not None:
            return trial.report
        reason = reasons.waiting(trial.wanted)
        return replace(
            _report(trial, CellVerdict.INCONCLUSIVE, reason), wanted_seeds=trial.wanted
        )
    verdict, reason = reasons.unmatched(match)
    return CellReport(
        spec=match.spec, label=label_of(match.spec), verdict=verdict, reason=reason
    )
