"""The scheduler: cells and seeds to tasks, tasks to records, records to the store.

Finished lanes are in the store at once; what is stored is not run again. A cell that fails
is a row with its reason, and the others go on.
"""

from collections import deque
from collections.abc import Callable, Sequence

from keelbench.capacity import (
    available_cores,
    free_memory,
    lanes_at_once,
    useful_cores,
    visible_gpus,
)
from keelbench.data import open_source
from keelbench.divergence import DETECTOR_VERSION
from keelbench.errors import KeelbenchError
from keelbench.launch import (
    Event,
    LaneEnded,
    Launcher,
    Progressed,
    Started,
    Task,
    TaskEnded,
    TaskFailed,
)
from keelbench.launch.local import InProcessLauncher, ProcessLauncher
from keelbench.records import Environment, Record, Trace, Verdict, VerdictKind, record_id
from keelbench.specs import CellSpec, DataSpec
from keelbench.store import Store

RUN_TARGET = "keelbench.search:run_lanes"

TYPICAL_NORMALIZED_LR = {
    "post_ln": 2.5e-4,
    "hybridnorm": 2.5e-4,
    "mix_ln": 8e-4,
    "deepnorm": 1e-3,
    "pre_ln": 3.5e-3,
    "keel": 2.5e-3,
}
"""Where ramps of this package typically broke (results/README.md): used to order work and to
tell the time left, never for a result."""

LATE_STEPS = 96
"""Steps that a ramp typically runs past the onset until the verdict is certain."""


def pending_seeds(cell: CellSpec, seeds: Sequence[int], store: Store) -> list[int]:
    """Seeds without a stored result; lanes that failed before their first step run again."""
    return [seed for seed in seeds if not _is_done(store.load(_id(cell, seed)))]


def stored_records(
    cells: Sequence[CellSpec], seeds: Sequence[int], store: Store
) -> list[Record]:
    """What the store holds of a sweep, in the order of cells and seeds."""
    found = (store.load(_id(cell, seed)) for cell in cells for seed in seeds)
    return [record for record in found if record is not None]


def expected_steps(cell: CellSpec) -> int:
    """Steps that a lane will probably take: an estimate for order and time left."""
    arch = cell.model.arch.partition("(")[0]
    assert cell.ramp.slope is not None
    peak = cell.ramp.steps
    if arch not in TYPICAL_NORMALIZED_LR:
        return min(peak, 1000)
    lr = TYPICAL_NORMALIZED_LR[arch] * 1024 / cell.model.width
    return min(peak, round(lr / cell.ramp.slope) + LATE_STEPS)


def expected_cost(cell: CellSpec, lanes: int) -> float:
    """Relative cost of running some lanes of a cell to the end."""
    tokens = cell.data.batch * cell.data.seq
    return expected_steps(cell) * lanes * tokens * cell.model.depth * cell.model.width**2


def plan(
    cells: Sequence[CellSpec],
    seeds: Sequence[int],
    store: Store,
    workers: int,
    options: dict[str, object] | None = None,
    *,
    lanes: int | None = None,
) -> deque[Task]:
    """Tasks for what is not stored yet, longest first.

    Seeds of a cell share a task (lanes) as long as every worker has something to do, up to
    ``lanes``; None takes what pays and fits into memory. Which lanes train together changes
    no result.
    """
    pending = [(cell, pending_seeds(cell, seeds, store)) for cell in cells]
    pending = [(cell, left) for cell, left in pending if left]
    parts = max(1, -(-workers // max(1, len(pending))))
    most = _most_lanes([cell for cell, _ in pending], workers, lanes)
    tasks = [
        Task(cell=cell, seeds=tuple(group), target=RUN_TARGET, options=options or {})
        for cell, left in pending
        for group in _split(left, parts, most[cell])
    ]
    tasks.sort(key=lambda task: -expected_cost(task.cell, len(task.seeds)))
    return deque(tasks)


def run_cells(
    cells: Sequence[CellSpec],
    seeds: Sequence[int],
    store: Store,
    workers: int | None = None,
    *,
    on_event: Callable[[Event], None] = lambda _: None,
    is_fresh: bool = False,
    options: dict[str, object] | None = None,
    lanes: int | None = None,
) -> list[Record]:
    """Run what is missing and return every record of these cells and seeds.

    Args:
        cells: validated cells.
        seeds: lanes of each cell.
        store: where records go and are looked up.
        workers: processes at once; 0 runs in this process, None takes every useful core or GPU.
        on_event: sees every event, for progress.
        is_fresh: run everything again, replacing what is stored.
        lanes: trained together in one process at most; None takes what pays and fits.
    """
    cells = [cell.validated() for cell in cells]
    store.prepare()
    if is_fresh:
        for cell in cells:
            for seed in seeds:
                store.remove(_id(cell, seed))
    launcher, count = make_launcher(cells, workers)
    tasks = plan(cells, seeds, store, count, options, lanes=lanes)
    for event in launcher.run(tasks):
        if isinstance(event, LaneEnded):
            store.save(event.record)
        elif isinstance(event, TaskFailed):
            _handle_failure(event, tasks, store)
        on_event(event)
    return stored_records(cells, seeds, store)


def make_launcher(cells: Sequence[CellSpec], workers: int | None) -> tuple[Launcher, int]:
    """The launcher for these cells, and how many tasks it runs at once."""
    if workers == 0:
        return InProcessLauncher(), 1
    if any(cell.device == "cuda" for cell in cells):
        devices = visible_gpus()[: workers or None]
        if not devices:
            raise KeelbenchError(
                "device is cuda, but no CUDA device is visible",
                "use --device cpu, or check nvidia-smi and CUDA_VISIBLE_DEVICES",
            )
        return ProcessLauncher([{"CUDA_VISIBLE_DEVICES": device} for device in devices]), len(
            devices
        )
    threads = max((cell.threads for cell in cells), default=1)
    count = workers or max(1, useful_cores(available_cores()) // threads)
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return ProcessLauncher([environment] * count), count


def _most_lanes(
    cells: Sequence[CellSpec], workers: int, lanes: int | None
) -> dict[CellSpec, int]:
    """Lanes of one task of each cell; data and memory are looked at once for all cells."""
    if lanes is not None:
        return dict.fromkeys(cells, lanes)
    vocab = {data: _vocabulary(data) for data in {cell.data for cell in cells}}
    free = {device: free_memory(device, workers) for device in {cell.device for cell in cells}}
    return {
        cell: lanes_at_once(cell, size, free[cell.device])
        if (size := vocab[cell.data]) is not None
        else 1
        for cell in cells
    }


def _vocabulary(data: DataSpec) -> int | None:
    """None for data that cannot be used: told by the task, whose cell alone fails."""
    try:
        return open_source(data).vocab
    except KeelbenchError:
        return None


def _handle_failure(event: TaskFailed, tasks: deque[Task], store: Store) -> None:
    """Out of memory: try again with half the lanes; otherwise store the reason."""
    left = pending_seeds(event.task.cell, event.task.seeds, store)
    if event.is_out_of_memory and len(left) > 1:
        half = len(left) // 2
        for group in (left[:half], left[half:]):
            again = Task(
                cell=event.task.cell,
                seeds=tuple(group),
                target=event.task.target,
                options=event.task.options,
            )
            tasks.appendleft(again)
        return
    for seed in left:
        store.save(_failed(event.task.cell, seed, event.reason))


def _failed(cell: CellSpec, seed: int, reason: str) -> Record:
    import numpy as np

    empty = np.empty(0)
    return Record(
        cell=cell.resolved(),
        seed=seed,
        detector=DETECTOR_VERSION,
        verdict=Verdict(kind=VerdictKind.FAILED, reason=reason),
        max_lr=None,
        trace=Trace(lr=empty, loss=empty),
        seconds=0.0,
        environment=Environment(),
    )


def _id(cell: CellSpec, seed: int) -> str:
    return record_id(cell, seed, DETECTOR_VERSION)


def _is_done(record: Record | None) -> bool:
    if record is None:
        return False
    return record.verdict.kind is not VerdictKind.FAILED or record.trace.steps > 0


def _split(seeds: Sequence[int], parts: int, most: int) -> list[list[int]]:
    """Even groups: at least ``parts`` if there are so many seeds, none over ``most``."""
    groups = min(len(seeds), max(parts, -(-len(seeds) // most)))
    size, extra = divmod(len(seeds), groups)
    cut, start = [], 0
    for group in range(groups):
        stop = start + size + (group < extra)
        cut.append(list(seeds[start:stop]))
        start = stop
    return cut


__all__ = ["Progressed", "Started", "TaskEnded", "run_cells"]
