"""The scheduler: lanes packed into tasks, records stored as they come, sweeps that go on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_tasks import lane
from helpers import TESTS, TINY, numbers, refusal, tiny_cell

from keelbench import sweep
from keelbench.divergence import DETECTOR_VERSION
from keelbench.launch import Event, LaneEnded, Started, TaskFailed
from keelbench.records import VerdictKind, record_id
from keelbench.specs import CellSpec
from keelbench.store import Store
from keelbench.sweep import expected_steps, pending_seeds, plan, run_cells, stored_records
from keelbench.sweep_spec import make_cell


def cell(arch: str = "keel", depth: int = 8, **settings: Any) -> CellSpec:
    return CellSpec().replaced({"arch": arch, "depth": depth, **settings}).validated()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let every task run one of the fakes."""
    return lambda name: monkeypatch.setattr(
        sweep, "RUN_TARGET", f"{TESTS / 'fake_tasks.py'}:{name}"
    )


def packed(
    cells: Sequence[CellSpec], seeds: Sequence[int], store: Store, workers: int
) -> list[tuple[str, tuple[int, ...]]]:
    return [(t.cell.model.arch, t.seeds) for t in plan(cells, seeds, store, workers)]


def run(
    cells: Sequence[CellSpec], seeds: Sequence[int], store: Store, **options: Any
) -> tuple[dict[tuple[str, int], str], list[Event]]:
    """Verdict by architecture and seed, and every event."""
    events: list[Event] = []
    options = {"workers": 0, **options}
    records = run_cells(cells, seeds, store, on_event=events.append, **options)
    verdicts = {
        (r.cell.model.arch, r.seed): f"{r.verdict.kind}: {r.verdict.reason or ''}".strip(": ")
        for r in records
    }
    return verdicts, events


def started(events: list[Event]) -> list[tuple[int, ...]]:
    return [event.task.seeds for event in events if isinstance(event, Started)]


# Packing


def test_seeds_of_a_cell_share_a_task_while_every_worker_is_busy(store: Store) -> None:
    cells = [cell("keel"), cell("pre_ln")]
    assert {seeds for _, seeds in packed(cells, range(3), store, workers=2)} == {(0, 1, 2)}


def test_lanes_are_spread_when_there_are_more_workers_than_cells(store: Store) -> None:
    assert packed([cell()], range(3), store, workers=2) == [("keel", (0, 1)), ("keel", (2,))]
    assert len(packed([cell()], range(3), store, workers=8)) == 3
    two = packed([cell("keel"), cell("pre_ln")], range(4), store, workers=3)
    assert sorted(seeds for _, seeds in two) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_a_task_has_no_more_lanes_than_pay_off(store: Store) -> None:
    tasks = packed([cell()], range(19), store, workers=1)
    assert [len(seeds) for _, seeds in tasks] == [7, 6, 6]
    assert sorted(seed for _, seeds in tasks for seed in seeds) == list(range(19))


def test_the_longest_task_starts_first(store: Store) -> None:
    cells = [cell("post_ln"), cell("pre_ln"), cell("pre_ln", depth=64)]
    tasks = plan(cells, (0,), store, workers=1)
    assert [(t.cell.model.arch, t.cell.model.depth) for t in tasks] == [
        ("pre_ln", 64),
        ("pre_ln", 8),
        ("post_ln", 8),
    ]


def test_expected_steps_never_exceed_the_ramp() -> None:
    assert expected_steps(cell("keel", peak=1e-3, slope=1e-4)) == 10
    assert expected_steps(cell("post_ln")) < expected_steps(cell("keel"))
    assert expected_steps(cell("mix_ln(post_fraction=0.5)")) == expected_steps(cell("mix_ln"))


def test_what_is_stored_is_not_planned_again(store: Store) -> None:
    store.save(lane(cell(), 1))
    assert pending_seeds(cell(), range(3), store) == [0, 2]
    assert packed([cell(), cell("pre_ln")], range(3), store, workers=1) == [
        ("pre_ln", (0, 1, 2)),
        ("keel", (0, 2)),
    ]
    assert [r.seed for r in stored_records([cell()], range(3), store)] == [1]


# Running


def test_records_come_back_in_the_order_of_cells_and_seeds(
    store: Store, target: Callable[[str], None]
) -> None:
    target("healthy")
    verdicts, _ = run([cell("pre_ln"), cell("keel")], (5, 3), store)
    assert list(verdicts) == [("pre_ln", 5), ("pre_ln", 3), ("keel", 5), ("keel", 3)]
    assert len(store.records()) == 4


def test_a_record_is_stored_before_its_event_is_told(
    store: Store, target: Callable[[str], None]
) -> None:
    target("healthy")
    stored_by_then = []

    def look(event: Event) -> None:
        if isinstance(event, LaneEnded):
            stored_by_then.append(store.load(event.record.id) is not None)

    run_cells([cell()], range(3), store, workers=0, on_event=look)
    assert stored_by_then == [True, True, True]


def test_the_same_sweep_again_runs_nothing_unless_it_is_fresh(
    store: Store, target: Callable[[str], None]
) -> None:
    target("healthy")
    verdicts, _ = run([cell()], range(2), store)
    again, events = run([cell()], range(2), store)
    assert (again, events) == (verdicts, [])
    _, events = run([cell()], range(3), store)
    assert started(events) == [(2,)]
    _, events = run([cell()], range(3), store, is_fresh=True)
    assert started(events) == [(0, 1, 2)]


def test_a_sweep_on_real_cells_gives_real_records_whatever_the_packing(
    store: Store, tmp_path: Path
) -> None:
    cells = [tiny_cell("keel"), tiny_cell("post_ln")]
    whole = run_cells(cells, (0, 1, 2), store, workers=0)
    apart = Store(tmp_path / "apart")
    for seed in (2, 0, 1):
        run_cells(cells[::-1], (seed,), apart, workers=0)
    assert [numbers(r.trace) for r in stored_records(cells, (0, 1, 2), apart)] == [
        numbers(r.trace) for r in whole
    ]
    assert {r.verdict.kind for r in whole} == {VerdictKind.SURVIVED}


def test_an_invalid_cell_is_refused_before_anything_is_written(store: Store) -> None:
    message = refusal(lambda: run_cells([CellSpec().replaced({"depth": 7})], (0,), store))
    assert "model.depth is 7" in message
    assert not store.folder.exists()


def test_a_cuda_cell_without_a_cuda_device_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = refusal(lambda: run_cells([cell(device="cuda")], (0,), store))
    assert "no CUDA device is visible" in message and "--device cpu" in message


def test_lanes_may_be_limited_and_change_no_result(store: Store, tmp_path: Path) -> None:
    tasks = plan([cell()], (0, 1, 2), store, workers=1, lanes=2)
    assert [task.seeds for task in tasks] == [(0, 1), (2,)]
    assert [t.seeds for t in plan([cell()], (0, 1, 2), store, workers=1)] == [(0, 1, 2)]
    tiny = tiny_cell()
    together = run_cells([tiny], (0, 1), store, 0)
    alone = run_cells([tiny], (0, 1), Store(tmp_path / "alone"), 0, lanes=1)
    for one, other in zip(together, alone, strict=True):
        assert numbers(one.trace) == numbers(other.trace)


# What goes wrong


@pytest.mark.parametrize("workers", [0, 2])
def test_out_of_memory_is_tried_again_with_fewer_lanes(
    store: Store, target: Callable[[str], None], workers: int
) -> None:
    target("greedy")
    verdicts, events = run([cell()], range(7), store, workers=workers, options={"most": 2})
    assert verdicts == {("keel", seed): "survived" for seed in range(7)}
    sizes = [len(seeds) for seeds in started(events)]
    assert max(sizes) > 2 and sizes[-1] <= 2
    tasks = [event.task for event in events if isinstance(event, Started)]
    assert len({task.id for task in tasks}) == len(tasks), "each half is a task of its own"


def test_a_single_lane_without_memory_is_failed_and_tried_again_next_time(
    store: Store, target: Callable[[str], None]
) -> None:
    target("greedy")
    verdicts, _ = run([cell()], range(2), store, options={"most": 0})
    assert verdicts == {("keel", seed): "failed: out of memory" for seed in range(2)}
    assert all(r.max_lr is None and r.trace.steps == 0 for r in store.records())
    verdicts, _ = run([cell()], range(2), store, options={"most": 1})
    assert verdicts == {("keel", seed): "survived" for seed in range(2)}


@pytest.mark.parametrize(("name", "workers"), [("picky", 0), ("exiting", 1)])
def test_a_task_that_breaks_leaves_failed_rows_while_others_complete(
    store: Store, target: Callable[[str], None], name: str, workers: int
) -> None:
    target(name)
    cells = [cell("post_ln"), cell("keel"), cell("pre_ln")]
    verdicts, events = run(cells, range(2), store, workers=workers)
    why = {
        "picky": "failed: RuntimeError: the branch exploded",
        "exiting": "failed: the worker process ended with code 3",
    }[name]
    first = "survived" if name == "picky" else why
    assert verdicts == {
        ("post_ln", 0): first,
        ("post_ln", 1): why,
        ("keel", 0): "survived",
        ("keel", 1): "survived",
        ("pre_ln", 0): "survived",
        ("pre_ln", 1): "survived",
    }
    assert len([event for event in events if isinstance(event, TaskFailed)]) == 1


def test_a_data_file_that_does_not_exist_fails_its_cell_alone(store: Store) -> None:
    cells = [tiny_cell("keel", source="text:/nowhere/book.txt"), tiny_cell("pre_ln")]
    verdicts, _ = run(cells, (0,), store)
    assert verdicts["keel", 0].startswith("failed: no such file: /nowhere/book.txt")
    assert verdicts["pre_ln", 0] == "survived: " + verdicts["pre_ln", 0].partition(": ")[2]


# kill -9

SWEEP = """
import json, sys
from keelbench.launch import LaneEnded
from keelbench.store import Store
from keelbench.sweep import run_cells
from keelbench.sweep_spec import make_cell

def tell(event):
    if isinstance(event, LaneEnded):
        print(event.record.id, flush=True)

cells = [make_cell(settings) for settings in json.loads(sys.argv[1])]
run_cells(cells, (0, 1), Store(sys.argv[2]), workers=2, on_event=tell)
"""


@pytest.fixture
def killed_sweep(store: Store) -> Iterator[tuple[list[CellSpec], list[str]]]:
    """A sweep of three cells, killed when its first lane has ended; with the ids it told."""
    long = {**TINY, "arch": "pre_ln", "depth": 8, "peak": 8e-2}
    settings = [long, {**TINY, "arch": "keel"}, {**TINY, "arch": "keel", "depth": 2}]
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP, json.dumps(settings), str(store.folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    told = [process.stdout.readline().strip()]
    os.kill(process.pid, signal.SIGKILL)
    told += [line.strip() for line in process.stdout]
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    yield [make_cell(values) for values in settings], told


def test_a_killed_sweep_keeps_every_lane_that_ended_and_a_rerun_completes_it(
    store: Store, killed_sweep: tuple[list[CellSpec], list[str]], tmp_path: Path
) -> None:
    cells, told = killed_sweep
    kept = [record.id for record in store.records()]  # every file is whole
    assert set(told) <= set(kept), "a lane that ended is stored"
    everything = [record_id(c, seed, DETECTOR_VERSION) for c in cells for seed in (0, 1)]
    missing = set(everything) - set(kept)
    assert missing, "killed too late to prove anything"
    _, events = run(cells, (0, 1), store)
    rerun = {event.record.id for event in events if isinstance(event, LaneEnded)}
    assert rerun == missing, "nothing that was kept is run again"
    completed = stored_records(cells, (0, 1), store)
    assert [record.id for record in completed] == everything
    undisturbed = run_cells(cells, (0, 1), Store(tmp_path / "undisturbed"), workers=0)
    assert [numbers(r.trace) for r in completed] == [numbers(r.trace) for r in undisturbed]
    assert [r.max_lr for r in completed] == [r.max_lr for r in undisturbed]
