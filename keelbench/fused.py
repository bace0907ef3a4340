"""The three hot spots of a step with hand-written backward passes.

Each function equals the plain expression in its docstring; tests hold them to it in
float64. What they save is memory traffic: fewer intermediates are kept for the backward
pass, halves are written in place instead of concatenated, and buffers are reused while warm.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from keelbench.norms import NORM_EPS


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse.div_(x.shape[-1]).add_(NORM_EPS).rsqrt_()
        ctx.save_for_backward(x, gain, inverse)
        normed: Tensor = x * inverse
        return normed.mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gain, inverse = ctx.saved_tensors
        normed = x * inverse
        along = grad * normed
        grad_gain = along.sum(dim=1, keepdim=True)
        projection = along.mul_(gain).mean(dim=-1, keepdim=True)
        return (grad * gain).sub_(normed.mul_(projection)).mul_(inverse), grad_gain


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * gain``; x (S, N, C), gain (S, 1, C)."""
    result: Tensor = _RmsNorm.apply(x, gain)  # type: ignore[no-untyped-call]
    return result


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.bmm(x, gate_up)
        gate, up = hidden.chunk(2, dim=-1)
        ctx.save_for_backward(x, gate_up, down, hidden)
        return torch.bmm(torch.nn.functional.silu(gate).mul_(up), down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gate_up, down, hidden = ctx.saved_tensors
        gate, up = hidden.chunk(2, dim=-1)
        grad_hidden = torch.empty_like(hidden)
        grad_gate, grad_up = grad_hidden.chunk(2, dim=-1)
        grad_product = torch.bmm(grad, down.transpose(1, 2))
        activated = torch.nn.functional.silu(gate)
        torch.mul(grad_product, activated, out=grad_up)
        grad_down = torch.bmm(activated.mul_(up).transpose(1, 2), grad)
        torch.ops.aten.silu_backward.grad_input(
            grad_product.mul_(up), gate, grad_input=grad_gate
        )
        grad_x = torch.bmm(grad_hidden, gate_up.transpose(1, 2))
        return grad_x, torch.bmm(x.transpose(1, 2), grad_hidden), grad_down


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``(silu(x W_gate) * (x W_up)) W_down``; x (S, N, D), weights (S, D, 2F), (S, F, D)."""
    result: Tensor = _SwiGlu.apply(x, gate_up, down)  # type: ignore[no-untyped-call]
    return result


class _RotatedQkv(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, qkv: Tensor, turn: Tensor, seq: int, rotated: int
    ) -> Tensor:
        heads = torch.bmm(x, qkv).view(-1, seq, *_head_shape(qkv, turn))
        _pairs(heads, rotated).mul_(turn)
        ctx.save_for_backward(x, qkv, turn)
        ctx.rotated = rotated
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, qkv, turn = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)
        _pairs(grad, ctx.rotated).mul_(turn.conj())
        grad = grad.view(x.shape[0], x.shape[1], -1)
        grad_x = torch.bmm(grad, qkv.transpose(1, 2))
        return grad_x, torch.bmm(x.transpose(1, 2), grad), None, None, None


def rotated_qkv(x: Tensor, qkv: Tensor, turn: Tensor, seq: int, rotated: int) -> Tensor:
    """Queries, keys and values of every head, the first ``rotated`` heads under RoPE.

    x (S, N, D), qkv (S, D, heads x K), turn (1, T, 1, K / 2) complex; returns
    (S x B, T, heads, K).
    """
    result: Tensor = _RotatedQkv.apply(  # type: ignore[no-untyped-call]
        x, qkv, turn, seq, rotated
    )
    return result


def _head_shape(qkv: Tensor, turn: Tensor) -> tuple[int, int]:
    head_dim = 2 * turn.shape[-1]
    return qkv.shape[-1] // head_dim, head_dim


def _pairs(heads: Tensor, rotated: int) -> Tensor:
    """The heads that RoPE turns, as complex numbers (a view)."""
    return torch.view_as_complex(heads[:, :, :rotated].unflatten(-1, (-1, 2)))
