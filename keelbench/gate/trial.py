"""A comparable cell on its way to a verdict: its pairs, its margin, its verdict so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keelbench.gate import reasons
from keelbench.gate.baseline import BaselineCell, label_of
from keelbench.gate.judge import Sample
from keelbench.gate.lanes import Lane
from keelbench.gate.matching import Match
from keelbench.gate.sequential import Look
from keelbench.gate.verdicts import CellReport, CellVerdict, LanePair, PairKind
from keelbench.records import FloatArray, VerdictKind
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


def make_trial(match: Match, margin: float | None) -> Trial | None:
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


def log_margin(margin: float, quantum: float) -> float:
    """The margin as a log-ratio: -ln(1 - margin), and at least 2 ln(1 + quantum).

    One quantum because a reading may be one step off, and one more because that is the least
    half-width of an interval: with less, no cell could pass.
    """
    return max(-math.log1p(-margin), 2 * math.log1p(quantum))


def margin_of(delta: float) -> float:
    """The relative margin of a log-ratio."""
    return -math.expm1(-delta)


def pairs_at(trial: Trial, look: Look) -> tuple[LanePair, ...]:
    seeds = [seed for seed in sorted(trial.baseline.lanes) if seed in trial.lanes]
    return tuple(
        LanePair(seed=seed, baseline=trial.baseline.lanes[seed], current=trial.lanes[seed])
        for seed in seeds[: look.seeds]
    )


def sample_of(trials: Sequence[Trial]) -> Sample:
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


def structural(trial: Trial) -> CellReport | None:
    """Verdicts that need no statistics, or None."""
    if not trial.pairs:
        return report_of(trial, CellVerdict.FAILED, "it has no result", fault=True)
    if lost_too_many(trial):
        lost = [p.current for p in trial.pairs if p.kind is PairKind.LOST and p.current]
        is_failed = all(lane.verdict is VerdictKind.FAILED for lane in lost)
        verdict = CellVerdict.FAILED if is_failed else CellVerdict.REGRESSED
        return report_of(trial, verdict, reasons.lost(trial.pairs))
    currents = [pair.current for pair in trial.pairs if pair.current]
    faults = [lane for lane in currents if not lane.was_carried_out]
    if faults:
        return report_of(trial, CellVerdict.FAILED, reasons.fault(faults), fault=True)
    if all(pair.is_identical for pair in trial.pairs):
        return report_of(trial, CellVerdict.PASS, reasons.identical(trial.pairs))
    if len(trial.pairs) == trial.count(PairKind.NEITHER):
        return report_of(trial, CellVerdict.PASS, "no lane has a Max LR, as in the baseline")
    gained = trial.count(PairKind.GAINED)
    if gained >= min(2, len(trial.pairs)) and not len(trial.ratios):
        return report_of(trial, CellVerdict.IMPROVED, reasons.gained(trial.pairs))
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


def report_of(
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
