"""What a task may do to a launcher, without torch: named by path from workers and tests."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keelbench.divergence import DETECTOR_VERSION
from keelbench.errors import KeelbenchError
from keelbench.records import Environment, Record, Trace, Verdict, VerdictKind
from keelbench.specs import CellSpec

Progress = Callable[[Any], None]


def lane(cell: CellSpec, seed: int) -> Record:
    """A lane that survived one step; its environment tells who ran it."""
    return Record(
        cell=cell.resolved(),
        seed=seed,
        detector=DETECTOR_VERSION,
        verdict=Verdict(kind=VerdictKind.SURVIVED),
        max_lr=None,
        trace=Trace(lr=np.array([1e-3]), loss=np.array([4.0 + seed])),
        seconds=0.0,
        environment=Environment(extra={"pid": os.getpid(), "gpu": os.environ.get("FAKE_GPU")}),
    )


def healthy(cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress) -> Iterator[Record]:
    for seed in seeds:
        on_progress(f"seed {seed}")
        yield lane(cell, seed)


def greedy(
    cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress, most: int = 2
) -> Iterator[Record]:
    """Memory for so many lanes and no more."""
    if len(seeds) > most:
        raise MemoryError
    yield from healthy(cell, seeds, on_progress=on_progress)


def picky(cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress) -> Iterator[Record]:
    """Breaks on post_ln, after the first lane."""
    for seed in seeds:
        yield lane(cell, seed)
        if cell.model.arch == "post_ln":
            raise RuntimeError("the branch exploded")


def chatty(cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress) -> Iterator[Record]:
    """Writes to standard output, as libraries do."""
    print("a message that must not reach the results", flush=True)
    yield from healthy(cell, seeds, on_progress=on_progress)


def failing(
    cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress, error: Exception
) -> Iterator[Record]:
    raise error
    yield


def refusing(
    cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress
) -> Iterator[Record]:
    raise KeelbenchError("the file is empty", "give another")
    yield


def exiting(cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress) -> Iterator[Record]:
    """The process ends without a word on the first seed of a post_ln cell."""
    if cell.model.arch == "post_ln":
        os._exit(3)
    yield from healthy(cell, seeds, on_progress=on_progress)


def killed(cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress) -> Iterator[Record]:
    """As the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    yield


def meeting(
    cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress, folder: str, others: int
) -> Iterator[Record]:
    """Ends only once so many tasks run at the same time."""
    (Path(folder) / str(os.getpid())).touch()
    deadline = time.monotonic() + 20
    while len(list(Path(folder).iterdir())) < others:
        if time.monotonic() > deadline:
            raise TimeoutError("the others never came")
        time.sleep(0.01)
    yield from healthy(cell, seeds, on_progress=on_progress)


def endless(cell: CellSpec, seeds: Sequence[int], *, on_progress: Progress) -> Iterator[Record]:
    """Tells its process id for ever."""
    while True:
        on_progress(os.getpid())
        time.sleep(0.02)
    yield
