"""Runs a traced model: losses of all lanes, and their gradients, in one call each."""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from keelbench.layout import TensorLayout
from keelbench.native.kernels import softmax_size
from keelbench.native.library import library
from keelbench.native.plan import Plan, make_plan
from keelbench.native.trace import Operation
from keelbench.norms import NORM_EPS
from keelbench.specs import ModelSpec

LARGE_PAGE = 2 * 2**20


class Sizes(ctypes.Structure):
    """The struct ``Sizes`` of the C source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("S", "B", "T", "D", "H", "G", "K", "F", "V")),
        ("lane", ctypes.c_int64),
        ("eps", ctypes.c_double),
    )


class Program:
    """A model's operations for one shape of windows.

    Args:
        operations: the traced model.
        spec: resolved.
        tensors: the layout of a lane's weights.
        windows: shape (S, B, T + 1) of what it will be given.
        turn: the rotary factors, (1, T, 1, K / 2) complex.
        is_training: whether gradients will be asked for.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        spec: ModelSpec,
        tensors: Sequence[TensorLayout],
        windows: Sequence[int],
        turn: Tensor,
        *,
        is_training: bool,
    ) -> None:
        lanes, batch, seq = windows[0], windows[1], windows[2] - 1
        assert spec.heads and spec.kv_heads and spec.hidden
        vocab, head_dim = tensors[0].rows, spec.width // spec.heads
        stride = sum(tensor.size for tensor in tensors)
        self._sizes = Sizes(
            lanes, batch, seq, spec.width, spec.heads, spec.kv_heads, head_dim, spec.hidden,
            vocab, stride, NORM_EPS,
        )  # fmt: skip
        self._turn = turn
        rows = lanes * batch * seq
        groups = spec.heads + 2 * spec.kv_heads
        kept = {
            "norm": [rows],
            "ffn": [rows * 2 * spec.hidden],
            "attention": [
                rows * groups * head_dim,
                rows * spec.width,
                lanes * batch * softmax_size(spec.heads, seq),
            ],
            "head": [rows * vocab],
        }
        self.plan: Plan = make_plan(
            operations, offsets(tensors), rows * spec.width, kept, is_training=is_training
        )
        self._arena: Tensor | None = None
        self.runs = 0
        """How often it ran forward: what lies in the arena belongs to the last time."""

    def forward(self, flat_SP: Tensor, windows_SBT: Tensor) -> Tensor:
        """Losses (S,).

        Raises:
            IndexError: for a token outside the vocabulary.
        """
        if int(windows_SBT.min()) < 0 or int(windows_SBT.max()) >= self._sizes.V:
            raise IndexError(f"token ids must lie in [0, {self._sizes.V})")
        if self._arena is None:
            self._arena = large_pages(self.plan.size, flat_SP.dtype)
        self.runs += 1
        losses = flat_SP.new_empty(flat_SP.shape[0])
        self._run("run_forward", self.plan.forward, flat_SP, windows_SBT, (losses,))
        return losses

    def backward(
        self, flat_SP: Tensor, windows_SBT: Tensor, scales_S: Tensor, grads_SP: Tensor
    ) -> None:
        """Write the gradients of the last forward pass's losses, each times its scale."""
        outputs = (scales_S, grads_SP)
        self._run("run_backward", self.plan.backward, flat_SP, windows_SBT, outputs)

    def train(self, flat_SP: Tensor, windows_SBT: Tensor, grads_SP: Tensor) -> Tensor:
        """Losses (S,); the gradients of their sum replace ``grads_SP``."""
        losses_S = self.forward(flat_SP, windows_SBT)
        self.backward(flat_SP, windows_SBT, torch.ones_like(losses_S), grads_SP)
        return losses_S

    def _run(
        self, name: str, table: Any, flat_SP: Tensor, windows: Tensor, more: Sequence[Tensor]
    ) -> None:
        assert self._arena is not None
        tensors = (flat_SP, self._arena, windows, self._turn, *more)
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert windows.dtype == torch.int64
        pointers = [tensor.data_ptr() for tensor in tensors]
        run = getattr(library(flat_SP.dtype), name)
        if run(table.ctypes.data, len(table), ctypes.addressof(self._sizes), *pointers):
            raise MemoryError("no memory for the scratch space of the C kernels")


class _Losses(Function):
    @staticmethod
    def forward(ctx: Any, flat_SP: Tensor, program: Program, windows_SBT: Tensor) -> Tensor:
        losses = program.forward(flat_SP, windows_SBT)
        ctx.save_for_backward(flat_SP, windows_SBT)
        ctx.program, ctx.run = program, program.runs
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None, None]:
        flat_SP, windows_SBT = ctx.saved_tensors
        if ctx.run != ctx.program.runs:
            ctx.program.forward(flat_SP, windows_SBT)
        # The head's gradient is scaled in place: another backward pass must compute it anew.
        ctx.run = -1
        grads_SP = torch.zeros_like(flat_SP)
        ctx.program.backward(flat_SP, windows_SBT, grad_S.contiguous(), grads_SP)
        return grads_SP, None, None


def losses(program: Program, flat_SP: Tensor, windows_SBT: Tensor) -> Tensor:
    """Losses (S,) that autograd can differentiate with respect to the flat weights."""
    result: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
        flat_SP, program, windows_SBT.contiguous()
    )
    return result


def large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros, in pages of 2 MB where the system has them.

    A step walks through its whole arena twice; with pages of 4 kB it would spend a tenth
    of its time on looking up addresses.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype)
    size = count * torch.empty((), dtype=dtype).element_size()
    memory = mmap.mmap(-1, max(LARGE_PAGE, -(-size // LARGE_PAGE) * LARGE_PAGE))
    with contextlib.suppress(OSError):  # a system without them: ordinary pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count)


def offsets(tensors: Sequence[TensorLayout]) -> dict[str, int]:
    """Where each tensor starts in a lane."""
    starts, at = {}, 0
    for tensor in tensors:
        starts[tensor.name] = at
        at += tensor.size
    return starts
