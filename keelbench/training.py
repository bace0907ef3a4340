"""Training at a peak learning rate: warm-up, cosine, held-out loss. The steps are the engine's.

The ramp asks at which LR a run breaks; studies train to an end instead and ask how good the
model has become.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from keelbench.engine import Engine
from keelbench.errors import KeelbenchError
from keelbench.ramp import CHUNK, Progress

FloatArray = NDArray[np.float64]

EVAL_SEQUENCES = 64
"""Held-out sequences behind every final loss: 4,096 bytes at the default length, which puts
the noise of the text itself at about 0.02 nats, the same for every model."""

EVAL_BATCH = 16
"""Sequences at once while evaluating."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up to a peak LR, then cosine to a share of it."""

    steps: int = 300
    warmup: float = 0.1
    """Share of the steps."""
    floor: float = 0.0
    """LR at the end over the peak LR."""

    def validated(self) -> "Schedule":
        """Itself, or an error that says what is wrong."""
        if self.steps < 1:
            raise KeelbenchError(f"steps is {self.steps}: it must be at least 1")
        for name in ("warmup", "floor"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise KeelbenchError(f"{name} is {value}: it must lie in [0, 1]")
        return self

    def lrs(self, peak: float) -> FloatArray:
        """LR of every step, (steps,).

        Step t (from 0) of w warm-up steps has peak (t + 1) / w; after that
        floor + (1 - floor) (1 + cos(π x)) / 2 of the peak, with x running from 0 to 1.
        """
        warm = min(self.steps, round(self.warmup * self.steps))
        rising = (np.arange(warm) + 1) / max(1, warm)
        x = (np.arange(self.steps - warm) + 1) / max(1, self.steps - warm)
        falling = self.floor + (1 - self.floor) * (1 + np.cos(math.pi * x)) / 2
        shape: FloatArray = peak * np.concatenate([rising, falling])
        return shape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trained:
    """The lanes of an engine after their last step."""

    alive: list[int]
    """Lanes, by their first position, whose loss stayed finite; the engine holds these."""
    curves: FloatArray
    """Train loss (steps, lanes) of all lanes; NaN once a lane was dropped."""


def train(
    engine: Engine,
    lrs_TS: FloatArray,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Trained:
    """Train every lane to the end; a lane whose loss is no longer finite is dropped.

    Args:
        engine: before its first step.
        lrs_TS: LR of each step and lane.
    """
    started = time.perf_counter()
    steps, lanes = lrs_TS.shape
    alive = list(range(lanes))
    curves = np.full((steps, lanes), np.nan)
    for start in range(0, steps, CHUNK):
        stop = min(start + CHUNK, steps)
        engine.advance(lrs_TS[start:stop, alive])
        losses = engine.losses()[start:stop]
        curves[start:stop, alive] = losses
        is_finite = np.isfinite(losses).all(axis=0)
        shown = losses[-1][is_finite]
        on_progress(
            Progress(
                step=stop,
                lr=float(lrs_TS[stop - 1].max()),
                loss=float(shown.mean()) if len(shown) else math.nan,
                running=int(is_finite.sum()),
                lanes=lanes,
                seconds=time.perf_counter() - started,
            )
        )
        if not is_finite.all():
            kept = np.flatnonzero(is_finite).tolist()
            alive = [alive[lane] for lane in kept]
            if not alive:
                break
            engine.keep(kept)
    return Trained(alive=alive, curves=curves)


def held_out_losses(engine: Engine, sequences: int = EVAL_SEQUENCES) -> FloatArray:
    """Mean loss (nats per token) of each lane on fixed held-out sequences, (lanes,)."""
    windows = engine.source.probe(sequences, engine.cell.data.seq)
    total = np.zeros(engine.lanes)
    for start in range(0, sequences, EVAL_BATCH):
        part = torch.from_numpy(windows[start : start + EVAL_BATCH]).to(engine.model.device)
        with torch.no_grad():
            losses = engine.model.losses(part.expand(engine.lanes, *part.shape))
        total += len(part) * losses.double().cpu().numpy()
    mean: FloatArray = total / sequences
    return mean


def lr_grid(low: float, high: float, points: int) -> list[float]:
    """A geometric grid, both ends included."""
    if points < 1 or not 0 < low <= high < math.inf:
        raise KeelbenchError(
            f"an LR grid from {low:g} to {high:g} with {points} points: give 0 < low <= high "
            "and at least 1 point"
        )
    return [float(f"{lr:.6g}") for lr in np.geomspace(low, high, points)]


def lane_groups(lanes: int, most: int) -> list[Sequence[int]]:
    """Lanes 0 to n - 1 in even groups of at most ``most``."""
    groups = -(-lanes // most)
    return [part.tolist() for part in np.array_split(np.arange(lanes), groups)]
