"""The memory estimate against what autograd keeps and what the C step reserves."""

from dataclasses import replace

import pytest
import torch

from keelbench.archs import make_rule
from keelbench.memory import (
    estimate_memory,
    lanes_that_fit,
    saved_bytes,
    should_checkpoint,
)
from keelbench.model import LaneModel
from keelbench.specs import CellSpec, DataSpec, ModelSpec

SIX = ("post_ln", "deepnorm", "hybridnorm", "mix_ln", "pre_ln", "keel")
VOCAB = 96
ALLOWED = 0.10
"""Relative error that the estimate is meant to keep."""


def cell(arch: str, dtype: str = "float32", device: str = "cpu", **model: int) -> CellSpec:
    shape = {"depth": 8, "width": 64} | model
    spec = ModelSpec(arch=arch, **shape)
    return CellSpec(model=spec, data=DataSpec(batch=4, seq=32), dtype=dtype, device=device)


def make(spec: CellSpec, lanes: int, **more: bool) -> LaneModel:
    half = torch.bfloat16 if spec.dtype == "bfloat16" else None
    rule = make_rule(spec.model.arch)
    return LaneModel(spec.model, rule, VOCAB, list(range(lanes)), compute_dtype=half, **more)


def tokens(spec: CellSpec, lanes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (lanes, spec.data.batch, spec.data.seq + 1)
    return torch.randint(0, VOCAB, shape, generator=generator)


def kept_by_autograd(model: LaneModel, windows: torch.Tensor) -> int:
    """Bytes of every storage that a forward pass saves, weights excluded."""
    weights = model.flat_SP.untyped_storage().data_ptr()
    storages: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.losses(windows)
    storages.pop(weights, None)
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", SIX)
def test_the_estimate_is_what_autograd_keeps(arch: str, dtype: str, lanes: int) -> None:
    spec = cell(arch, dtype)
    measured = kept_by_autograd(make(spec, lanes, is_fused=False), tokens(spec, lanes))
    # As on a GPU: there, float32 takes the plain path too.
    estimated = saved_bytes(replace(spec, device="cuda"), VOCAB, lanes)
    assert estimated == pytest.approx(measured, rel=ALLOWED)


@pytest.mark.parametrize("arch", SIX)
def test_the_estimate_is_what_the_c_step_reserves(arch: str) -> None:
    spec = cell(arch, depth=32)
    model = make(spec, 2)
    program = model._program(tokens(spec, 2).shape, True)
    if program is None:
        pytest.skip("no C kernels on this machine")
    assert saved_bytes(spec, VOCAB, 2) == pytest.approx(4 * program.plan.size, rel=ALLOWED)


@pytest.mark.parametrize("arch", ["keel", "pre_ln"])
def test_the_estimate_with_checkpointing(arch: str) -> None:
    spec = replace(cell(arch, depth=16), device="cuda")
    model = make(spec, 1, is_fused=False, is_checkpointed=True)
    windows = tokens(spec, 1)
    at_rest = kept_by_autograd(model, windows)
    one_block = kept_by_autograd(make(cell(arch, depth=4), 1, is_fused=False), windows)
    one_block -= kept_by_autograd(make(cell(arch, depth=2), 1, is_fused=False), windows)
    estimated = saved_bytes(spec, VOCAB, 1, is_checkpointed=True)
    assert estimated == pytest.approx(at_rest + one_block, rel=ALLOWED)


def test_checkpointing_changes_no_number() -> None:
    spec = cell("keel")
    outcomes = []
    for is_checkpointed in (False, True):
        model = make(spec, 2, is_fused=False, is_checkpointed=is_checkpointed)
        losses = model.train_losses(tokens(spec, 2))
        assert model.flat_SP.grad is not None
        outcomes.append((losses, model.flat_SP.grad))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_very_deep_models_of_width_64_train_in_8_gib() -> None:
    for depth in (1024, 2048):
        spec = CellSpec(model=ModelSpec(depth=depth, width=64))
        assert estimate_memory(spec, 128, 1) < 8 * 2**30


def test_the_3b_model_of_the_paper_fits_one_80_gb_gpu_with_checkpointing() -> None:
    spec = CellSpec(
        model=ModelSpec(depth=512, width=1024, hidden=3072),
        data=DataSpec(batch=4, seq=1024),
        device="cuda",
        dtype="bfloat16",
    )
    assert estimate_memory(spec, 32_000, 1, is_checkpointed=True) < 80e9
    assert should_checkpoint(spec, 32_000, 1, free=80 * 10**9)


def test_more_lanes_take_more_memory_and_as_many_are_chosen_as_fit() -> None:
    spec = cell("keel", device="cuda")
    sizes = [estimate_memory(spec, VOCAB, lanes) for lanes in (1, 2, 3)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert lanes_that_fit(spec, VOCAB, free=0) == 1
    lanes = lanes_that_fit(spec, VOCAB, free=20 * sizes[0])
    assert 15 <= lanes <= 20
    assert not should_checkpoint(spec, VOCAB, lanes, free=20 * sizes[0])
