"""What this machine can run at once: cores and GPUs for processes, memory for lanes."""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from keelbench.memory import lanes_that_fit
from keelbench.specs import CellSpec

MAX_LANES = {"cpu": 8, "cuda": 16}
"""Lanes of one task at most; see docs/performance.md for the gain per lane."""

CGROUP = Path("/sys/fs/cgroup")
CPU_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Where Linux tells a container's share of the processors, microseconds and period: in one
file (version 2) or in two (version 1)."""

MEMORY = Path("/proc/meminfo")

WORTHWHILE = 1.15
"""By how much twice as many processes must do more: hyperthreads, whose lanes share the vector
units of one core, give less, and cost twice the memory."""

PROOF_SHAPE = (64, 96, 96)
"""A stack of matrix products, a millisecond's work; each is small enough for one thread."""

PROOF_PIECES = 16
"""Stacks per core, of which the median counts."""


def available_cores() -> int:
    """Cores that this process may use: a container's quota may be less than it sees."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        cores = os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """Processors that the container may keep busy; infinite without a limit."""
    for names in CPU_QUOTAS:
        try:
            texts = [(CGROUP / name).read_text(encoding="ascii") for name in names]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:  # -1: no limit
                return quota / period
        except (OSError, ValueError, ZeroDivisionError):  # "max", or no such file
            continue
    return math.inf


@cache
def useful_cores(cores: int) -> int:
    """How many of so many cores are worth a process of their own, measured at this moment.

    Halved as long as half as many do the work as well, as where every second one is a
    hyperthread. What else runs at this moment does not count: it says nothing about the
    hours to come.
    """
    while cores > 1 and _rate(cores) < WORTHWHILE * _rate(cores // 2):
        cores //= 2
    return cores


def _rate(workers: int) -> float:
    """Matrix products of so many threads at once, in stacks per second of CPU time."""
    with ThreadPoolExecutor(workers) as pool:
        seconds = list(pool.map(_stack_seconds, range(PROOF_PIECES * workers)))
    return workers / float(np.median(seconds))


def _stack_seconds(_: int) -> float:
    """CPU time of one stack; Python's lock is not held meanwhile."""
    stack = np.ones(PROOF_SHAPE, np.float32)
    started = time.thread_time()
    np.matmul(stack, stack)
    return time.thread_time() - started


def visible_gpus() -> list[str]:
    """Indices or UUIDs of the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device for device in named.split(",") if device.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def machine_memory() -> float:
    """Bytes of this machine; infinite where the system does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def free_memory(device: str, workers: int) -> float:
    """Bytes that each of so many processes may take; infinite where nobody tells.

    On a GPU, which is one process's alone, that is all of it.
    """
    if device == "cuda":
        import torch

        count = torch.cuda.device_count()
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
        return float(min(sizes, default=0)) or math.inf
    try:
        lines = MEMORY.read_text(encoding="ascii").splitlines()
    except OSError:
        return machine_memory() / max(1, workers)
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * kibibytes[0] / max(1, workers) if kibibytes else math.inf


def lanes_at_once(cell: CellSpec, vocab: int, free: float) -> int:
    """Lanes of one task: as many as pay (``MAX_LANES``), as far as the memory goes."""
    most = MAX_LANES[cell.device]
    if cell.model.module is not None or math.isinf(free):
        return most  # what a user's own model takes, nobody knows
    return min(most, lanes_that_fit(cell, vocab, int(free)))
