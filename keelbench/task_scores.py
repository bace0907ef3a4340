"""Train on tasks with known answers and score them: accuracy beside loss.

The peak LR of a lane is chosen by held-out loss alone, as one would without the answers, so
that a case shows where the lower loss goes with the lower accuracy.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from keelbench.capacity import MAX_LANES
from keelbench.engine import Engine
from keelbench.errors import KeelbenchError
from keelbench.launch import Event, Task
from keelbench.lrsweep import Mean, mean_of, share_of
from keelbench.parallel import run_tasks
from keelbench.ramp import Progress
from keelbench.search import threads
from keelbench.specs import PAPER_WIDTH, CellSpec
from keelbench.tasks import TaskSource
from keelbench.training import EVAL_BATCH, Schedule, lane_groups, train

FloatArray = NDArray[np.float64]

NORMALIZED_LRS = (2e-4, 6e-4, 2e-3)
"""Peak LRs x width / 1024 that each lane may choose from."""

SEQUENCES = 128
"""Held-out sequences behind every score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneScore:
    """One seed at one LR after training."""

    seed: int
    lr: float
    loss: float
    """Held-out, nats per token, all tokens: free ones cannot be predicted."""
    answer_loss: float
    """The same over answers alone: 0 for a model that has solved the task."""
    accuracy: float
    """Share of answers that the most likely token gets right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """One cell on one task; each seed at the LR with its lowest held-out loss."""

    cell: CellSpec
    schedule: Schedule
    task: str
    chance: float
    """Accuracy of guessing among the tokens that can be answers."""
    lanes: tuple[LaneScore, ...]
    """Every seed and LR that stayed finite."""

    @property
    def chosen(self) -> tuple[LaneScore, ...]:
        """Each seed's lane of lowest loss."""
        seeds = dict.fromkeys(lane.seed for lane in self.lanes)
        return tuple(
            min((lane for lane in self.lanes if lane.seed == seed), key=lambda lane: lane.loss)
            for seed in seeds
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def mean(self, name: str) -> Mean:
        """Mean over the seeds of ``loss``, ``answer_loss`` or ``accuracy``."""
        values = [getattr(lane, name) for lane in self.chosen]
        return share_of(values) if name == "accuracy" else mean_of(values)


def task_scores(
    cells: Sequence[CellSpec],
    seeds: Sequence[int] = (0, 1, 2),
    *,
    lrs: Sequence[float] | None = None,
    schedule: Schedule | None = None,
    workers: int | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[TaskScore]:
    """Train and score cells whose data source is a task.

    Args:
        cells: with ``data.source`` such as ``task:induction``.
        seeds: weights and data order.
        lrs: peak LRs to choose from; by default three, scaled as 1 / width.
        schedule: steps, warm-up and floor.
    """
    schedule = (schedule or Schedule()).validated()
    cells = [cell.validated() for cell in cells]
    tasks, homes = [], []
    for position, cell in enumerate(cells):
        found = _tasks(cell, seeds, lrs, schedule)
        tasks += found
        homes += [position] * len(found)
    results = run_tasks(tasks, workers, on_event=on_event)
    return [
        _gathered(cell, schedule, [r for h, r in zip(homes, results, strict=True) if h == k])
        for k, cell in enumerate(cells)
    ]


def _tasks(
    cell: CellSpec, seeds: Sequence[int], lrs: Sequence[float] | None, schedule: Schedule
) -> list[Task]:
    """A lane for every seed and LR, in groups."""
    if not cell.data.source.startswith("task:"):
        raise KeelbenchError(
            f"data.source is '{cell.data.source}': scores need a task with known answers",
            "for example task:induction",
        )
    grid = lrs or [lr * PAPER_WIDTH / cell.model.width for lr in NORMALIZED_LRS]
    lanes = [(seed, lr) for seed in seeds for lr in grid]
    groups = [[lanes[k] for k in g] for g in lane_groups(len(lanes), MAX_LANES[cell.device])]
    return [
        Task(
            cell=cell,
            seeds=tuple(seed for seed, _ in group),
            target="keelbench.task_scores:train_and_score",
            options={"lrs": [lr for _, lr in group], "schedule": dataclasses.asdict(schedule)},
        )
        for group in groups
    ]


@dataclass(frozen=True)
class _Scored:
    chance: float
    lanes: list[LaneScore]


def _gathered(cell: CellSpec, schedule: Schedule, parts: Sequence[_Scored]) -> TaskScore:
    return TaskScore(
        cell=cell,
        schedule=schedule,
        task=cell.data.source.partition(":")[2],
        chance=parts[0].chance,
        lanes=tuple(lane for part in parts for lane in part.lanes),
    )


def train_and_score(
    cell: CellSpec,
    seeds: Sequence[int],
    *,
    lrs: Sequence[float],
    schedule: dict[str, Any],
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[_Scored]:
    """Train one lane per (seed, LR) on a task and score it: what a worker runs."""
    shape = Schedule(**schedule)
    with threads(cell.threads):
        engine = Engine(cell, seeds, shape.steps)
        lrs_TS = np.stack([shape.lrs(lr) for lr in lrs], axis=1)
        alive = train(engine, lrs_TS, on_progress).alive
        loss, answer_loss, accuracy = score(engine) if alive else (np.empty(0),) * 3
    assert isinstance(engine.source, TaskSource)
    lanes = [
        LaneScore(
            seed=seeds[lane],
            lr=lrs[lane],
            loss=float(loss[k]),
            answer_loss=float(answer_loss[k]),
            accuracy=float(accuracy[k]),
        )
        for k, lane in enumerate(alive)
        if math.isfinite(loss[k])
    ]
    yield _Scored(1 / engine.source.task.choices, lanes)


def score(
    engine: Engine, sequences: int = SEQUENCES
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Held-out loss, loss of the answers, and accuracy, each (lanes,)."""
    source = engine.source
    assert isinstance(source, TaskSource)
    tokens, known = source.held_out(sequences, engine.cell.data.seq)
    losses, hits = [], []
    for start in range(0, sequences, EVAL_BATCH):
        windows = torch.from_numpy(tokens[start : start + EVAL_BATCH]).to(engine.model.device)
        windows_SBT = windows.expand(engine.lanes, *windows.shape)
        with torch.no_grad():
            logits_SNV = engine.model.logits(windows_SBT[:, :, :-1]).float()
        targets_SN = windows_SBT[:, :, 1:].flatten(1)
        loss = F.cross_entropy(logits_SNV.transpose(1, 2), targets_SN, reduction="none")
        losses.append(loss.double().cpu().numpy())
        hits.append((logits_SNV.argmax(dim=-1) == targets_SN).cpu().numpy())
    loss_SN, hit_SN = np.concatenate(losses, axis=1), np.concatenate(hits, axis=1)
    is_answer = known[:, 1:].flatten()
    return (
        loss_SN.mean(axis=1),
        loss_SN[:, is_answer].mean(axis=1),
        hit_SN[:, is_answer].mean(axis=1),
    )


def summary_rows(scores: Sequence[TaskScore]) -> list[dict[str, Any]]:
    """One row per cell and task: loss, answer loss and accuracy, each with its interval."""
    rows = []
    for found in scores:
        row: dict[str, Any] = {
            "task": found.task,
            "arch": found.cell.model.arch,
            "depth": found.cell.model.depth,
            "width": found.cell.model.width,
            "steps": found.schedule.steps,
            "seeds": len(found.chosen),
            "chance": found.chance,
        }
        for name in ("loss", "answer_loss", "accuracy"):
            value = (
                found.mean(name) if found.lanes else Mean(mean=None, low=None, high=None, n=0)
            )
            row |= {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
        rows.append(row)
    return rows


def disagreements(
    rows: Sequence[dict[str, Any]],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of rows of one task where the first has the lower loss and the lower accuracy.

    Only pairs whose intervals (of 3 and more seeds) are apart in both, so that chance alone
    does not make a case.
    """
    return [
        (one, two)
        for one in rows
        for two in rows
        if one["task"] == two["task"]
        and _is_below(one, two, "loss")
        and _is_below(one, two, "accuracy")
    ]


def _is_below(one: dict[str, Any], two: dict[str, Any], name: str) -> bool:
    high, low = one[f"{name}_high"], two[f"{name}_low"]
    return high is not None and low is not None and bool(high < low)
