"""Does the gate see real faults of code? ``python -m benchmarks.gate_faults [--repeats 20]``

Each repeat draws as many fresh seeds as the sweep has, measures a baseline with the code as it
is, and then checks five faulty versions of the code (settings unchanged) and one unchanged
version whose initial weights are nudged by a millionth, as another machine would round them.
Prints how often each was called regressed, and by how much it moved Max LR.
"""

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from keelbench import model, optim
from keelbench.gate import build_baseline, calibrate, plan, run_check, run_repeats
from keelbench.records import Record
from keelbench.specs import CellSpec
from keelbench.store import Store
from keelbench.sweep import run_cells
from keelbench.sweep_spec import load_sweep

RESULTS = Path(__file__).parent / "results" / "gate_faults.json"


def run(cells: Sequence[CellSpec], seeds: Sequence[int]) -> list[Record]:
    """In this process, where the faults are planted, and forgotten afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return run_cells(cells, seeds, Store(folder), workers=0)


def patched_weights(change: Callable[[Any, torch.Tensor], None]) -> Any:
    """Patch the initializer: ``change`` alters each tensor of a lane in place."""
    original = model.initial_weights

    def initial_weights(tensors: Sequence[Any], seed: int) -> torch.Tensor:
        flat = original(tensors, seed)
        parts = flat.split([tensor.size for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            change(tensor, part)
        return flat

    return mock.patch.object(model, "initial_weights", initial_weights)


def patched_optimizer(**changes: Any) -> Any:
    """Patch the optimizer: it takes other values than the settings say."""
    original = optim.LaneOptimizer.__init__

    def init(self: Any, lanes: Any, spec: Any, **options: Any) -> None:
        original(self, lanes, dataclasses.replace(spec, **changes), **options)

    return mock.patch.object(optim.LaneOptimizer, "__init__", init)


def larger_updates() -> Any:
    """Patch the optimizer: every update is 1.5 times too large."""
    original = optim.LaneOptimizer.set_lrs

    def set_lrs(self: Any, lrs: Sequence[float]) -> None:
        original(self, [1.5 * lr for lr in lrs])

    return mock.patch.object(optim.LaneOptimizer, "set_lrs", set_lrs)


def _quadruple(tensor: Any, part: torch.Tensor) -> None:
    if tensor.kind == "matrix":
        part.mul_(4)


def _halve_gains(tensor: Any, part: torch.Tensor) -> None:
    if ".norm_" in tensor.name:
        part.mul_(0.5)


def _nudge(tensor: Any, part: torch.Tensor) -> None:
    part.mul_(1 + 1e-6)


FAULTS: dict[str, Callable[[], Any]] = {
    "unchanged code, nudged by 1e-6": lambda: patched_weights(_nudge),
    "init std x 4": lambda: patched_weights(_quadruple),
    "clipping lost": lambda: patched_optimizer(clip=0.0),
    "norm gains at 0.5": lambda: patched_weights(_halve_gains),
    "updates 1.5 times too large": larger_updates,
    "Adam's beta2 at 0.5": lambda: patched_optimizer(beta2=0.5),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    with FAULTS[name]():
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="Number of the first repeat.")
    parser.add_argument("--sweep", type=Path, default=Path("sweeps/ci.yaml"))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sweep = load_sweep(arguments.sweep)
    cells, count = sweep.cells, len(sweep.seeds)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.faults}
    for repeat in range(arguments.first, arguments.first + arguments.repeats):
        seeds = range(repeat * count, (repeat + 1) * count)
        baseline = build_baseline("faults", run(cells, seeds))
        baseline = baseline.calibrated(calibrate(run_repeats(baseline, run), baseline=baseline))
        for name in arguments.faults:
            with planted(name):
                report = run_check(baseline, cells, run, looks=plan(3, count))
            ratios = [c.ratio.mean for c in report.cells if c.ratio and c.ratio.mean]
            outcome = {
                "verdict": str(report.verdict),
                "exit_code": int(report.exit_code),
                "ratio": float(np.exp(np.mean(np.log(ratios)))) if ratios else None,
                "cells": {c.label: str(c.verdict) for c in report.cells},
            }
            found[name].append(outcome)
            print(f"{repeat + 1:>2} {name:<32} {outcome}", flush=True)
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: one row per version of the code."""
    lines = ["| code | checks | exit 1 | verdicts | Max LR, geometric mean |"]
    lines.append("|---|---|---|---|---|")
    for name, outcomes in found.items():
        verdicts = [outcome["verdict"] for outcome in outcomes]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
        ratios = [outcome["ratio"] for outcome in outcomes if outcome["ratio"]]
        mean = f"x {np.exp(np.mean(np.log(ratios))):.2f}" if ratios else "none"
        failed = sum(outcome["exit_code"] == 1 for outcome in outcomes)
        lines.append(f"| {name} | {len(outcomes)} | {failed} | {counts} | {mean} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
