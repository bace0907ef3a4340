"""Where tasks run. A launcher gets tasks and yields events; it knows nothing of ramps."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from keelbench.records import Record
from keelbench.specs import CellSpec

_ids = count()


@dataclass(frozen=True, kw_only=True)
class Task:
    """Some lanes of one cell, run together.

    ``target`` is the ``module:attr`` of a function (cell, seeds, on_progress=...) that yields
    records; ``options`` are passed on to it by keyword.
    """

    cell: CellSpec
    seeds: tuple[int, ...]
    target: str
    options: dict[str, Any] = field(default_factory=dict)
    id: int = field(default_factory=lambda: next(_ids))


@dataclass(frozen=True)
class Started:
    task: Task


@dataclass(frozen=True)
class Progressed:
    task: Task
    progress: Any
    """A ``keelbench.ramp.Progress``."""


@dataclass(frozen=True)
class LaneEnded:
    task: Task
    record: Record


@dataclass(frozen=True)
class TaskEnded:
    task: Task


@dataclass(frozen=True)
class TaskFailed:
    """The task broke; lanes that ended before are not affected."""

    task: Task
    reason: str
    is_out_of_memory: bool = False
    traceback: str = ""


Event = Started | Progressed | LaneEnded | TaskEnded | TaskFailed


class Launcher(Protocol):
    """Runs tasks from a queue; the consumer may append to it while iterating."""

    def run(self, tasks: deque[Task]) -> Iterator[Event]: ...
