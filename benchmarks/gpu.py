"""`make bench-gpu`: the same comparison on one GPU. Nothing is measured without one.

keelbench's captured step with all lanes at once, against (b) the plain eager loop, one seed
after another, both in bfloat16 with float32 weights; and peak memory against the estimate.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import CAPACITY, LR, Shape
from benchmarks.run import RESULTS
from keelbench.archs import make_rule
from keelbench.data import open_source
from keelbench.engine import Engine
from keelbench.memory import estimate_memory, lanes_that_fit
from keelbench.model import LaneModel
from keelbench.specs import CellSpec

SHAPES = (
    Shape(64, 64, 8, 64, 4),
    Shape(512, 32, 2, 64, 8),
    Shape(64, 256, 16, 256, 8),
    Shape(512, 256, 16, 256, 8),
    Shape(512, 1024, 4, 1024, 1),
)
ROUNDS = 5


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device; none is here, nothing measured")
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shapes": [measure(shape) for shape in SHAPES],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(shape: Shape) -> dict[str, Any]:
    """Both contenders in turns, on one device."""
    cell = shape.cell(device="cuda", dtype="bfloat16")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = Engine(cell, range(shape.lanes), CAPACITY)
    ours = _timed(lambda n: engine.advance(np.full((n, shape.lanes), LR)), shape.lanes)
    ours(8)
    peak = torch.cuda.max_memory_allocated() - before
    eager = _timed(_eager(cell), 1)
    eager(2)
    steps = max(4, min(200, int(ours(8) / shape.lanes * 2)))
    rounds = [(ours(steps), eager(max(2, steps // 4))) for _ in range(ROUNDS)]
    found = {
        "shape": shape.name,
        "lane_steps_per_second": statistics.median(row[0] for row in rounds),
        "eager_lane_steps_per_second": statistics.median(row[1] for row in rounds),
        "advantage": statistics.median(row[0] / row[1] for row in rounds),
        "peak_bytes": peak,
        "estimated_bytes": estimate_memory(
            cell, 128, shape.lanes, is_checkpointed=engine.model.is_checkpointed
        ),
        "is_checkpointed": engine.model.is_checkpointed,
        "lanes_that_fit": lanes_that_fit(cell, 128, torch.cuda.mem_get_info()[1]),
        "notes": engine.notes,
    }
    print(json.dumps(found), flush=True)
    return found


def _timed(run: Callable[[int], None], lanes: int) -> Callable[[int], float]:
    """Lane-steps per second of so many steps."""

    def timed(steps: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run(steps)
        torch.cuda.synchronize()
        return steps * lanes / (time.perf_counter() - started)

    return timed


def _eager(cell: CellSpec) -> Callable[[int], None]:
    source = open_source(cell.data)
    model = LaneModel(
        cell.model,
        make_rule(cell.model.arch),
        source.vocab,
        [0],
        device="cuda",
        compute_dtype=torch.bfloat16,
        is_fused=False,
        is_checkpointed=cell.model.width >= 1024,
    )
    optimizer = torch.optim.AdamW([model.flat_SP], lr=LR, betas=(0.9, 0.95), fused=True)

    def run(steps: int) -> None:
        for step in range(steps):
            windows = source.batch(0, step, cell.data.batch, cell.data.seq)
            model.train_losses(torch.from_numpy(windows)[None].cuda())
            torch.nn.utils.clip_grad_norm_([model.flat_SP], 1.0)
            optimizer.step()

    return run


if __name__ == "__main__":
    main()
