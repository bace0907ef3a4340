"""What people see on stderr while lanes run: live in a terminal, plain lines when piped."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from keelbench.launch import (
    Event,
    LaneEnded,
    Progressed,
    Started,
    Task,
    TaskEnded,
    TaskFailed,
)
from keelbench.records import VerdictKind
from keelbench.report.numbers import seeds_text
from keelbench.specs import CellSpec
from keelbench.sweep import expected_cost, expected_steps

PLAIN_SECONDS = 10.0
"""Seconds between two plain lines of one task."""


@dataclass
class _Running:
    task: Task
    started: float
    step: int = 0
    lr: float = 0.0
    loss: float | None = None
    lanes: int = 0
    printed: float = 0.0
    seconds_per_step: float | None = None
    marks: list[tuple[float, int]] = field(default_factory=list)

    def expected_end(self) -> int:
        """The step at which the task will probably end: never less than a little ahead."""
        cell = self.task.cell
        ahead = min(cell.ramp.steps, int(self.step * 1.1) + 32)
        return max(expected_steps(cell), ahead)

    def seconds_left(self) -> float | None:
        if len(self.marks) < 2:
            return None
        (first_time, first_step), (last_time, last_step) = self.marks[0], self.marks[-1]
        if last_step <= first_step:
            return None
        pace = (last_time - first_time) / (last_step - first_step)
        return pace * (self.expected_end() - self.step)


class ProgressView:
    """Follows the events of a sweep. Use as a context manager and call with each event."""

    def __init__(self, lanes_to_run: int, workers: int, *, is_quiet: bool = False) -> None:
        self.total = lanes_to_run
        self.workers = workers
        self.done = 0
        self.running: dict[int, _Running] = {}
        self.waiting_cost = 0.0
        self.is_quiet = is_quiet
        self._cost_rate: list[float] = []
        self._live: Any = None
        self._render: Callable[[], Any] | None = None

    def __enter__(self) -> "ProgressView":
        if not self.is_quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True),
                get_renderable=self._table,
                refresh_per_second=2,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Started):
            self.running[event.task.id] = _Running(event.task, now, lanes=len(event.task.seeds))
            self._say(f"{title(event.task)}: started")
        elif isinstance(event, Progressed):
            self._progressed(self.running[event.task.id], event.progress, now)
        elif isinstance(event, LaneEnded):
            self.done += 1
            self._say(f"{label(event.task.cell)}: {_ending(event)} [{self.done}/{self.total}]")
        elif isinstance(event, TaskFailed):
            self.running.pop(event.task.id, None)
            self._say(f"{title(event.task)}: failed: {event.reason}")
        elif isinstance(event, TaskEnded):
            self.running.pop(event.task.id, None)

    def _progressed(self, running: _Running, progress: Any, now: float) -> None:
        running.step, running.lr = progress.step, progress.lr
        running.loss, running.lanes = progress.loss, progress.running
        running.marks.append((now, progress.step))
        del running.marks[:-8]
        if now - running.printed >= PLAIN_SECONDS:
            running.printed = now
            self._say(self._line(running))

    def _line(self, running: _Running) -> str:
        loss = "-" if running.loss is None else f"{running.loss:.3f}"
        return (
            f"{title(running.task)}: step {running.step} LR {running.lr:.2e} "
            f"loss {loss} lanes {running.lanes} about {duration(running.seconds_left())} left"
        )

    def _say(self, line: str) -> None:
        """A plain line, unless there is a live view that shows the same."""
        if not self.is_quiet and self._live is None:
            print(line, file=sys.stderr, flush=True)

    def seconds_left(self) -> float | None:
        """Rough time until everything is done: what runs, plus what waits, over workers."""
        known = [r.seconds_left() for r in self.running.values()]
        left = [seconds for seconds in known if seconds is not None]
        if not left:
            return None
        rates = [
            seconds / max(1e-9, _remaining_cost(r))
            for r in self.running.values()
            if (seconds := r.seconds_left()) is not None
        ]
        rate = sum(rates) / len(rates)
        return max(max(left), (sum(left) + rate * self.waiting_cost) / max(1, self.workers))

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for header, justify in (
            ("running", "left"),
            ("step", "right"),
            ("LR", "right"),
            ("loss/nats", "right"),
            ("lanes", "right"),
            ("left", "right"),
        ):
            # In a narrow terminal the names are broken into lines, the numbers never.
            table.add_column(header, justify=justify, no_wrap=header != "running")  # type: ignore[arg-type]
        for running in self.running.values():
            table.add_row(
                title(running.task),
                str(running.step),
                f"{running.lr:.2e}" if running.step else "-",
                "-" if running.loss is None else f"{running.loss:.3f}",
                str(running.lanes),
                duration(running.seconds_left()),
            )
        table.add_row(
            f"{self.done} of {self.total} lanes", "", "", "", "", duration(self.seconds_left())
        )
        return table


def _remaining_cost(running: _Running) -> float:
    end = running.expected_end()
    share = (end - running.step) / max(1, end)
    return expected_cost(running.task.cell, len(running.task.seeds)) * share


def _ending(event: LaneEnded) -> str:
    record = event.record
    verdict = record.verdict
    text = f"seed {record.seed} {verdict.kind.replace('_', ' ')}"
    if verdict.kind is VerdictKind.DIVERGED:
        text += f" ({verdict.rule}) at step {verdict.onset_step}"
    if record.max_lr is not None:
        text += f", Max LR {record.max_lr:.3g}"
    elif record.lower_bound is not None:
        text += f", Max LR >= {record.lower_bound:.3g}"
    return text


def title(task: Task) -> str:
    """A short name of a task for one line: its cell and its seeds."""
    return f"{label(task.cell)}, {seeds_text(task.seeds)}"


def label(cell: CellSpec) -> str:
    """A short name of a cell for one line: architecture, depth, width."""
    return f"{cell.model.arch} L={cell.model.depth} width {cell.model.width}"


def duration(seconds: float | None) -> str:
    """``45 s``, ``3 min``, ``1 h 20 min``; ``-`` while unknown."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
