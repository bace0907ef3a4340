"""Norms and sub-layers with hand-written backward passes, on the C kernels.

Each function equals the plain expression in its docstring; tests hold them to it in
float64. They serve rules whose arithmetic ``native.trace`` cannot trace.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from keelbench.native import kernels
from keelbench.norms import NORM_EPS


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        x, gain = x.contiguous(), gain.contiguous()
        normed, inverse = kernels.rms_forward(x, gain, NORM_EPS)
        ctx.save_for_backward(x, gain, inverse)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.rms_backward(grad.contiguous(), *ctx.saved_tensors)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * gain``; x (S, N, C), gain (S, 1, C)."""
    result: Tensor = _RmsNorm.apply(x, gain)  # type: ignore[no-untyped-call]
    return result


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        x, gate_up, down = x.contiguous(), gate_up.contiguous(), down.contiguous()
        y, hidden = kernels.ffn_forward(x, gate_up, down)
        ctx.save_for_backward(x, gate_up, down, hidden)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.ffn_backward(grad.contiguous(), *ctx.saved_tensors)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``(silu(x W_gate) * (x W_up)) W_down``; x (S, N, D), weights (S, D, 2F), (S, F, D)."""
    result: Tensor = _SwiGlu.apply(x, gate_up, down)  # type: ignore[no-untyped-call]
    return result


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turn: Tensor, heads: int, kv_heads: int) -> Tensor:
        qkv = qkv.contiguous()
        y, softmax = kernels.attend_forward(qkv, turn, heads, kv_heads)
        ctx.save_for_backward(qkv, turn, y, softmax)
        ctx.kv_heads = kv_heads
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, turn, y, softmax = ctx.saved_tensors
        grad = grad.contiguous()
        grad_qkv = kernels.attend_backward(grad, qkv, turn, y, softmax, ctx.kv_heads)
        return grad_qkv, None, None, None


def attend(qkv: Tensor, turn: Tensor, heads: int, kv_heads: int) -> Tensor:
    """``scaled_dot_product_attention``, causal and grouped, of rotated queries and keys.

    qkv (B, T, heads + 2 kv_heads, K): queries, keys and values before RoPE;
    turn (1, T, 1, K / 2) complex; returns (B, T, heads, K).
    """
    result: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        qkv, turn, heads, kv_heads
    )
    return result
