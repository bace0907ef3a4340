"""The vocabulary of the core's tests: tiny models, tiny cells, and their outcomes."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keelbench.archs import ARCHS, make_rule
from keelbench.errors import KeelbenchError
from keelbench.model import LaneModel
from keelbench.records import Record, Trace
from keelbench.specs import CellSpec, ModelSpec
from keelbench.sweep_spec import make_cell

TESTS = Path(__file__).parent

SIX = ("post_ln", "deepnorm", "hybridnorm", "mix_ln", "pre_ln", "keel")
"""The paper's architectures under their default parameters."""

EVERY_RULE = (
    *SIX,
    "hybridnorm(star=true)",
    "keel(first_block=v1)",
    "keel(first_block=none)",
    "mix_ln(post_fraction=0.5)",
)

ALL_RULES = (*EVERY_RULE, *(name for name in ARCHS.names() if name not in SIX))
"""Whatever is registered, with the variants of the paper's six."""

VOCAB = 19


def shape(arch: str = "keel", **settings: Any) -> ModelSpec:
    """A model small enough to check by brute force, with two query heads per KV head."""
    small = {"depth": 4, "width": 16, "heads": 4, "kv_heads": 2}
    return ModelSpec(arch=arch, **{**small, **settings})


def make_model(
    arch: str = "keel",
    *,
    seeds: Sequence[int] = (0,),
    vocab: int = VOCAB,
    dtype: torch.dtype = torch.float64,
    compute_dtype: torch.dtype | None = None,
    is_fused: bool | None = None,
    **settings: Any,
) -> LaneModel:
    """A tiny model, in float64 unless told otherwise."""
    spec = shape(arch, **settings)
    return LaneModel(
        spec,
        make_rule(arch),
        vocab,
        seeds,
        dtype=dtype,
        compute_dtype=compute_dtype,
        is_fused=is_fused,
    )


def stirred(model: LaneModel, seed: int = 7) -> LaneModel:
    """The same model with every weight moved, so that no gain is 1 and nothing cancels."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        noise = torch.randn(model.flat_SP.shape, generator=generator, dtype=torch.float64)
        model.flat_SP.add_(0.3 * noise.to(model.flat_SP.dtype))
    return model


def random_tokens(
    lanes: int = 1, batch: int = 2, length: int = 9, vocab: int = VOCAB, seed: int = 3
) -> Tensor:
    """Token ids (lanes, batch, length): as windows, ``length`` is one more than the time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (lanes, batch, length), generator=generator)


def random_floats(*shape: int, seed: int = 11, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def losses_and_gradients(model: LaneModel, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Per-lane losses (S,) and the gradient of their sum (S, P)."""
    losses = model.losses(windows)
    (gradient,) = torch.autograd.grad(losses.sum(), model.flat_SP)
    return losses.detach(), gradient


def by_name(model: LaneModel, flat_SP: Tensor) -> dict[str, Tensor]:
    """A flat tensor shaped like the model's storage, cut by name (S, rows, columns)."""
    parts = flat_SP.split([tensor.size for tensor in model.tensors], dim=1)
    return {
        tensor.name: part.view(-1, tensor.rows, tensor.columns)
        for tensor, part in zip(model.tensors, parts, strict=True)
    }


def as_numbers(part: Tensor | None) -> Tensor:
    assert part is not None
    return part.detach().double()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal within ``tolerance`` of the largest expected magnitude."""
    actual, expected = as_numbers(actual), as_numbers(expected)
    assert actual.shape == expected.shape
    scale = expected.abs().max().clamp(min=1e-300)
    worst = ((actual - expected).abs().max() / scale).item()
    assert worst <= tolerance, f"differs by {worst:.2e} of the largest value"


TINY = {
    "depth": 4,
    "width": 16,
    "batch": 2,
    "seq": 16,
    "probe_batch": 2,
    "slope": 1e-3,
    "peak": 2e-2,
}


def tiny_cell(arch: str = "keel", **settings: Any) -> CellSpec:
    """A validated cell whose ramp takes 20 steps of a few milliseconds."""
    return make_cell({"arch": arch, **TINY, **settings})


def numbers(trace: Trace) -> tuple[list[float], ...]:
    """Everything measured in a trace, for bitwise comparison."""
    assert trace.grad_norm is not None and trace.probe is not None
    assert trace.probe_step is not None
    columns = (trace.lr, trace.loss, trace.grad_norm, trace.probe_step, trace.probe)
    return tuple(column.tolist() for column in columns)


def by_seed(records: Sequence[Record] | Iterator[Record]) -> dict[int, Record]:
    return {record.seed: record for record in records}


def refusal(action: Callable[[], Any]) -> str:
    """What the user reads (message and hint) when an action is refused."""
    with pytest.raises(KeelbenchError) as caught:
        action()
    return f"{caught.value.message}\n{caught.value.hint or ''}"


def run_python(code: str, *arguments: str, timeout: float = 60) -> str:
    """Standard output of a fresh interpreter; its failure is the test's failure."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
