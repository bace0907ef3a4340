"""At which peak learning rate does an architecture train best, and how much does it matter?

Every LR of a geometric grid is a lane: linear warm-up, cosine to 0, held-out loss at the end.
LR sensitivity is the mean over the grid of min(loss, loss at init), minus the best loss
(Wortsman et al. 2023, arXiv 2309.14322): what a wrong LR costs on average.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keelbench.capacity import MAX_LANES
from keelbench.engine import Engine
from keelbench.launch import Event, Task
from keelbench.parallel import run_tasks
from keelbench.parsing import content_hash
from keelbench.ramp import Progress
from keelbench.records import Record
from keelbench.search import threads
from keelbench.specs import PAPER_WIDTH, CellSpec, RampSpec
from keelbench.stats import (
    CONFIDENCE,
    MIN_VALUES,
    Estimate,
    estimate,
    estimate_records,
    half_width,
)
from keelbench.training import Schedule, held_out_losses, lane_groups, lr_grid, train

NORMALIZED_GRID = (1e-4, 1e-2, 6)
"""Lowest and highest LR x width / 1024, and points: a factor of 2.5 from one to the next. The
paper's own LRs, 1.5e-3 to 9e-3 (table 2, sections 5.3 and 5.5), lie in its upper half."""

CURVE_POINTS = 100
"""Points of a training curve that are kept: means over equal stretches of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LrRun:
    """One lane: a seed at a peak LR."""

    seed: int
    lr: float
    loss: float | None
    """Held-out loss at the end, nats per token; None if the run became non-finite."""
    init_loss: float
    """Held-out loss before the first step."""
    curve: tuple[float | None, ...]
    """Train loss, averaged over equal stretches of steps."""

    @property
    def capped(self) -> float:
        """min(loss, loss at init): what enters the sensitivity."""
        return self.init_loss if self.loss is None else min(self.loss, self.init_loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean over seeds with Student's interval; no interval below 3 seeds."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LrSweep:
    """All LRs and seeds of one cell."""

    cell: CellSpec
    schedule: Schedule
    lrs: tuple[float, ...]
    runs: tuple[LrRun, ...]

    def at(self, lr: float) -> list[LrRun]:
        return [run for run in self.runs if run.lr == lr]

    def losses(self, lr: float) -> Mean:
        """Held-out loss at one LR; no mean if any seed became non-finite."""
        values = [run.loss for run in self.at(lr)]
        if any(value is None for value in values):
            return Mean(mean=None, low=None, high=None, n=len(values))
        return mean_of([value for value in values if value is not None])

    def by_seed(self) -> dict[int, list[LrRun]]:
        seeds: dict[int, list[LrRun]] = {}
        for run in sorted(self.runs, key=lambda run: run.lr):
            seeds.setdefault(run.seed, []).append(run)
        return seeds

    @property
    def best_lr(self) -> Estimate:
        """The LR with the lowest loss, per seed; known to half a step of the grid each way."""
        best = [min(runs, key=lambda run: run.capped).lr for runs in self.by_seed().values()]
        step = (self.lrs[-1] / self.lrs[0]) ** (1 / max(1, len(self.lrs) - 1))
        return estimate(best, quantum=math.sqrt(step) - 1)

    @property
    def best_loss(self) -> Mean:
        return mean_of([min(run.capped for run in runs) for runs in self.by_seed().values()])

    @property
    def sensitivity(self) -> Mean:
        """Mean over the grid of min(loss, loss at init), minus the best loss."""
        return mean_of([sensitivity(runs) for runs in self.by_seed().values()])

    def to_dict(self) -> dict[str, Any]:
        return {
            "cell": self.cell.to_dict(),
            "schedule": dataclasses.asdict(self.schedule),
            "lrs": list(self.lrs),
            **summary_rows([self])[0],
            "runs": [dataclasses.asdict(run) for run in self.runs],
        }


def sensitivity(runs: Sequence[LrRun]) -> float:
    """LR sensitivity of one seed over its grid (Wortsman et al. 2023, section 2.2)."""
    capped = [run.capped for run in runs]
    return float(np.mean(capped)) - min(capped)


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and 95 % Student interval of values on a linear scale, such as losses."""
    mean = float(np.mean(values))
    if len(values) < MIN_VALUES:
        return Mean(mean=mean, low=None, high=None, n=len(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(half_width(error, len(values) - 1, CONFIDENCE))
    return Mean(mean=mean, low=mean - half, high=mean + half, n=len(values))


def share_of(values: Sequence[float]) -> Mean:
    """The same of values in [0, 1], such as accuracies: no interval leaves that range."""
    found = mean_of(values)
    if found.low is None or found.high is None:
        return found
    return dataclasses.replace(found, low=max(0.0, found.low), high=min(1.0, found.high))


def default_lrs(width: int) -> list[float]:
    """The default grid at a width: the same normalized LRs everywhere."""
    low, high, points = NORMALIZED_GRID
    scale = PAPER_WIDTH / width
    return lr_grid(low * scale, high * scale, points)


def lr_sweeps(
    cells: Sequence[CellSpec],
    seeds: Sequence[int] = (0, 1, 2),
    *,
    lrs: Sequence[float] | None = None,
    schedule: Schedule | None = None,
    workers: int | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[LrSweep]:
    """Train every cell at every LR with every seed.

    Args:
        cells: what varies other than LR and seed; cells that differ in nothing but
            ``ramp.peak`` are one sweep over those peaks.
        seeds: each sees the same data at every LR.
        lrs: peak LRs; by default those of the cells or, where each has one peak only,
            ``default_lrs`` of its width.
        schedule: steps, warm-up and floor.
    """
    schedule = (schedule or Schedule()).validated()
    grids = lr_grids([cell.validated() for cell in cells], lrs)
    tasks, homes = [], []
    for position, (cell, grid) in enumerate(grids):
        lanes = [(seed, lr) for seed in seeds for lr in grid]
        for group in lane_groups(len(lanes), MAX_LANES[cell.device]):
            tasks.append(_task(cell, [lanes[lane] for lane in group], schedule))
            homes += [position] * len(group)
    runs: list[LrRun] = run_tasks(tasks, workers, on_event=on_event)
    return [
        LrSweep(
            cell=cell,
            schedule=schedule,
            lrs=tuple(grid),
            runs=tuple(run for home, run in zip(homes, runs, strict=True) if home == position),
        )
        for position, (cell, grid) in enumerate(grids)
    ]


def lr_grids(
    cells: Sequence[CellSpec], lrs: Sequence[float] | None = None
) -> list[tuple[CellSpec, list[float]]]:
    """Each different cell, its ramp aside, with the LRs to train it at."""
    peaks: dict[CellSpec, list[float]] = {}
    for cell in cells:
        peak = cell.resolved().ramp.peak
        assert peak is not None
        peaks.setdefault(dataclasses.replace(cell, ramp=RampSpec()).resolved(), []).append(peak)
    return [
        (cell, sorted(lrs or found if lrs or len(found) > 1 else default_lrs(cell.model.width)))
        for cell, found in peaks.items()
    ]


def _task(cell: CellSpec, lanes: Sequence[tuple[int, float]], schedule: Schedule) -> Task:
    return Task(
        cell=cell,
        seeds=tuple(seed for seed, _ in lanes),
        target="keelbench.lrsweep:train_lanes",
        options={
            "lrs": [lr for _, lr in lanes],
            "schedule": dataclasses.asdict(schedule),
        },
    )


def train_lanes(
    cell: CellSpec,
    seeds: Sequence[int],
    *,
    lrs: Sequence[float],
    schedule: dict[str, Any],
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[LrRun]:
    """Train one lane per (seed, LR): what a worker runs."""
    shape = Schedule(**schedule)
    with threads(cell.threads):
        engine = Engine(cell, seeds, shape.steps)
        init = held_out_losses(engine)
        lrs_TS = np.stack([shape.lrs(lr) for lr in lrs], axis=1)
        trained = train(engine, lrs_TS, on_progress)
        ends = held_out_losses(engine) if trained.alive else np.empty(0)
    final = {lane: float(loss) for lane, loss in zip(trained.alive, ends, strict=True)}
    for lane, (seed, lr) in enumerate(zip(seeds, lrs, strict=True)):
        loss = final.get(lane, math.nan)
        yield LrRun(
            seed=seed,
            lr=lr,
            loss=loss if math.isfinite(loss) else None,
            init_loss=float(init[lane]),
            curve=_thinned(trained.curves[:, lane]),
        )


def _thinned(curve: np.ndarray[Any, Any]) -> tuple[float | None, ...]:
    parts = np.array_split(curve, min(CURVE_POINTS, len(curve)))
    means = [float(part.mean()) for part in parts]
    return tuple(round(mean, 5) if math.isfinite(mean) else None for mean in means)


def summary_rows(sweeps: Sequence[LrSweep]) -> list[dict[str, Any]]:
    """One row per cell: best LR, its loss and the sensitivity, each with its interval."""
    rows = []
    for sweep in sweeps:
        model, best = sweep.cell.model, sweep.best_lr
        scale = model.width / PAPER_WIDTH
        row: dict[str, Any] = {
            "arch": model.arch,
            "depth": model.depth,
            "width": model.width,
            "steps": sweep.schedule.steps,
            "seeds": len(sweep.by_seed()),
            "best_lr": best.mean,
            "best_lr_low": best.low,
            "best_lr_high": best.high,
            "best_normalized": None if best.mean is None else best.mean * scale,
            "is_edge": _is_edge(sweep),
        }
        for name, value in (("loss", sweep.best_loss), ("sensitivity", sweep.sensitivity)):
            row |= {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
        rows.append(row)
    return rows


def _is_edge(sweep: LrSweep) -> bool:
    """True if the best LR of any seed is an end of the grid: the best may lie outside."""
    best = [min(runs, key=lambda run: run.capped).lr for runs in sweep.by_seed().values()]
    return len(sweep.lrs) > 1 and any(lr in (sweep.lrs[0], sweep.lrs[-1]) for lr in best)


def curve_rows(sweeps: Sequence[LrSweep]) -> list[dict[str, Any]]:
    """One row per cell and LR: what the figure draws."""
    return [
        {
            "arch": sweep.cell.model.arch,
            "depth": sweep.cell.model.depth,
            "width": sweep.cell.model.width,
            "lr": lr,
            "loss": mean.mean,
            "loss_low": mean.low,
            "loss_high": mean.high,
            "seed_losses": [run.loss for run in sweep.at(lr)],
            "init_loss": float(np.mean([run.init_loss for run in sweep.at(lr)])),
            "steps": sweep.schedule.steps,
            "curve": _mean_curve(sweep.at(lr)),
        }
        for sweep in sweeps
        for lr in sweep.lrs
        for mean in [sweep.losses(lr)]
    ]


def _mean_curve(runs: Sequence[LrRun]) -> list[float | None]:
    stacked = np.array([[np.nan if v is None else v for v in run.curve] for run in runs])
    return [v if math.isfinite(v) else None for v in stacked.mean(axis=0).tolist()]


def relation_rows(sweeps: Sequence[LrSweep], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Max LR beside best LR: one row for each cell that has both.

    A record belongs to a sweep if model, data and optimizer are the same.
    """
    by_setting: dict[str, list[Record]] = {}
    for record in records:
        by_setting.setdefault(_setting(record.cell), []).append(record)
    rows = []
    for sweep, row in zip(sweeps, summary_rows(sweeps), strict=True):
        matching = by_setting.get(_setting(sweep.cell), [])
        if matching:
            found = estimate_records(matching)
            rows.append(
                {
                    **{name: row[name] for name in ("arch", "depth", "width")},
                    **{name: row[name] for name in ("best_lr", "best_lr_low", "best_lr_high")},
                    "max_lr": found.mean,
                    "max_lr_low": found.low,
                    "max_lr_high": found.high,
                }
            )
    return rows


def _setting(cell: CellSpec) -> str:
    values = cell.resolved().to_dict()
    data = {k: v for k, v in values["data"].items() if not k.startswith("probe")}
    return content_hash({"model": values["model"], "data": data, "optim": values["optim"]})
