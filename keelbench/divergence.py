"""Did this ramp diverge, by which rule, and from which step on?

A pure function of the trace: :func:`judge`. It reads the loss on the fixed probe batch, whose
step-to-step noise is 0.01 to 0.05 nats, and only where there is no usable probe a smoothed
train loss (noise of a 512-token batch: about 0.1 nats).

The paper (arXiv 2601.19895, section 5.1) names three patterns without any number. They become
rules here, next to non-finite values; every number is a field of :class:`Thresholds`.

* non-finite: NaN or infinity in the train loss or the probe. Always counts, at once.
* irrecoverable instability: ``patience`` steps without a recovery, ``sustained`` of them spent
  high. High is ``rise`` above the best level so far, or back at the unigram entropy, where a
  collapsed language model ends: it has forgotten context, not the letters' frequencies. (Nor
  does it often exceed ln V, so that rules asking for a multiple of the best loss see nothing.)
  A recovery is a return to within ``recovery`` of the best level. So a spike that returns is
  not divergence, while jumps, overshoots, and slow drifts that never return are.
* stagnation: the loss came down, but for ``plateau`` steps, and ``persistence`` times as long
  as it took to get there, has not improved by ``progress``, and still is not below the unigram
  entropy. Steps spent high do not count here; all others do, so that a run which barely passes
  that entropy and falls back to it is stuck, too. Where the entropy is unknown, a plateau
  counts only if it began within ``early`` steps and leaves more than half of the initial loss.
* degradation: still falling, but ``lag`` above a healthy reference run for ``plateau`` steps.

The earliest detection wins. Thresholds decide *that*; changepoint.py decides *where*, without
them: moving all of them, or any one, by 20 % moves no onset of the recorded traces.
"""

import dataclasses
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from keelbench.changepoint import (
    NOISE_HEIGHTS,
    has_left_floor,
    noise_level,
    plateau_start,
    rise_start,
)
from keelbench.records import FloatArray, IntArray, Rule, Trace, Verdict, VerdictKind

DETECTOR_VERSION = "2"
"""Raised with every change that can move a verdict or an onset; part of every record's id."""

PROBE_SPACING = 16
"""Steps. A probe measured less often is ignored in favour of the train loss: it would see a
quarter of ``patience`` at a time."""

PROBE_WINDOW = 3
"""Probes whose median decides, so that no single one does."""

TRAIN_WINDOW = 17
"""The same for train losses, where they stand in for the probe: it brings 0.1 nats of batch
noise down to the probe's 0.03."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Everything that decisions depend on. nats are per token, steps are rows of the trace."""

    rise: float = 0.25
    """nats above the best level. Ten times the probe's noise, a third of what a model of 64
    sub-layers loses when it collapses (0.7 to 0.9), and within the reach of Pre-LN's drift."""
    recovery: float = 0.1
    """nats above the best level within which the loss has recovered. Four times the probe's
    noise: a healthy plateau is inside nearly always. Less than half of ``rise``: a level that
    is neither leaves the question open."""
    patience: int = 64
    """steps since the last recovery. Spikes that recovered lasted 1 to 40 steps in the runs
    seen."""
    sustained: int = 44
    """steps of these spent high: longer than any such spike, so that no spike is enough, even
    if noise or a drift had kept the loss from recovering just before."""
    context: float = 0.15
    """nats below the unigram entropy that show something has been learned from context. More
    than the corpus's entropy differs from a probe batch's (up to 0.09 seen), less than the 0.3
    that even the weakest model gained from context before it lost it again."""
    learned: float = 0.3
    """nats below the initial loss that show that anything has been learned. Six times the
    noise; every trainable model seen gains 1.5 in its first twenty steps."""
    plateau: int = 64
    """steps without progress. A healthy model crosses the unigram entropy within ten steps,
    around step 20; the plateaus seen last for good. (Not for large vocabularies at small
    batches: words take longer to learn than bytes, and may need a longer plateau.)"""
    progress: float = 0.03
    """nats gained over ``plateau`` steps that count as progress. Stagnant runs creep by 0.02; a
    healthy one gains 0.3 or more from that level."""
    persistence: float = 3.0
    """times as long as the way to it (no unit) that a plateau lasts before it counts. A power
    law that passes this level late and slowly makes progress before that. Post-LN reaches its
    plateau at step 22: there both conditions are met at step 88."""
    early: int = 36
    """steps; only where the unigram entropy is unknown: a descent that ended sooner ended far
    too early. Post-LN and HybridNorm stop at step 20 to 25."""
    lag: float = 0.3
    """nats above the reference at the same step. The floors of healthy architectures differ by
    up to 0.2."""
    quiet: float = 0.035
    """nats, standard deviation from point to point, up to which the thresholds above hold. For
    a noisier curve those in nats widen in proportion: ``rise`` is always seven such deviations
    or more, while the best of 1,000 noisy points lies 3.2 below their mean."""

    def scaled(self, factor: float) -> Self:
        """All of them times a factor (whole numbers stay whole): for sensitivity checks."""
        return self._times(factor, [field.name for field in dataclasses.fields(self)])

    def widened(self, noise: float) -> Self:
        """Distances in nats (``context`` is a level) times the noise in units of ``quiet``."""
        nats = ["rise", "recovery", "learned", "progress", "lag"]
        return self._times(max(1.0, noise / self.quiet), nats)

    def _times(self, factor: float, names: list[str]) -> Self:
        values = {name: getattr(self, name) for name in names}
        changed = {
            name: max(1, round(value * factor)) if isinstance(value, int) else value * factor
            for name, value in values.items()
        }
        return dataclasses.replace(self, **changed)


DEFAULT_THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True)
class _Curve:
    """The finite part of what is judged: increasing steps and the loss at each of them."""

    steps: IntArray
    raw: FloatArray
    """As measured: what onsets are located in."""
    loss: FloatArray
    """Freed from spikes of one point: what decisions are made on."""
    noise: float
    """Standard deviation (nats) from point to point of a probe as noisy as ``loss`` is."""

    @property
    def best(self) -> FloatArray:
        """Lowest level so far, at every point."""
        return np.minimum.accumulate(self.loss)

    @property
    def interval(self) -> FloatArray:
        """Steps since the point before: what each point stands for."""
        return np.diff(self.steps, prepend=self.steps[:1]).astype(float)

    def until(self, step: int) -> tuple[IntArray, FloatArray]:
        """The curve as it was known at a step."""
        count = int(np.searchsorted(self.steps, step, side="right"))
        return self.steps[:count], self.raw[:count]


@dataclass(frozen=True, slots=True)
class _Finding:
    """A rule that fired."""

    rule: Rule
    onset: int
    detected: int
    reason: str


def judge(
    trace: Trace,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    reference: Trace | None = None,
    ended: bool = True,
) -> Verdict | None:
    """The verdict on a trace, or None while the ramp goes on and nothing is certain yet.

    What comes after ``detected_step`` changes nothing: the verdict on a finished trace is the
    one that could be given then. (Of a probe noisier than ``quiet``, the noise is known better
    later on, which may move ``detected_step`` by a few probes.)

    Args:
        trace: what has been measured so far.
        thresholds: what decisions depend on; onsets do not.
        reference: a healthy run with the same LR at every step, to judge degradation against.
        ended: whether the trace is complete. An excursion that is still open at its end counts
            only with the full patience; with less the ramp was survived up to ``open_step``,
            and the reason says that it ended high. Non-finite values need no patience.
    """
    broken = _first_non_finite(trace)
    if broken == 0:
        return Verdict(kind=VerdictKind.FAILED, reason="non-finite at step 0")
    curve = _curve(trace, trace.steps if broken is None else broken)
    limits = thresholds.widened(curve.noise)
    healthy = None if reference is None else _healthy_part(reference, thresholds)
    note = "" if reference is not None else "; degradation not checked (no reference run)"
    fired = [
        finding
        for finding in (
            _instability(curve, trace.unigram_entropy, limits),
            _stagnation(curve, trace.unigram_entropy, limits),
            _degradation(curve, healthy, limits),
            _non_finite(curve, broken, limits),
        )
        if finding is not None
    ]
    if not fired:
        return _undiverged(curve, limits, note) if ended else None
    first = min(fired, key=lambda finding: finding.detected)
    return Verdict(
        kind=VerdictKind.DIVERGED,
        rule=first.rule,
        onset_step=first.onset,
        detected_step=first.detected,
        reason=first.reason + note,
    )


def _undiverged(curve: _Curve, limits: Thresholds, note: str) -> Verdict:
    """What a complete trace is if no rule fired: survived, or still at its initial level."""
    fall = float(curve.loss[0] - curve.loss.min()) if len(curve.loss) else 0.0
    if fall < limits.learned:
        return Verdict(
            kind=VerdictKind.NEVER_LEARNED,
            reason=f"loss fell by {fall:.2f} nats, less than the {limits.learned:.2f} that "
            f"would show learning{note}",
        )
    if _is_high_at_end(curve, limits):
        height = float(curve.raw[-1] - curve.best[-1])
        note = (
            f", but the trace ends {height:.2f} nats above its best level, too soon to tell "
            f"whether it would have recovered (patience is {limits.patience} steps){note}"
        )
        begin = rise_start(curve.steps, curve.raw)
        return Verdict(
            kind=VerdictKind.SURVIVED, reason=f"no rule fired{note}", open_step=begin
        )
    return Verdict(kind=VerdictKind.SURVIVED, reason=f"no rule fired{note}")


def _first_non_finite(trace: Trace) -> int | None:
    """First step at which the train loss or the probe is NaN or infinite."""
    found = np.flatnonzero(~np.isfinite(trace.loss)).tolist()[:1]
    if trace.probe is not None and trace.probe_step is not None:
        found += trace.probe_step[~np.isfinite(trace.probe)].tolist()[:1]
    return min(found, default=None)


def _curve(trace: Trace, end: int) -> _Curve:
    """What was measured before step ``end``: the probe, or else the smoothed train loss."""
    if trace.probe is not None and trace.probe_step is not None:
        measured = trace.probe_step < end
        steps, raw = trace.probe_step[measured], trace.probe[measured]
        if len(steps) > 1 and np.median(np.diff(steps)) <= PROBE_SPACING:
            return _Curve(steps, raw, _trailing_median(raw, PROBE_WINDOW), noise_level(raw))
    raw = trace.loss[:end]
    noise = noise_level(raw) * np.sqrt(PROBE_WINDOW / TRAIN_WINDOW)
    return _Curve(np.arange(len(raw)), raw, _trailing_median(raw, TRAIN_WINDOW), noise)


def _trailing_median(loss: FloatArray, window: int) -> FloatArray:
    """Median of the last points up to each one: what could be known then."""
    smooth = np.array([np.median(loss[: end + 1]) for end in range(min(window - 1, len(loss)))])
    if len(loss) < window:
        return smooth
    windows = np.lib.stride_tricks.sliding_window_view(loss, window)
    return np.concatenate([smooth, np.median(windows, axis=1)])


def _since(reset: NDArray[np.bool_], amount: FloatArray) -> FloatArray:
    """Running sum of the amounts since the last reset, at every point."""
    total = np.cumsum(amount)
    return total - np.maximum.accumulate(np.where(reset, total, 0.0))


def _instability(curve: _Curve, unigram: float | None, limits: Thresholds) -> _Finding | None:
    best = curve.best
    high = curve.loss > best + limits.rise
    if unigram is not None:
        forgotten = unigram - limits.context
        high |= (best < forgotten) & (curve.loss > forgotten)
    recovered = curve.loss <= best + limits.recovery
    away = _since(recovered, curve.interval)
    steps_high = _since(recovered, curve.interval * high)
    lasting = (away >= limits.patience) & (steps_high >= limits.sustained)
    fired = np.flatnonzero(high & lasting)
    if not len(fired):
        return None
    at, detected = fired[0], int(curve.steps[fired[0]])
    return _Finding(
        Rule.INSTABILITY,
        rise_start(*curve.until(detected)),
        detected,
        f"loss rose {curve.loss[at] - best[at]:.2f} nats above its best level of "
        f"{best[at]:.2f} and did not recover",
    )


def _is_high_at_end(curve: _Curve, limits: Thresholds) -> bool:
    if len(curve.raw) < 2:
        return False
    rise = max(limits.rise, NOISE_HEIGHTS * noise_level(curve.raw))
    return bool(curve.raw[-1] > curve.best[-1] + rise)


def _non_finite(curve: _Curve, broken: int | None, limits: Thresholds) -> _Finding | None:
    """Backdated where the loss was on its way up already: overflow is how excursions end."""
    if broken is None:
        return None
    rising = _is_high_at_end(curve, limits)
    return _Finding(
        Rule.NON_FINITE,
        rise_start(curve.steps, curve.raw) if rising else broken,
        broken,
        "loss is not finite",
    )


def _stands_still(curve: _Curve, limits: Thresholds, height: float) -> NDArray[np.bool_]:
    """Points whose best level is hardly better than it was ``plateau`` steps ago.

    Steps spent more than ``height`` (nats) above that level, on a spike, do not count.
    """
    clock = np.cumsum(curve.interval * (curve.loss <= curve.best + height))
    before = np.searchsorted(clock, clock - limits.plateau, side="right") - 1
    gained = np.where(before >= 0, curve.best[before] - curve.best, np.inf)
    return gained < limits.progress


def _stagnation(curve: _Curve, unigram: float | None, limits: Thresholds) -> _Finding | None:
    if not len(curve.loss):
        return None
    best, initial = curve.best, curve.loss[0]
    level = initial / 2 if unigram is None else unigram - limits.context
    still = _stands_still(curve, limits, limits.rise)
    fired = np.flatnonzero(still & (best > level) & (initial - best > limits.learned))
    if not len(fired):
        return None
    seen = curve.until(int(curve.steps[fired[0]]))
    onset = rise_start(*seen) if has_left_floor(seen[1]) else plateau_start(*seen)
    if unigram is None and (onset > limits.early or initial <= 0):
        return None
    fired = fired[curve.steps[fired] >= (1 + limits.persistence) * onset]
    if not len(fired):
        return None
    return _Finding(
        Rule.STAGNATION,
        onset,
        int(curve.steps[fired[0]]),
        f"loss stopped falling at {best[fired[0]]:.2f} nats",
    )


def _degradation(curve: _Curve, healthy: _Curve | None, limits: Thresholds) -> _Finding | None:
    """Compared as far as both runs go."""
    if healthy is None or not len(curve.steps):
        return None
    shared = curve.steps <= healthy.steps[-1]
    steps = curve.steps[shared]
    gap = curve.loss[shared] - np.interp(steps, healthy.steps, healthy.loss)
    raw_gap = curve.raw[shared] - np.interp(steps, healthy.steps, healthy.raw)
    still = _stands_still(curve, limits, limits.recovery)
    still_falls = ~still & (curve.loss <= curve.best + limits.recovery)
    behind = (gap > limits.lag) & still_falls[shared]
    steps_behind = _since(gap < limits.lag / 2, curve.interval[shared] * behind)
    fired = np.flatnonzero(steps_behind >= limits.plateau)
    if not len(fired):
        return None
    at = fired[0]
    return _Finding(
        Rule.DEGRADATION,
        rise_start(steps[: at + 1], raw_gap[: at + 1]),
        int(steps[at]),
        f"loss still falls, but lies {gap[at]:.2f} nats above the reference run's",
    )


def _healthy_part(reference: Trace, thresholds: Thresholds) -> _Curve | None:
    """The reference up to its own onset; None if it never trained."""
    outcome = judge(reference, thresholds=thresholds)
    if outcome is None or outcome.kind in (VerdictKind.FAILED, VerdictKind.NEVER_LEARNED):
        return None
    end = reference.steps if outcome.onset_step is None else outcome.onset_step
    curve = _curve(reference, end)
    return curve if len(curve.steps) else None
