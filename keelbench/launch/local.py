"""Tasks on this machine: in this process, or in one worker process per core or GPU.

Workers are plain subprocesses, so that notebooks and scripts without a main guard work, and
so that each gets its environment before torch is imported. They end with their parent.
"""

import os
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from keelbench.errors import KeelbenchError
from keelbench.launch import (
    Event,
    LaneEnded,
    Progressed,
    Started,
    Task,
    TaskEnded,
    TaskFailed,
)
from keelbench.registry import load_object

POLL_SECONDS = 0.5
"""How long the parent sleeps at most: how fast Ctrl-C is answered."""

KILLED = (-9, 137)
"""Exit codes of a worker that the kernel killed, nearly always for memory."""


class InProcessLauncher:
    """One task after another, here: for debugging and for callers of the API."""

    def run(self, tasks: deque[Task]) -> Iterator[Event]:
        while tasks:
            task = tasks.popleft()
            yield Started(task)
            waiting: list[Event] = []
            try:
                run = load_object(task.target)
                on_progress = _Collector(task, waiting)
                for record in run(
                    task.cell, task.seeds, on_progress=on_progress, **task.options
                ):
                    yield from waiting
                    waiting.clear()
                    yield LaneEnded(task, record)
                yield TaskEnded(task)
            except Exception as error:
                yield failure(task, error)


@dataclass
class _Collector:
    task: Task
    events: list[Event]

    def __call__(self, progress: Any) -> None:
        self.events.append(Progressed(self.task, progress))


class ProcessLauncher:
    """One worker process per entry of ``environments``, each running one task at a time.

    Args:
        environments: extra environment variables for each worker, for example
            ``CUDA_VISIBLE_DEVICES``; as many workers as entries.
    """

    def __init__(self, environments: Sequence[dict[str, str]]) -> None:
        self.environments = list(environments)

    def run(self, tasks: deque[Task]) -> Iterator[Event]:
        slots = [_Slot(environment) for environment in self.environments]
        try:
            while tasks or any(slot.task for slot in slots):
                for slot in slots:
                    if tasks and slot.task is None:
                        yield slot.give(tasks.popleft())
                busy = [slot for slot in slots if slot.task is not None]
                ready = wait([slot.connection for slot in busy], timeout=POLL_SECONDS)
                for slot in busy:
                    if slot.connection in ready:
                        yield slot.receive()
        finally:
            for slot in slots:
                slot.stop()


class _Slot:
    """A place for one worker process, started when first needed and again if it died."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.task: Task | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection

    def give(self, task: Task) -> Event:
        if self.process is None or self.process.poll() is not None:
            self._start()
        self.task = task
        self.connection.send(task)
        return Started(task)

    def receive(self) -> Event:
        assert self.task is not None and self.process is not None
        event: Event
        try:
            event = self.connection.recv()
        except (EOFError, ConnectionError):
            event = _death(self.task, self.process.wait())
        if isinstance(event, TaskEnded | TaskFailed):
            self.task = None
        return event

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.connection.close()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keelbench.launch.worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()


def serve(connection: Connection) -> None:
    """A worker's life: run tasks as they come, until the parent is gone."""
    while True:
        try:
            task: Task = connection.recv()
            connection.send(_run_and_report(task, connection))
        except (EOFError, ConnectionError):
            return


def _run_and_report(task: Task, connection: Connection) -> Event:
    try:
        run = load_object(task.target)

        def report(progress: Any) -> None:
            connection.send(Progressed(task, progress))

        for record in run(task.cell, task.seeds, on_progress=report, **task.options):
            connection.send(LaneEnded(task, record))
        return TaskEnded(task)
    except ConnectionError:
        raise
    except Exception as error:
        return failure(task, error)


def failure(task: Task, error: Exception) -> TaskFailed:
    """What a task's exception means to the sweep."""
    is_memory = isinstance(error, MemoryError) or "out of memory" in str(error).lower()
    is_memory = is_memory or "can't allocate memory" in str(error).lower()
    if is_memory:
        reason = "out of memory"
    elif isinstance(error, KeelbenchError):
        reason = error.message
    else:
        reason = f"{type(error).__name__}: {error}"
    return TaskFailed(task, reason, is_memory, traceback.format_exc())


def _death(task: Task, code: int) -> TaskFailed:
    if code in KILLED:
        return TaskFailed(task, "out of memory (the worker was killed)", True)
    return TaskFailed(task, f"the worker process ended with code {code}")
