"""The experiment: raise the learning rate step by step until the run breaks.

The LR of step t (from 0) is slope x (t + 1), so the first step is already applied and the
last one is the peak. A lane ends when its verdict cannot change any more, and then costs
nothing; the others go on until the peak.
"""

import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import torch
from numpy.typing import NDArray

import keelbench
from keelbench.divergence import DETECTOR_VERSION, judge
from keelbench.engine import Engine
from keelbench.foreign import open_engine
from keelbench.native.library import describe as describe_kernels
from keelbench.records import Environment, Record, Trace, Verdict, max_lr_of
from keelbench.specs import CellSpec

CHUNK = 16
"""Steps between two looks at the losses: a late look costs at most this many steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run is; sent after every chunk of steps."""

    step: int
    lr: float
    loss: float
    """Mean train loss (nats) of the lanes that are still running."""
    running: int
    lanes: int
    seconds: float


def run_ramp(
    cell: CellSpec,
    seeds: Sequence[int],
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[Record]:
    """Ramp every seed of a cell at once; yields a record as each lane ends.

    Args:
        cell: a validated cell with the ramp protocol.
        seeds: one lane each.
        on_progress: called after every chunk of steps.
    """
    started = time.perf_counter()
    steps = cell.ramp.steps
    engine = open_engine(cell, seeds, steps)
    environment = describe_environment(cell)
    while engine.lanes:
        lrs = ramp_lrs(cell, engine.steps, min(engine.steps + CHUNK, steps))
        engine.advance(np.tile(lrs[:, None], engine.lanes))
        seconds = time.perf_counter() - started
        has_ended = engine.steps == steps
        verdicts = [judge(trace, ended=has_ended) for trace in traces(engine)]
        on_progress(_progress(engine, verdicts, len(seeds), seconds))
        for seed, trace, verdict in zip(engine.seeds, traces(engine), verdicts, strict=True):
            if verdict is not None:
                yield make_record(cell, seed, trace, verdict, seconds, environment)
        running = [lane for lane, verdict in enumerate(verdicts) if verdict is None]
        if len(running) < engine.lanes:
            engine.keep(running)


def ramp_lrs(cell: CellSpec, start: int, stop: int) -> NDArray[np.float64]:
    """Learning rates of steps start to stop - 1."""
    assert cell.ramp.slope is not None
    steps: NDArray[np.float64] = np.arange(start + 1, stop + 1, dtype=np.float64)
    return cell.ramp.slope * steps


def traces(engine: Engine) -> list[Trace]:
    """What each lane has shown so far."""
    losses, norms = engine.losses(), engine.grad_norms()
    probe_steps, probes = engine.probes()
    lrs = ramp_lrs(engine.cell, 0, engine.steps)
    return [
        Trace(
            lr=lrs,
            loss=losses[:, lane],
            grad_norm=norms[:, lane],
            probe_step=probe_steps,
            probe=probes[:, lane],
            unigram_entropy=engine.unigram_entropy,
        )
        for lane in range(engine.lanes)
    ]


def make_record(
    cell: CellSpec,
    seed: int,
    trace: Trace,
    verdict: Verdict,
    seconds: float,
    environment: Environment,
) -> Record:
    """The record of a lane that has ended."""
    return Record(
        cell=cell.resolved(),
        seed=seed,
        detector=DETECTOR_VERSION,
        verdict=verdict,
        max_lr=max_lr_of(trace, verdict),
        trace=trace,
        seconds=round(seconds, 3),
        environment=environment,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def describe_environment(cell: CellSpec) -> Environment:
    """Where a run takes place: whatever may explain a difference."""
    is_cuda = cell.device == "cuda"
    return Environment(
        keelbench=keelbench.__version__,
        torch=torch.__version__,
        python=sys.version.split()[0],
        platform=f"{platform.system()}-{platform.machine()}",
        device_name=torch.cuda.get_device_name() if is_cuda else cpu_name(),
        threads=torch.get_num_threads(),
        detector=DETECTOR_VERSION,
        deterministic=not is_cuda,
        extra={
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "kernels": describe_kernels(cell.device, cell.dtype),
        },
    )


def cpu_name() -> str:
    """The processor's model name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _progress(
    engine: Engine, verdicts: Sequence[Verdict | None], lanes: int, seconds: float
) -> Progress:
    running = [lane for lane, verdict in enumerate(verdicts) if verdict is None]
    last = engine.losses()[-1]
    shown = last[running] if running else last
    return Progress(
        step=engine.steps,
        lr=float(ramp_lrs(engine.cell, engine.steps - 1, engine.steps)[0]),
        loss=float(np.mean(shown)),
        running=len(running),
        lanes=lanes,
        seconds=seconds,
    )
