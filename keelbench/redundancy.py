"""Which sub-layers could be removed: train, leave each out, look at the perplexity.

ΔPPL_i = PPL without layer i - PPL of the full model, on held-out text (arXiv 2601.19895,
appendix A). A removed sub-layer takes its norms with it: the trunk passes unchanged.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keelbench.engine import Engine
from keelbench.errors import KeelbenchError, RunFailedError
from keelbench.launch import Event, Task
from keelbench.lrsweep import Mean, mean_of, share_of
from keelbench.observe import Skipping
from keelbench.parallel import run_tasks
from keelbench.ramp import Progress
from keelbench.search import threads
from keelbench.specs import PAPER_WIDTH, CellSpec
from keelbench.training import EVAL_SEQUENCES, Schedule, held_out_losses, train

FloatArray = NDArray[np.float64]

Unit = Literal["sub-layer", "block"]

CHEAP = 0.01
"""Removal that raises the perplexity by less than this share counts as cheap."""

DEFAULT_NORMALIZED_LR = 5e-4
"""Peak LR x width / 1024 where none is given: near the best of Pre-LN (3.4e-4) and Keel
(6.3e-4) at depth 32, width 32 and 512 bytes a step (``keelbench lrsweep``, 3 seeds)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """One layer left out; means over the seeds."""

    index: int
    """Of the sub-layer or block, from 0."""
    branch: str
    """attention, ffn, or block."""
    ppl: float
    delta_ppl: float
    """PPL without it minus PPL of the full model."""
    delta_share: float
    """The same over the PPL of the full model."""
    seed_deltas: tuple[float, ...]
    """ΔPPL of each seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Redundancy:
    """One trained cell with each of its layers left out."""

    cell: CellSpec
    schedule: Schedule
    lr: float
    seeds: tuple[int, ...]
    unit: Unit
    loss: Mean
    """Held-out loss of the full model, nats per token."""
    ppl: float
    cheap: Mean
    """Share of layers whose removal costs less than 1 %, over the seeds."""
    removals: tuple[Removal, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def redundancies(
    cells: Sequence[CellSpec],
    seeds: Sequence[int] = (0,),
    *,
    lr: float | None = None,
    schedule: Schedule | None = None,
    unit: Unit = "sub-layer",
    sequences: int = EVAL_SEQUENCES,
    workers: int | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[Redundancy]:
    """Train every cell, then remove each of its sub-layers or blocks.

    Args:
        cells: what to train.
        seeds: lanes of each cell.
        lr: peak LR; by default 5e-4 x 1024 / width.
        schedule: steps, warm-up and floor.
        unit: what is removed at a time.
        sequences: held-out sequences behind every perplexity.
    """
    schedule = (schedule or Schedule()).validated()
    if lr is not None and not 0 < lr < math.inf:
        raise KeelbenchError(f"lr is {lr:g}: it must be positive and finite")
    tasks = [
        Task(
            cell=cell.validated(),
            seeds=tuple(seeds),
            target="keelbench.redundancy:train_and_remove",
            options={
                "lr": lr or DEFAULT_NORMALIZED_LR * PAPER_WIDTH / cell.model.width,
                "schedule": dataclasses.asdict(schedule),
                "unit": unit,
                "sequences": sequences,
            },
        )
        for cell in cells
    ]
    return run_tasks(tasks, workers, on_event=on_event)


def train_and_remove(
    cell: CellSpec,
    seeds: Sequence[int],
    *,
    lr: float,
    schedule: dict[str, Any],
    unit: Unit,
    sequences: int,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[Redundancy]:
    """Train one cell and remove its layers one by one: what a worker runs."""
    shape = Schedule(**schedule)
    with threads(cell.threads):
        engine = Engine(cell, seeds, shape.steps)
        lrs_TS = np.repeat(shape.lrs(lr)[:, None], len(seeds), axis=1)
        trained = train(engine, lrs_TS, on_progress)
        if len(trained.alive) < len(seeds):
            raise RunFailedError(
                f"training at LR {lr:g} became non-finite", "give a smaller --lr"
            )
        full = held_out_losses(engine, sequences)
        without = removal_losses(engine, unit, sequences)
    yield _result(cell, shape, lr, seeds, unit, full, without)


def removal_losses(engine: Engine, unit: Unit, sequences: int = EVAL_SEQUENCES) -> FloatArray:
    """Held-out loss of each lane without each layer, (layers, lanes)."""
    plain = engine.model.rule
    losses = []
    try:
        for removed in removed_sites(engine.cell.model.depth, unit):
            engine.model.rule = Skipping(plain, removed)
            losses.append(held_out_losses(engine, sequences))
    finally:
        engine.model.rule = plain
    return np.stack(losses)


def removed_sites(depth: int, unit: Unit) -> list[frozenset[int]]:
    """The sites that go together, layer by layer."""
    size = 2 if unit == "block" else 1
    return [frozenset(range(start, start + size)) for start in range(0, depth, size)]


def _result(
    cell: CellSpec,
    schedule: Schedule,
    lr: float,
    seeds: Sequence[int],
    unit: Unit,
    full: FloatArray,
    without: FloatArray,
) -> Redundancy:
    full_ppl = np.exp(full)
    with np.errstate(over="ignore"):
        deltas = np.exp(without) - full_ppl
    shares = deltas / full_ppl
    return Redundancy(
        cell=cell,
        schedule=schedule,
        lr=lr,
        seeds=tuple(seeds),
        unit=unit,
        loss=mean_of(full.tolist()),
        ppl=float(full_ppl.mean()),
        cheap=share_of((shares < CHEAP).mean(axis=0).tolist()),
        removals=tuple(
            Removal(
                index=index,
                branch=_branch(index, unit),
                ppl=float((full_ppl + deltas[index]).mean()),
                delta_ppl=float(deltas[index].mean()),
                delta_share=float(shares[index].mean()),
                seed_deltas=tuple(deltas[index].tolist()),
            )
            for index in range(len(deltas))
        ),
    )


def _branch(index: int, unit: Unit) -> str:
    if unit == "block":
        return "block"
    return "ffn" if index % 2 else "attention"


def summary_rows(found: Sequence[Redundancy]) -> list[dict[str, Any]]:
    """One row per cell: the table."""
    return [
        {
            "arch": result.cell.model.arch,
            "depth": result.cell.model.depth,
            "width": result.cell.model.width,
            "steps": result.schedule.steps,
            "lr": result.lr,
            "loss": result.loss.mean,
            "ppl": result.ppl,
            "cheap_share": result.cheap.mean,
            "cheap_share_low": result.cheap.low,
            "cheap_share_high": result.cheap.high,
            "cheapest": cheapest(result).index,
            "cheapest_delta": cheapest(result).delta_ppl,
            "dearest": dearest(result).index,
            "dearest_delta": dearest(result).delta_ppl,
            "unit": result.unit,
        }
        for result in found
    ]


def cheapest(result: Redundancy) -> Removal:
    return min(result.removals, key=lambda removal: removal.delta_ppl)


def dearest(result: Redundancy) -> Removal:
    return max(result.removals, key=lambda removal: _number(removal.delta_ppl))


def _number(value: float) -> float:
    return math.inf if math.isnan(value) else value


def layer_rows(found: Sequence[Redundancy]) -> list[dict[str, Any]]:
    """One row per cell and layer: what the figure draws."""
    return [
        {
            "arch": result.cell.model.arch,
            "depth": result.cell.model.depth,
            "width": result.cell.model.width,
            "unit": result.unit,
            **dataclasses.asdict(removal),
        }
        for result in found
        for removal in result.removals
    ]
