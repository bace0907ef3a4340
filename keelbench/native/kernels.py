"""The C kernels on tensors: contiguous, on the CPU, float32 or float64."""

import torch
from torch import Tensor

from keelbench.native.library import library

STRIP = 16
"""Queries at a time in attention; the same number as in the source."""


def rms_forward(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / sqrt(mean(x^2) + eps) * gain, 1 / sqrt(...)); x (S, N, C), gain (S, 1, C)."""
    out, inverse = torch.empty_like(x), x.new_empty(*x.shape[:2], 1)
    pointers = _pointers(x, gain, out, inverse)
    library(x.dtype).rms_forward(*pointers, *x.shape, x.shape[2], eps)
    return out, inverse


def rms_backward(
    grad: Tensor, x: Tensor, gain: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and gain."""
    grads = (torch.empty_like(x), torch.zeros_like(gain))
    pointers = _pointers(grad, x, gain, inverse, *grads)
    library(x.dtype).rms_backward(*pointers, *x.shape, x.shape[2], False)
    return grads


def ffn_forward(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """((silu(x gate) * (x up)) down, x gate_up)."""
    hidden, y = x.new_empty(*x.shape[:2], gate_up.shape[2]), torch.empty_like(x)
    sizes = (*x.shape, down.shape[1], gate_up[0].numel(), down[0].numel())
    _call("ffn_forward", (x, gate_up, down, hidden, y), sizes)
    return y, hidden


def ffn_backward(
    grad: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate_up and down."""
    grads = (torch.empty_like(x), torch.empty_like(gate_up), torch.empty_like(down))
    sizes = (*x.shape, down.shape[1], gate_up[0].numel(), down[0].numel(), False, False)
    _call("ffn_backward", (grad, x, gate_up, down, hidden, *grads), sizes)
    return grads


def attend_forward(
    qkv: Tensor, turn: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Causal attention under RoPE of qkv (B, T, heads + 2 kv_heads, K); y (B, T, heads, K).

    turn (1, T, 1, K / 2) complex. The second result is for the backward pass.
    """
    batch, seq, _, head_dim = qkv.shape
    y = qkv.new_empty(batch, seq, heads, head_dim)
    softmax = qkv.new_empty(batch * softmax_size(heads, seq))
    sizes = (batch, seq, heads, kv_heads, head_dim)
    _call("attend_forward", (qkv, turn, y, softmax), sizes)
    return y, softmax


def attend_backward(
    grad: Tensor, qkv: Tensor, turn: Tensor, y: Tensor, softmax: Tensor, kv_heads: int
) -> Tensor:
    """Gradient of qkv."""
    batch, seq, heads, head_dim = y.shape
    grad_qkv = torch.empty_like(qkv)
    sizes = (batch, seq, heads, kv_heads, head_dim)
    _call("attend_backward", (grad, qkv, turn, y, softmax, grad_qkv), sizes)
    return grad_qkv


def softmax_size(heads: int, seq: int) -> int:
    """Numbers that attention keeps per sequence."""
    return heads * 2 * -(-seq // STRIP) * STRIP


def _pointers(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _call(name: str, tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> None:
    if getattr(library(tensors[0].dtype), name)(*_pointers(*tensors), *sizes):
        raise MemoryError(f"no memory for the scratch space of {name}")
