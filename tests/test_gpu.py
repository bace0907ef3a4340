"""What only a CUDA device can show: `pytest -m gpu`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from keelbench.archs import make_rule
from keelbench.engine import Engine
from keelbench.memory import estimate_memory
from keelbench.model import LaneModel
from keelbench.specs import CellSpec, DataSpec, ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIX = ("post_ln", "deepnorm", "hybridnorm", "mix_ln", "pre_ln", "keel")
STEPS = 12


def cell(arch: str = "keel", dtype: str = "float32", **shape: int) -> CellSpec:
    model = ModelSpec(arch=arch, **({"depth": 8, "width": 64} | shape))
    data = DataSpec(batch=4, seq=64)
    return CellSpec(model=model, data=data, device="cuda", dtype=dtype).validated()


def trained(spec: CellSpec, seeds: list[int], steps: int = STEPS) -> Engine:
    engine = Engine(spec, seeds, steps)
    engine.advance(np.full((steps, len(seeds)), 1e-3))
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", SIX)
def test_a_captured_run_equals_the_same_run_on_the_cpu(arch: str, dtype: str) -> None:
    engine = trained(cell(arch, dtype), [0, 1])
    assert engine.notes == []
    plain = trained(replace(cell(arch), device="cpu"), [0, 1])
    allowed = 5e-3 if dtype == "float32" else 5e-2
    assert np.abs(engine.losses() - plain.losses()).max() < allowed
    assert engine.losses().shape == (STEPS, 2) and (engine.grad_norms() > 0).all()


def test_a_captured_run_equals_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = trained(cell(), [0, 1])
    monkeypatch.setattr("keelbench.cuda_graph.WARM_UP", 10**9)
    eager = trained(cell(), [0, 1])
    assert np.allclose(captured.losses(), eager.losses(), rtol=0, atol=1e-3)


def test_a_diverged_lane_does_not_touch_its_neighbour() -> None:
    engines = [Engine(cell(), seeds, STEPS) for seeds in ([0, 1], [0])]
    for engine in engines:
        lrs = np.full((STEPS, engine.lanes), 1e-3)
        lrs[:, 1:] = 1e6
        engine.advance(lrs)
    assert not np.isfinite(engines[0].losses()[-1, 1]) or engines[0].losses()[-1, 1] > 10
    assert np.allclose(engines[0].losses()[:, 0], engines[1].losses()[:, 0], atol=1e-3)


def test_dropping_lanes_captures_anew_and_goes_on() -> None:
    engine = Engine(cell(), [0, 1, 2], 2 * STEPS)
    engine.advance(np.full((STEPS, 3), 1e-3))
    engine.keep([2])
    engine.advance(np.full((STEPS, 1), 1e-3))
    assert engine.notes == []
    alone = trained(cell(), [2], 2 * STEPS)
    assert np.allclose(engine.losses()[:, 0], alone.losses()[:, 0], atol=5e-3)


def test_no_step_waits_for_the_device() -> None:
    engine = trained(cell(), [0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        windows = torch.zeros(1, 4, 65, dtype=torch.int64, device="cuda")
        engine._run_train(windows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.isfinite(engine.losses()).all()


def test_memory_stays_flat_over_many_steps() -> None:
    engine = Engine(cell(depth=4), [0, 1], 10_000)
    engine.advance(np.full((100, 2), 1e-5))
    before = torch.cuda.memory_allocated()
    engine.advance(np.full((2_000, 2), 1e-5))
    # The probe's losses are all that grows: a few bytes per probe.
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_memory_estimate_holds_at_the_peak(is_checkpointed: bool) -> None:
    spec = replace(
        cell(dtype="bfloat16", depth=32, width=256), data=DataSpec(batch=16, seq=256)
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = LaneModel(
        spec.model,
        make_rule("keel"),
        128,
        [0],
        device="cuda",
        compute_dtype=torch.bfloat16,
        is_checkpointed=is_checkpointed,
    )
    optimizer = torch.optim.AdamW([model.flat_SP], fused=True)
    for _ in range(2):
        model.train_losses(torch.zeros(1, 16, 257, dtype=torch.int64, device="cuda"))
        optimizer.step()
    measured = torch.cuda.max_memory_allocated() - before
    estimated = estimate_memory(spec, 128, 1, is_checkpointed=is_checkpointed)
    assert estimated == pytest.approx(measured, rel=0.10)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_are_captured_too() -> None:
    engine = Engine(cell(dtype="bfloat16"), [0, 1], STEPS)
    engine.model.compile_blocks()
    engine.advance(np.full((STEPS, 2), 1e-3))
    assert engine.notes == [] and np.isfinite(engine.losses()).all()
