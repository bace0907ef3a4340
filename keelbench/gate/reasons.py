"""One sentence per decision: what was seen, in numbers, and against what."""

from collections import Counter
from collections.abc import Sequence

from keelbench.gate.baseline import Baseline, carried_out
from keelbench.gate.lanes import Lane
from keelbench.gate.matching import Match
from keelbench.gate.verdicts import CellReport, CellVerdict, LanePair, PairKind
from keelbench.records import Record
from keelbench.stats import MIN_VALUES, Estimate


def judged(
    verdict: CellVerdict,
    pairs: Sequence[LanePair],
    ratio: Estimate,
    margin: float,
    p_value: float,
) -> str:
    """The reason for a verdict that rests on the paired ratios."""
    if ratio.mean is None or ratio.low is None or ratio.high is None:
        return f"cannot decide with {seeds(ratio.n)}: at least {MIN_VALUES} are needed"
    change = f"Max LR {moved(ratio.mean)} ({interval(ratio)})"
    limit = f"the margin of {percent(margin)}"
    if verdict in (CellVerdict.REGRESSED, CellVerdict.IMPROVED):
        at_least = ", at least: lanes that survived broke" if _at_most(pairs) else ""
        return f"{change}, beyond {limit}{at_least}; p = {p_value:.2g} over all cells"
    if verdict is CellVerdict.PASS:
        return f"{change}, within {limit}"
    if verdict is CellVerdict.WITHIN_NOISE:
        if ratio.low >= 1 - margin:
            return f"{change}: a drop beyond {limit} is excluded, a rise is not"
        return f"{change}: no evidence of a change, yet a drop of {limit} is not excluded"
    if ratio.high < 1 - margin and not any(pair.kind is PairKind.LOST for pair in pairs):
        return (
            f"cannot decide with {seeds(ratio.n)}: {change}, beyond {limit}, "
            f"but p = {p_value:.2g} over all cells could be chance"
        )
    return _undecided(pairs, change, limit, ratio.n)


def _undecided(pairs: Sequence[LanePair], change: str, limit: str, n: int) -> str:
    if lost_lanes := [pair for pair in pairs if pair.kind is PairKind.LOST]:
        return f"{len(lost_lanes)} of {len(pairs)} lanes lost its Max LR; {change}"
    if bounds := _at_most(pairs):
        return (
            f"{bounds} of {len(pairs)} lanes survived in the baseline and now broke: "
            f"the drop is only known to be at least that seen; {change}"
        )
    return f"cannot decide with {seeds(n)}: {change} against {limit}"


def lost(pairs: Sequence[LanePair]) -> str:
    """Lanes that had a Max LR and have none now, by what became of them."""
    gone = [pair.current for pair in pairs if pair.kind is PairKind.LOST and pair.current]
    kinds = Counter(lane.outcome for lane in gone)
    what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    detail = next((lane.reason for lane in gone if lane.reason), None)
    why = f" ({detail})" if detail else ""
    return f"{len(gone)} of {len(pairs)} lanes had a Max LR and have none now: {what}{why}"


def gained(pairs: Sequence[LanePair]) -> str:
    now = [pair.current.outcome for pair in pairs if pair.current and pair.current.restricted]
    return f"{len(now)} of {len(pairs)} lanes had no Max LR and have one now: {', '.join(now)}"


def fault(lanes: Sequence[Lane]) -> str:
    names = ", ".join(str(lane.seed) for lane in lanes)
    why = next((lane.reason for lane in lanes if lane.reason), "no step was run")
    return f"the run could not be carried out (seed {names}): {why}"


def identical(pairs: Sequence[LanePair]) -> str:
    return f"{seeds(len(pairs))}: every loss equals the baseline's, bit for bit"


def settings(differing: Sequence[str]) -> str:
    names = " ".join(f"--allow {text.partition(':')[0]}" for text in differing)
    return f"settings differ: {'; '.join(differing)} (if on purpose: {names})"


def unmatched(match: Match) -> tuple[CellVerdict, str]:
    """Why a cell has nothing to be compared with."""
    if match.baseline is None:
        return CellVerdict.NEW, "the baseline has no such cell"
    if match.current is None:
        return CellVerdict.MISSING, "the sweep no longer has this cell"
    return CellVerdict.NOT_COMPARABLE, settings(match.differing)


def waiting(wanted: Sequence[int]) -> str:
    if not wanted:
        return "undecided: waits for the seeds of other cells"
    return f"undecided: seed {', '.join(map(str, wanted))} is still to be run"


def notes(
    baseline: Baseline, records: Sequence[Record], cells: Sequence[CellReport]
) -> tuple[str, ...]:
    """Facts that may explain a difference, and limits of what was compared."""
    found = []
    for name in ("torch", "keelbench", "device_name", "platform"):
        before = baseline.environment.get(name, "")
        now = {str(getattr(r.environment, name)) for r in carried_out(records)}
        if before and now - {before}:
            found.append(f"{name}: {before} in the baseline, {', '.join(sorted(now))} now")
    bounded = [cell.label for cell in cells if cell.ratio and cell.ratio.censored]
    if bounded:
        found.append(
            "lanes that survived count as their peak LR, so changes above it are not seen: "
            + ", ".join(bounded)
        )
    return tuple(found)


def moved(ratio: float) -> str:
    """``fell by 24 %``, ``rose by 3.1 %``, ``did not move``."""
    if abs(ratio - 1) < 5e-5:
        return "did not move"
    return f"{'fell' if ratio < 1 else 'rose'} by {percent(abs(ratio - 1))}"


def interval(ratio: Estimate) -> str:
    """``90 % interval -30 % to -18 %``."""
    assert ratio.low is not None and ratio.high is not None
    level = f"{100 * ratio.confidence:.3g} %"
    return f"{level} interval {signed(ratio.low)} to {signed(ratio.high)}"


def signed(ratio: float) -> str:
    """A ratio as a signed change in percent."""
    return f"{100 * (ratio - 1):+.3g} %"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def seeds(n: int) -> str:
    return f"{n} seed" if n == 1 else f"{n} seeds"


def _at_most(pairs: Sequence[LanePair]) -> int:
    return sum(pair.is_at_most for pair in pairs)
