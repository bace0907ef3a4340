"""The hold protocol: the largest learning rate that is sustained, not only passed through.

A trial warms up at the slope to an LR x and stays there for H steps. It passes if no rule of
the detector fires and the probe ends no worse than it was when the hold began. The LRs of a
geometric grid run as lanes of one batch; the gap between the largest passing and the
smallest failing one is then halved until it is narrower than the stated resolution.

Whether one run survives close to the limit is a matter of chance, and a search that moves on
at the first success finds the luckiest LR. So an LR is sustained only if three runs of it
pass, each with initial weights and data order of its own, and none failed at a lower LR.
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

GRID_LANES = 4
"""LRs of the first grid: from 1.25 times the ramp's Max LR down to 0.64 times it."""

RUNS = 3
"""Runs of one LR that must all pass. At an LR that four of five runs sustain, half of all
searches go on upwards (0.8 cubed); at one that half of them sustain, one in eight does."""

RUN_SEEDS = 1000
"""Between the seeds of these runs: seed s is joined by s + 1000 and s + 2000."""

MOST_ROUNDS = 12
"""Batches at most: a bound on a search that normally takes four."""

HOLD_WORSE = 0.02
"""Nats by which the probe may end above its level at the start of the hold: about twice the
probe's own noise once averaged over ``HOLD_PROBES``."""

HOLD_PROBES = 8
"""Probes averaged (median) at the start and at the end of the hold."""


Lane = tuple[float, int]
"""(LR, run) of one lane."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run at one LR, held."""

    lr: float
    run: int
    """0 for the seed itself, up to ``RUNS`` - 1."""
    has_passed: bool
    rule: str | None
    """The detector's rule, or degradation if the probe ended worse; None if passed."""
    probe_change: float | None
    """Nats between the start and the end of the hold; None if a rule fired before."""


Outcomes = dict[Lane, tuple[Trial, Trace, Verdict]]


def run_hold(
    cell: CellSpec,
    seeds: Sequence[int],
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[Record]:
    """Search every seed's largest sustained LR; yields a record as each search ends.

    A record's ``max_lr`` is the largest LR of which ``RUNS`` runs passed and below which none
    failed; its trace and verdict are those of the smallest failing trial (if none failed, of
    the largest LR), ``diagnosis`` lists all trials.
    """
    for seed in seeds:
        yield _search(cell, seed, on_progress)


def _search(cell: CellSpec, seed: int, on_progress: Callable[[Progress], None]) -> Record:
    started = time.perf_counter()
    (ramp,) = run_ramp(cell, [seed], on_progress=on_progress)
    top = ramp.max_lr or ramp.lower_bound
    if top is None:
        return ramp
    grid = {min(top * GRID_RATIO ** (1 - k), cell.ramp.peak or top) for k in range(GRID_LANES)}
    lanes = [(lr, 0) for lr in sorted(grid)]
    outcomes: Outcomes = {}
    for _ in range(MOST_ROUNDS):
        outcomes |= _hold_all(cell, seed, lanes, on_progress, is_search=True)
        lanes = next_lanes([trial for trial, _, _ in outcomes.values()], cell)
        if not lanes:
            break
    seconds = time.perf_counter() - started
    return _record(cell, seed, outcomes, ramp, seconds)


def hold_trials(cell: CellSpec, seed: int, lrs: Sequence[float]) -> list[Trial]:
    """Hold one seed once at each of these LRs, as lanes of one batch."""
    outcomes = _hold_all(cell, seed, [(lr, 0) for lr in lrs], lambda _: None)
    return [outcomes[lr, 0][0] for lr in lrs]


def next_lanes(trials: Sequence[Trial], cell: CellSpec) -> list[Lane]:
    """What to run next, as (LR, run); empty once the answer is known to the resolution.

    One run of each LR of a grid below the smallest failure if everything failed, or above the
    largest pass if everything passed (up to the peak). In between, all runs of the LR that
    halves the gap, and those of the largest passing LR that are missing.
    """
    low, high = bracket(trials)
    peak = cell.ramp.peak or math.inf
    if low is None:
        assert high is not None and cell.ramp.slope is not None
        below = [high / GRID_RATIO**k for k in range(1, GRID_LANES + 1)]
        return [(lr, 0) for lr in reversed(below) if lr >= cell.ramp.slope]
    done = {(trial.lr, trial.run) for trial in trials}
    confirming = [(low, run) for run in range(RUNS) if (low, run) not in done]
    if high is None:
        above = [low * GRID_RATIO**k for k in range(1, GRID_LANES + 1)]
        rest = sorted({min(lr, peak) for lr in above if min(lr, peak) > low})
        return [(lr, 0) for lr in rest] or confirming
    gaps = math.ceil(math.log(high / low) / math.log1p(cell.ramp.hold_resolution) - 1e-9)
    between = low * (high / low) ** (gaps // 2 / gaps)
    return confirming + [(between, run) for run in range(RUNS) if gaps > 1]


def bracket(trials: Sequence[Trial]) -> tuple[float | None, float | None]:
    """(largest LR below every failure that passed, smallest LR of which a run failed)."""
    high = min((trial.lr for trial in trials if not trial.has_passed), default=None)
    passed = [t.lr for t in trials if t.has_passed and (high is None or t.lr < high)]
    return max(passed, default=None), high


def sustained(trials: Sequence[Trial]) -> float | None:
    """The largest LR of which all runs passed, and below which none failed."""
    low, _ = bracket(trials)
    passes = [trial.lr for trial in trials if trial.has_passed]
    whole = [lr for lr in passes if lr <= (low or 0) and passes.count(lr) >= RUNS]
    return max(whole, default=None)


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
    lanes: Sequence[Lane],
    on_progress: Callable[[Progress], None],
    *,
    is_search: bool = False,
) -> Outcomes:
    """Hold every lane in one batch; a lane ends when its outcome is certain.

    In a search it also ends, without an outcome, once a run at its LR or a lower one failed.
    """
    started = time.perf_counter()
    seeds = [seed + RUN_SEEDS * run for _, run in lanes]
    engine = open_engine(cell, seeds, max(hold_steps(cell, lr)[1] for lr, _ in lanes))
    running, outcomes = list(lanes), Outcomes()
    while running:
        lrs = [lr for lr, _ in running]
        stop = min(engine.steps + CHUNK, min(hold_steps(cell, lr)[1] for lr in lrs))
        engine.advance(hold_lrs(cell, lrs, engine.steps, stop))
        for lane, trace in zip(running, _traces(engine, cell, lrs), strict=True):
            outcome = _outcome(cell, lane, trace)
            if outcome is not None:
                outcomes[lane] = (outcome[0], trace, outcome[1])
        on_progress(
            Progress(
                step=engine.steps,
                lr=max(lrs),
                loss=float(engine.losses()[-1].mean()),
                running=len(running),
                lanes=len(lanes),
                seconds=time.perf_counter() - started,
            )
        )
        _, high = bracket([trial for trial, _, _ in outcomes.values()])
        bound = high if is_search and high is not None else math.inf
        kept = [k for k, lane in enumerate(running) if lane not in outcomes and lane[0] < bound]
        running = [running[k] for k in kept]
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


def _outcome(cell: CellSpec, lane: Lane, trace: Trace) -> tuple[Trial, Verdict] | None:
    """The trial and verdict of a lane, or None while it is still open."""
    lr, run = lane
    begin, end = hold_steps(cell, lr)
    has_ended = trace.steps >= end
    verdict = judge(trace, ended=has_ended)
    if verdict is None:
        return None
    if verdict.kind is not VerdictKind.SURVIVED:
        rule = str(verdict.rule or verdict.kind)
        return Trial(lr=lr, run=run, has_passed=False, rule=rule, probe_change=None), verdict
    change = probe_change(trace, begin)
    if change <= HOLD_WORSE:
        return Trial(lr=lr, run=run, has_passed=True, rule=None, probe_change=change), verdict
    worse = Verdict(
        kind=VerdictKind.DIVERGED,
        rule=Rule.DEGRADATION,
        onset_step=begin,
        detected_step=trace.steps - 1,
        reason=f"the probe ended {change:.2f} nats above its level at the start of the hold",
    )
    return Trial(
        lr=lr, run=run, has_passed=False, rule=str(worse.rule), probe_change=change
    ), worse


def probe_change(trace: Trace, begin: int) -> float:
    """Nats by which the probe rose from the start of the hold to its end (medians)."""
    assert trace.probe is not None and trace.probe_step is not None
    first = int(np.searchsorted(trace.probe_step, begin))
    start = trace.probe[max(0, first - HOLD_PROBES // 2) : first + HOLD_PROBES // 2]
    return float(np.median(trace.probe[-HOLD_PROBES:]) - np.median(start))


def _record(
    cell: CellSpec,
    seed: int,
    outcomes: Outcomes,
    ramp: Record,
    seconds: float,
) -> Record:
    trials = [trial for trial, _, _ in outcomes.values()]
    _, high = bracket(trials)
    found = sustained(trials)
    ordered = sorted(trials, key=lambda trial: (trial.lr, trial.run))
    failed = [trial for trial in ordered if not trial.has_passed]
    shown = failed[0] if failed else ordered[-1]
    _, trace, verdict = outcomes[shown.lr, shown.run]
    record = make_record(cell, seed, trace, verdict, seconds, describe_environment(cell))
    diagnosis = {
        "ramp_max_lr": ramp.max_lr,
        "resolution": None if found is None or high is None else high / found - 1,
        "trials": [asdict(trial) for trial in ordered],
    }
    return replace(record, max_lr=found if high is not None else None, diagnosis=diagnosis)
