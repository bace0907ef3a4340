"""What a check says: verdicts, one report per cell, one report for the gate. Passive."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from keelbench.errors import ExitCode
from keelbench.gate.lanes import Lane
from keelbench.gate.sequential import Look
from keelbench.specs import CellSpec
from keelbench.stats import Estimate


class CellVerdict(StrEnum):
    """From worst to best: a gate's verdict is that of its worst cell.

    With [low, high] the interval of the mean paired log-ratio ln(current / baseline) and
    delta = -ln(1 - margin):
    """

    REGRESSED = "regressed"
    """high < -delta and the paired test is significant after Holm's correction; or lanes
    that had a Max LR now diverge at once or never learn (see ``trial.lost_too_many``)."""
    DIFFERS = "differs"
    """Only with ``--exact``: some loss is not the same bit for bit."""
    FAILED = "failed"
    """A run had a non-finite loss at its first step where the baseline had a Max LR (a
    regression), or could not be carried out at all (an error of the run)."""
    MISSING = "missing"
    """The baseline has the cell, the sweep does not: nobody watches it any more."""
    NOT_COMPARABLE = "not comparable"
    """Settings differ that ``--allow`` does not name."""
    NEW = "new"
    """The sweep has the cell, the baseline does not."""
    INCONCLUSIVE = "inconclusive"
    """A drop beyond the margin is neither shown nor excluded, and the seeds are used up: the
    interval is at least as wide as the margin, or it excludes 0 and straddles -delta, or it
    lies beyond -delta but the test over all cells does not confirm it."""
    WITHIN_NOISE = "within noise"
    """Not shown equivalent, but nothing to fear: either low >= -delta (a drop beyond the
    margin is excluded, a rise is not), or the interval holds 0 and is narrower than the
    margin, so that a drop of twice the margin is excluded."""
    IMPROVED = "improved"
    """low > delta and the paired test agrees after Holm's correction."""
    PASS = "pass"
    """Equivalence is shown: -delta <= low and high <= delta."""


SEVERITY = {verdict: rank for rank, verdict in enumerate(CellVerdict)}

_EXIT_CODES = {
    CellVerdict.REGRESSED: ExitCode.REGRESSION,
    CellVerdict.DIFFERS: ExitCode.REGRESSION,
    CellVerdict.FAILED: ExitCode.FAILED,
    CellVerdict.MISSING: ExitCode.NO_BASELINE,
    CellVerdict.NOT_COMPARABLE: ExitCode.NO_BASELINE,
    CellVerdict.NEW: ExitCode.NO_BASELINE,
    CellVerdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
}

_PRIORITY = (
    ExitCode.REGRESSION,
    ExitCode.FAILED,
    ExitCode.NO_BASELINE,
    ExitCode.INCONCLUSIVE,
)
"""Which of several exit codes the gate returns."""


class PairKind(StrEnum):
    """What a seed had in the baseline and has now."""

    RATIO = "ratio"
    """A Max LR or a bound on both sides."""
    LOST = "lost"
    """A Max LR or a bound in the baseline, none now."""
    GAINED = "gained"
    """None in the baseline, one now."""
    NEITHER = "neither"
    """None on either side."""
    ABSENT = "absent"
    """Not run, or could not be carried out, on one side or the other."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LanePair:
    """One seed on both sides."""

    seed: int
    baseline: Lane | None
    current: Lane | None

    @property
    def kind(self) -> PairKind:
        if self.baseline is None or self.current is None:
            return PairKind.ABSENT
        if not (self.baseline.was_carried_out and self.current.was_carried_out):
            return PairKind.ABSENT
        had, has = (lane.restricted is not None for lane in (self.baseline, self.current))
        if had and has:
            return PairKind.RATIO
        if had:
            return PairKind.LOST
        return PairKind.GAINED if has else PairKind.NEITHER

    @property
    def log_ratio(self) -> float | None:
        """ln(current / baseline) of the Max LR up to the peak.

        A surviving lane counts as its peak on both sides: min(Max LR, peak) is known for
        every lane, so nothing is guessed, and two survivors are equal (the idea of the
        restricted mean in survival analysis).
        """
        before = self.baseline and self.baseline.restricted
        after = self.current and self.current.restricted
        return float(np.log(after / before)) if before and after else None

    @property
    def is_at_most(self) -> bool:
        """The baseline survived and the current lane did not: the drop is at least this."""
        return bool(
            self.baseline
            and self.current
            and self.baseline.is_censored
            and self.current.max_lr is not None
        )

    @property
    def is_identical(self) -> bool:
        """Both ran the same losses, bit for bit."""
        return bool(
            self.baseline and self.current and self.baseline.sha256 == self.current.sha256
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellReport:
    """The decision on one cell and everything it rests on."""

    spec: CellSpec
    label: str
    verdict: CellVerdict
    reason: str
    """One sentence: what was seen, and against what."""
    ratio: Estimate | None = None
    """current / baseline: geometric mean over paired seeds, with the interval decided on."""
    p_value: float | None = None
    """Of the direction seen, adjusted over cells by Holm's method."""
    margin: float | None = None
    quantum: float | None = None
    pairs: tuple[LanePair, ...] = ()
    wanted_seeds: tuple[int, ...] = ()
    """Seeds to run before this cell can be decided; empty if it is, or never will be."""
    is_environment_fault: bool = False
    """The run could not be carried out, as opposed to carried out and bad."""

    @property
    def exit_code(self) -> ExitCode:
        """Before ``--strict`` is considered."""
        if self.verdict is CellVerdict.FAILED and not self.is_environment_fault:
            return ExitCode.REGRESSION
        return _EXIT_CODES.get(self.verdict, ExitCode.OK)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GateReport:
    """The decision on all cells."""

    baseline: str
    sweep: str
    hardware: str
    detector: str
    cells: tuple[CellReport, ...]
    looks: tuple[Look, ...] = ()
    is_strict: bool = False
    is_exact: bool = False
    notes: tuple[str, ...] = ()
    """Facts that explain differences without deciding anything: another torch, a bound."""

    @property
    def verdict(self) -> CellVerdict:
        """That of the worst cell."""
        return min((cell.verdict for cell in self.cells), key=SEVERITY.__getitem__)

    @property
    def exit_code(self) -> ExitCode:
        """1 before 5 before 3 before 4; 4 counts as 0 unless strict."""
        codes = {cell.exit_code for cell in self.cells}
        worst = next((code for code in _PRIORITY if code in codes), ExitCode.OK)
        is_forgiven = worst is ExitCode.INCONCLUSIVE and not self.is_strict
        return ExitCode.OK if is_forgiven else worst

    @property
    def worst_first(self) -> Sequence[CellReport]:
        """By severity, then by the size of the drop."""

        def rank(cell: CellReport) -> tuple[int, float]:
            mean = cell.ratio.mean if cell.ratio and cell.ratio.mean is not None else 1.0
            return SEVERITY[cell.verdict], mean

        return sorted(self.cells, key=rank)

    def wanted_seeds(self) -> dict[tuple[int, ...], list[CellSpec]]:
        """Seeds to run next, and the cells to run them for; empty once all is decided."""
        found: dict[tuple[int, ...], list[CellSpec]] = {}
        for cell in self.cells:
            if cell.wanted_seeds:
                found.setdefault(cell.wanted_seeds, []).append(cell.spec)
        return found
