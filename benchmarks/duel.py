"""Contenders take turns; what counts is the ratio within one round, and its median."""

import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contenders import Shape, serve

ROUNDS = 5
SECONDS_PER_TURN = 2.0


@dataclass
class Side:
    """One contender on the whole machine: processes x threads, lanes shared out."""

    label: str
    contender: str
    shape: Shape
    processes: int
    threads: int
    options: dict[str, Any] = field(default_factory=dict)

    def start(self) -> "Running":
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for _ in range(self.processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, self.contender, self.shape, self.threads, self.options)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        setup = max(pipe.recv() for pipe in pipes)
        return Running(self, pipes, processes, setup)


@dataclass
class Running:
    """A side whose processes are built and wait for orders."""

    side: Side
    pipes: list[Any]
    processes: list[Any]
    setup_seconds: float
    steps: int = 1

    def turn(self, steps: int, by_cpu_time: bool = False) -> tuple[float, float]:
        """(lane-steps per second of all processes together, seconds)."""
        for pipe in self.pipes:
            pipe.send(steps)
        answers = [pipe.recv() for pipe in self.pipes]
        seconds = max(answer[2 if by_cpu_time else 1] for answer in answers)
        return sum(answer[0] for answer in answers) / seconds, seconds

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


def duel(
    sides: Sequence[Side], rounds: int = ROUNDS, *, by_cpu_time: bool = False
) -> list[dict[str, Any]]:
    """Lane-steps per second of each side, and the first side's advantage over each."""
    running = [side.start() for side in sides]
    try:
        for one in running:
            _, seconds = one.turn(2, by_cpu_time)
            one.steps = max(2, round(SECONDS_PER_TURN * 2 / seconds))
        table = [
            [one.turn(one.steps, by_cpu_time)[0] for one in running] for _ in range(rounds)
        ]
    finally:
        for one in running:
            one.stop()
    rows = []
    for column, one in enumerate(running):
        ratios = [row[0] / row[column] for row in table]
        rows.append(
            {
                "label": one.side.label,
                "shape": one.side.shape.name,
                "processes": one.side.processes,
                "threads": one.side.threads,
                "setup_seconds": round(one.setup_seconds, 1),
                "lane_steps_per_second": [round(row[column], 3) for row in table],
                "median": round(statistics.median(row[column] for row in table), 3),
                "advantage": round(statistics.median(ratios), 3),
                "advantage_range": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        )
    return rows
