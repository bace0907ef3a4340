"""Launchers: the same events in this process and in workers, whatever a task does."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import TESTS, numbers, tiny_cell

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
from keelbench.specs import CellSpec
from keelbench.sweep import RUN_TARGET

FAKES = TESTS / "fake_tasks.py"

LAUNCHERS: dict[str, Callable[[], Launcher]] = {
    "in process": InProcessLauncher,
    "in one worker": lambda: ProcessLauncher([{}]),
}

either = pytest.mark.parametrize("launcher", list(LAUNCHERS))


def fake(name: str, seeds: tuple[int, ...] = (0,), arch: str = "keel", **options: Any) -> Task:
    cell = CellSpec().replaced({"arch": arch})
    return Task(cell=cell, seeds=seeds, target=f"{FAKES}:{name}", options=options)


def events_of(launcher: Launcher, *tasks: Task) -> list[Event]:
    return list(launcher.run(deque(tasks)))


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def pids(events: list[Event]) -> list[int]:
    ended = [event for event in events if isinstance(event, LaneEnded)]
    return [event.record.environment.extra["pid"] for event in ended]


def is_alive(pid: int) -> bool:
    """Running, and not merely waiting to be buried."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def ends_soon(pid: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


# What tasks tell


@either
def test_a_task_tells_its_start_progress_lanes_and_end_in_order(launcher: str) -> None:
    task = fake("healthy", (4, 7))
    events = events_of(LAUNCHERS[launcher](), task)
    expected = ["Started", "Progressed", "LaneEnded", "Progressed", "LaneEnded", "TaskEnded"]
    assert kinds(events) == expected
    assert [e.progress for e in events if isinstance(e, Progressed)] == ["seed 4", "seed 7"]
    assert [e.record.seed for e in events if isinstance(e, LaneEnded)] == [4, 7]
    assert {event.task.id for event in events} == {task.id}


@either
def test_tasks_run_in_the_order_of_the_queue_and_more_may_be_added(launcher: str) -> None:
    tasks = deque([fake("healthy", (0,)), fake("healthy", (1,))])
    seen = []
    for event in LAUNCHERS[launcher]().run(tasks):
        if isinstance(event, LaneEnded):
            seen.append(event.record.seed)
            if event.record.seed == 0:
                tasks.appendleft(fake("healthy", (9,)))
    assert sorted(seen) == [0, 1, 9]
    assert seen.index(9) < seen.index(1)


@either
def test_a_task_that_breaks_keeps_its_lanes_and_the_others_go_on(launcher: str) -> None:
    events = events_of(
        LAUNCHERS[launcher](), fake("picky", (0, 1), arch="post_ln"), fake("picky", (2,))
    )
    (failed,) = [event for event in events if isinstance(event, TaskFailed)]
    assert failed.reason == "RuntimeError: the branch exploded"
    assert not failed.is_out_of_memory
    assert "fake_tasks.py" in failed.traceback
    assert [e.record.seed for e in events if isinstance(e, LaneEnded)] == [0, 2]
    assert kinds(events)[-1] == "TaskEnded"


MEMORY = {
    "python": MemoryError(),
    "cuda": RuntimeError("CUDA out of memory. Tried to allocate 20 GiB"),
    "cpu": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
}


@pytest.mark.parametrize("error", list(MEMORY))
@either
def test_memory_running_out_is_told_apart(launcher: str, error: str) -> None:
    events = events_of(LAUNCHERS[launcher](), fake("failing", error=MEMORY[error]))
    failed = events[-1]
    assert isinstance(failed, TaskFailed)
    assert failed.is_out_of_memory and failed.reason == "out of memory"


@either
def test_a_users_mistake_is_reported_in_its_own_words(launcher: str) -> None:
    failed = events_of(LAUNCHERS[launcher](), fake("refusing"))[-1]
    assert isinstance(failed, TaskFailed) and failed.reason == "the file is empty"


@either
def test_a_target_that_does_not_exist_fails_its_task(launcher: str) -> None:
    failed = events_of(LAUNCHERS[launcher](), fake("healhty"))[-1]
    assert isinstance(failed, TaskFailed) and "did you mean 'healthy'?" in failed.reason


# Workers


def test_workers_run_at_the_same_time_each_with_its_environment(tmp_path: Path) -> None:
    launcher = ProcessLauncher([{"FAKE_GPU": "0"}, {"FAKE_GPU": "1"}])
    tasks = [fake("meeting", (seed,), folder=str(tmp_path), others=2) for seed in (0, 1)]
    events = events_of(launcher, *tasks)
    records = [event.record for event in events if isinstance(event, LaneEnded)]
    assert {record.environment.extra["gpu"] for record in records} == {"0", "1"}
    assert len(set(pids(events))) == 2
    assert os.getpid() not in pids(events)


def test_a_worker_serves_one_task_after_another() -> None:
    events = events_of(ProcessLauncher([{}]), *(fake("healthy", (seed,)) for seed in range(3)))
    assert len(pids(events)) == 3 and len(set(pids(events))) == 1


def test_what_a_worker_prints_stays_out_of_standard_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert kinds(events_of(ProcessLauncher([{}]), fake("chatty")))[-1] == "TaskEnded"
    assert capfd.readouterr().out == ""


def test_a_worker_that_dies_fails_its_task_and_is_replaced() -> None:
    events = events_of(
        ProcessLauncher([{}]),
        fake("healthy", (0,)),
        fake("exiting", (1,), arch="post_ln"),
        fake("healthy", (2,)),
    )
    (failed,) = [event for event in events if isinstance(event, TaskFailed)]
    assert failed.reason == "the worker process ended with code 3"
    assert not failed.is_out_of_memory
    first, second = pids(events)
    assert first != second


def test_a_worker_killed_by_the_kernel_counts_as_out_of_memory() -> None:
    failed = events_of(ProcessLauncher([{}]), fake("killed"))[-1]
    assert isinstance(failed, TaskFailed) and failed.is_out_of_memory
    assert failed.reason == "out of memory (the worker was killed)"


def test_workers_end_when_the_consumer_stops() -> None:
    running: Iterator[Event] = ProcessLauncher([{}]).run(deque([fake("endless")]))
    pid = next(event.progress for event in running if isinstance(event, Progressed))
    assert is_alive(pid)
    running.close()  # type: ignore[attr-defined]
    assert not is_alive(pid)


PARENT = """
import sys
from collections import deque
from keelbench.launch import Progressed, Task
from keelbench.launch.local import ProcessLauncher
from keelbench.specs import CellSpec
task = Task(cell=CellSpec(), seeds=(0,), target=sys.argv[1])
for event in ProcessLauncher([{}]).run(deque([task])):
    if isinstance(event, Progressed):
        print(event.progress, flush=True)
"""


def test_workers_end_when_their_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{FAKES}:endless"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    assert ends_soon(pid)


# The real thing


def test_a_worker_process_computes_the_same_bits_as_this_one() -> None:
    def run(launcher: Launcher) -> dict[tuple[str, int], Any]:
        tasks = [
            Task(cell=tiny_cell(arch), seeds=seeds, target=RUN_TARGET)
            for arch, seeds in (("keel", (0, 1)), ("hybridnorm", (2,)), ("deepnorm", (0,)))
        ]
        events = events_of(launcher, *tasks)
        assert "TaskFailed" not in kinds(events)
        records = [event.record for event in events if isinstance(event, LaneEnded)]
        return {(r.cell.model.arch, r.seed): numbers(r.trace) for r in records}

    here, there = run(InProcessLauncher()), run(ProcessLauncher([{}]))
    assert here == there
    assert len(here) == 4


def test_every_event_is_handled() -> None:
    """Guards the tests above: they know of all kinds of events."""
    assert set(Event.__args__) == {Started, Progressed, LaneEnded, TaskEnded, TaskFailed}
