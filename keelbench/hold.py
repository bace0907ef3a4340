"""The hold protocol: the largest learning rate that is sustained, not only passed through.

A trial warms up at the slope to an LR x and stays there for H steps. It passes if no rule of
the detector fires and the probe ends no worse than it was when the hold began. The LRs of a
geometric grid run as lanes of one batch; the gap between the largest passing and the
smallest failing one is then filled until it is narrower than the stated resolution.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from keelbench.divergence import judge
from keelbench.engine import Engine
from keelbench.foreign import open_engine
from keelbench.ramp import CHUNK, Progress, describe_environment, make_record, run_ramp
from keelbench.records import Record, Rule, Trace, Verdict, VerdictKind
from keelbench.specs import CellSpec

GRID_RATIO = 1.25
"""Between neighbouring LRs of the first grid."""

GRID_LANES = 6
"""LRs of the first grid: from 1.25 times the ramp's Max LR down to 0.41 times it."""

MOST_ROUNDS = 8
"""Grids at most: a bound on a search that normally takes two."""

HOLD_WORSE = 0.02
"""Nats by which the probe may end above its level at the start of the hold: about twice the
probe's own noise once averaged over ``HOLD_PROBES``."""

HOLD_PROBES = 8
"""Probes averaged (median) at the start and at the end of the hold."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One LR, held."""

    lr: float
    has_passed: bool
    rule: str | None
    """The detector's rule, or degradation if the probe ended worse; None if passed."""
    probe_change: float | None
    """Nats between the start and the end of the hold; None if a rule fired before."""


def run_hold(
    cell: CellSpec,
    seeds: Sequence[int],
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[Record]:
    """Search every seed's largest sustained LR; yields a record as each search ends.

    A record's ``max_lr`` is the largest LR of which it and every lower trial passed; its
    trace and verdict are those of the smallest failing trial, ``diagnosis`` lists all trials.
    """
    for seed in seeds:
        yield _search(cell, seed, on_progress)


def _search(cell: CellSpec, seed: int, on_progress: Callable[[Progress], None]) -> Record:
    started = time.perf_counter()
    (ramp,) = run_ramp(cell, [seed], on_progress=on_progress)
    top = ramp.max_lr or ramp.lower_bound
    if top is None:
        return ramp
    lrs = [min(top * GRID_RATIO ** (1 - k), cell.ramp.peak or top) for k in range(GRID_LANES)]
    trials: dict[float, tuple[Trial, Trace, Verdict]] = {}
    for _ in range(MOST_ROUNDS):
        trials |= _hold_all(cell, seed, sorted(set(lrs)), on_progress)
        lrs = next_lrs([trial for trial, _, _ in trials.values()], cell)
        if not lrs:
            break
    seconds = time.perf_counter() - started
    return _record(cell, seed, trials, ramp, seconds)


def hold_trials(cell: CellSpec, seed: int, lrs: Sequence[float]) -> list[Trial]:
    """Hold one seed at each of these LRs, as lanes of one batch."""
    outcomes = _hold_all(cell, seed, lrs, lambda _: None)
    return [outcomes[lr][0] for lr in lrs]


def next_lrs(trials: Sequence[Trial], cell: CellSpec) -> list[float]:
    """LRs to try next; empty once the answer is known to the resolution.

    Below the smallest failure if everything failed, above the largest pass if everything
    passed (up to the peak), and in between otherwise.
    """
    low, high = bracket(trials)
    peak = cell.ramp.peak or math.inf
    if high is None:
        assert low is not None
        above = [low * GRID_RATIO**k for k in range(1, GRID_LANES + 1)]
        return sorted({min(lr, peak) for lr in above if min(lr, peak) > low})
    if low is None:
        assert cell.ramp.slope is not None
        below = [high / GRID_RATIO**k for k in range(1, GRID_LANES + 1)]
        return [lr for lr in below if lr >= cell.ramp.slope]
    gaps = math.ceil(math.log(high / low) / math.log1p(cell.ramp.hold_resolution) - 1e-9)
    return [low * (high / low) ** (k / gaps) for k in range(1, gaps)]


def bracket(trials: Sequence[Trial]) -> tuple[float | None, float | None]:
    """(largest LR below every failure that passed, smallest LR that failed)."""
    high = min((trial.lr for trial in trials if not trial.has_passed), default=None)
    passed = [t.lr for t in trials if t.has_passed and (high is None or t.lr < high)]
    return max(passed, default=None), high


def hold_lrs(
    cell: CellSpec, lrs: Sequence[float], start: int, stop: int
) -> NDArray[np.float64]:
    """Learning rates (steps, lanes): the ramp, cut off at each lane's own LR."""
    assert cell.ramp.slope is not None
    ramp = cell.ramp.slope * np.arange(start + 1, stop + 1)
    capped: NDArray[np.float64] = np.minimum(ramp[:, None], np.asarray(lrs)[None, :])
    return capped


def hold_steps(cell: CellSpec, lr: float) -> tuple[int, int]:
    """(first step of the hold, number of steps in all) for a lane held at this LR."""
    assert cell.ramp.slope is not None
    warmup = max(1, math.ceil(lr / cell.ramp.slope - 1e-9))
    return warmup - 1, warmup - 1 + cell.ramp.hold_steps


def _hold_all(
    cell: CellSpec,
    seed: int,
    lrs: Sequence[float],
    on_progress: Callable[[Progress], None],
) -> dict[float, tuple[Trial, Trace, Verdict]]:
    """Hold every LR as a lane of one batch; a lane ends when its outcome is certain."""
    started = time.perf_counter()
    engine = open_engine(cell, [seed] * len(lrs), max(hold_steps(cell, lr)[1] for lr in lrs))
    running, outcomes = list(lrs), {}
    while running:
        stop = min(engine.steps + CHUNK, min(hold_steps(cell, lr)[1] for lr in running))
        engine.advance(hold_lrs(cell, running, engine.steps, stop))
        for lr, trace in zip(running, _traces(engine, cell, running), strict=True):
            outcome = _outcome(cell, lr, trace)
            if outcome is not None:
                outcomes[lr] = (outcome[0], trace, outcome[1])
        on_progress(
            Progress(
                step=engine.steps,
                lr=running[-1],
                loss=float(engine.losses()[-1].mean()),
                running=len(running),
                lanes=len(lrs),
                seconds=time.perf_counter() - started,
            )
        )
        kept = [lane for lane, lr in enumerate(running) if lr not in outcomes]
        running = [running[lane] for lane in kept]
        if running and len(kept) < engine.lanes:
            engine.keep(kept)
    return outcomes


def _traces(engine: Engine, cell: CellSpec, lrs: Sequence[float]) -> list[Trace]:
    losses, norms = engine.losses(), engine.grad_norms()
    probe_steps, probes = engine.probes()
    applied = hold_lrs(cell, lrs, 0, engine.steps)
    return [
        Trace(
            lr=applied[:, lane],
            loss=losses[:, lane],
            grad_norm=norms[:, lane],
            probe_step=probe_steps,
            probe=probes[:, lane],
            unigram_entropy=engine.unigram_entropy,
        )
        for lane in range(len(lrs))
    ]


def _outcome(cell: CellSpec, lr: float, trace: Trace) -> tuple[Trial, Verdict] | None:
    """The trial and verdict of a lane, or None while it is still open."""
    begin, end = hold_steps(cell, lr)
    has_ended = trace.steps >= end
    verdict = judge(trace, ended=has_ended)
    if verdict is None:
        return None
    if verdict.kind is not VerdictKind.SURVIVED:
        rule = str(verdict.rule or verdict.kind)
        return Trial(lr=lr, has_passed=False, rule=rule, probe_change=None), verdict
    change = probe_change(trace, begin)
    if change <= HOLD_WORSE:
        return Trial(lr=lr, has_passed=True, rule=None, probe_change=change), verdict
    worse = Verdict(
        kind=VerdictKind.DIVERGED,
        rule=Rule.DEGRADATION,
        onset_step=begin,
        detected_step=trace.steps - 1,
        reason=f"the probe ended {change:.2f} nats above its level at the start of the hold",
    )
    return Trial(lr=lr, has_passed=False, rule=str(worse.rule), probe_change=change), worse


def probe_change(trace: Trace, begin: int) -> float:
    """Nats by which the probe rose from the start of the hold to its end (medians)."""
    assert trace.probe is not None and trace.probe_step is not None
    first = int(np.searchsorted(trace.probe_step, begin))
    start = trace.probe[max(0, first - HOLD_PROBES // 2) : first + HOLD_PROBES // 2]
    return float(np.median(trace.probe[-HOLD_PROBES:]) - np.median(start))


def _record(
    cell: CellSpec,
    seed: int,
    trials: dict[float, tuple[Trial, Trace, Verdict]],
    ramp: Record,
    seconds: float,
) -> Record:
    outcomes = [trial for trial, _, _ in trials.values()]
    low, high = bracket(outcomes)
    _, trace, verdict = trials[high if high is not None else max(trials)]
    record = make_record(cell, seed, trace, verdict, seconds, describe_environment(cell))
    ordered = sorted(outcomes, key=lambda trial: trial.lr)
    diagnosis = {
        "ramp_max_lr": ramp.max_lr,
        "resolution": None if low is None or high is None else high / low - 1,
        "trials": [asdict(trial) for trial in ordered],
    }
    return replace(record, max_lr=low if high is not None else None, diagnosis=diagnosis)
