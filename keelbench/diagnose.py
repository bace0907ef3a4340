"""Which sub-layer moved first when a run broke.

A ramp is repeated up to its onset (same seed, same data, same LRs) with a watch on every
site: the ratio of branch to trunk RMS, at every probe. A site has moved once its ratio leaves
what it did in the probes before, and stays away.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keelbench.engine import Engine
from keelbench.observe import Observed, Passage
from keelbench.ramp import ramp_lrs
from keelbench.records import Record, VerdictKind
from keelbench.search import threads

FloatArray = NDArray[np.float64]

WINDOW = 8
"""Probes before a probe that say what a site used to do."""

BEFORE, AFTER = 16, 8
"""Probes before and after the onset in which a first move is looked for."""

PROBES = 32
"""Probes that an early onset should have before it: a weak architecture breaks within the
first 50 steps, so it is probed more often than the ramp did."""

LASTING = 0.75
"""Share of the probes from the move to the end of the watch at which the site is away."""

MOVED_SIGMAS = 6.0
"""A move is larger than this many robust standard deviations of the window ..."""

LEAST_MOVE = math.log(1.25)
"""... and than a quarter, so that a site at rest does not count for its calm."""

SIGMAS_PER_MAD = 1.4826
"""Standard deviation of a normal variable over its median absolute deviation."""

MOST_MOVES = 5
"""Moves that are kept with a record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """The first lasting move of one site."""

    site: int
    branch: str
    step: int
    factor: float
    """Branch-to-trunk ratio at that step over its median in the window before."""


def diagnosed(record: Record) -> Record:
    """The record with the sites that moved first under ``diagnosis["first_to_move"]``.

    A record of another protocol than the ramp, one that did not diverge, and one of a user's
    own module, whose sites are unknown, come back as they are.
    """
    onset = record.verdict.onset_step
    if record.verdict.kind is not VerdictKind.DIVERGED or onset is None:
        return record
    if record.cell.ramp.protocol != "ramp" or record.cell.model.module is not None:
        return record
    steps, ratios = watch(record, onset)
    moves = first_moves(steps, ratios, onset)
    found: dict[str, Any] = {
        "site": moves[0].site if moves else None,
        "branch": moves[0].branch if moves else None,
        "step": moves[0].step if moves else None,
        "sites_moved": len(moves),
        "moves": [dataclasses.asdict(move) for move in moves[:MOST_MOVES]],
        "probe_steps": steps.tolist(),
        "ratios": {
            str(move.site): [_rounded(value) for value in ratios[:, move.site].tolist()]
            for move in moves[:MOST_MOVES]
        },
    }
    diagnosis = {**(record.diagnosis or {}), "first_to_move": found}
    return dataclasses.replace(record, diagnosis=diagnosis)


def watch(record: Record, onset: int) -> tuple[NDArray[np.int64], FloatArray]:
    """Repeat a lane up to shortly after its onset.

    Returns:
        Steps of the probes (probes,) and branch-to-trunk ratios (probes, sites).
    """
    every = max(1, min(record.cell.data.probe_every, onset // PROBES))
    cell = record.cell.replaced({"data.probe_every": every})
    stop = min(onset + AFTER * every + 1, cell.ramp.steps)
    with threads(cell.threads):
        engine = Engine(cell, [record.seed], stop)
        watcher = Observed(engine.model.rule, is_probe_only=True)
        engine.model.rule = watcher
        engine.advance(ramp_lrs(cell, 0, stop)[:, None])
    steps, _ = engine.probes()
    ratios = _ratios(watcher.passages).reshape(len(steps), cell.model.depth)
    return steps, ratios


def _ratios(passages: Sequence[Passage]) -> FloatArray:
    branch = torch.stack([passage.branch_square_SN.mean() for passage in passages])
    trunk = torch.stack([passage.trunk_square_SN.mean() for passage in passages])
    ratios: FloatArray = (branch / trunk).sqrt().double().cpu().numpy()
    return ratios


def first_moves(steps: NDArray[np.int64], ratios: FloatArray, onset: int) -> list[Move]:
    """The first lasting move of each site around the onset; the earliest and largest first.

    At probe p a site is away if |ln r_p - m| > max(6 s, ln 1.25), with m the median and s the
    robust standard deviation of ln r over the 8 probes before. It has moved at the first p
    at which it is away and, measured from the same window, stays away at the next probe and
    at three quarters of all that follow. Non-finite ratios count as away.
    """
    at_onset = int(np.searchsorted(steps, onset))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(ratios)
    moves: dict[int, Move] = {}
    for probe in range(max(WINDOW, at_onset - BEFORE), len(steps) - 1):
        window = logs[probe - WINDOW : probe]
        center = np.median(window, axis=0)
        spread = SIGMAS_PER_MAD * np.median(np.abs(window - center), axis=0)
        limit = np.maximum(MOVED_SIGMAS * spread, LEAST_MOVE)
        is_away = ~(np.abs(logs[probe:] - center) <= limit)
        has_moved = is_away[:2].all(axis=0) & (is_away.mean(axis=0) >= LASTING)
        for site in np.flatnonzero(has_moved).tolist():
            if site not in moves:
                factor = float(np.exp(logs[probe, site] - center[site]))
                moves[site] = Move(
                    site=site,
                    branch="ffn" if site % 2 else "attention",
                    step=int(steps[probe]),
                    factor=factor if math.isfinite(factor) else 0.0,
                )
    return sorted(moves.values(), key=lambda move: (move.step, -_size(move)))


def _size(move: Move) -> float:
    return abs(math.log(move.factor)) if move.factor > 0 else math.inf


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
