"""Studies on the workers of sweeps: tasks in, plain results out.

A study's task names a function (cell, seeds, on_progress=..., options) that yields results
of any picklable kind; here they come back in the order of the tasks.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from keelbench.errors import RunFailedError
from keelbench.launch import Event, LaneEnded, Task, TaskFailed
from keelbench.sweep import make_launcher


def run_tasks(
    tasks: Sequence[Task],
    workers: int | None = None,
    *,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[Any]:
    """Run tasks and return their results, task by task.

    Args:
        tasks: in the order in which results are wanted; the first are started first.
        workers: processes at once; 0 runs in this process, None takes every useful core or GPU.
        on_event: sees every event, for progress.

    Raises:
        RunFailedError: if a task fails; the others are stopped.
    """
    launcher, _ = make_launcher([task.cell for task in tasks], workers)
    found: dict[int, list[Any]] = {task.id: [] for task in tasks}
    for event in launcher.run(deque(tasks)):
        on_event(event)
        if isinstance(event, LaneEnded):
            found[event.task.id].append(event.record)
        elif isinstance(event, TaskFailed):
            model = event.task.cell.model
            raise RunFailedError(
                f"{model.arch} at depth {model.depth}, width {model.width}: {event.reason}",
                "try fewer lanes, a smaller batch or a smaller model"
                if event.is_out_of_memory
                else None,
            )
    return [result for task in tasks for result in found[task.id]]
