"""The sub-layers on plain torch operations: attention, feed-forward and RoPE.

Shape suffixes as in ``model``: S lanes, B batch, T time, N = B x T tokens, D width, F hidden,
K head dimension, E the heads of q, k and v together.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from keelbench import fused
from keelbench.norms import NormFunction, rms_norm

ROPE_THETA = 10_000.0
"""Base of the rotary frequencies (arXiv 2601.19895, Table 8)."""


@dataclass(frozen=True)
class Attention:
    """Causal grouped-query attention with RoPE, (S, N, D) to (S, N, D)."""

    qkv_SDE: Tensor
    out_SED: Tensor
    heads: int
    kv_heads: int
    seq: int
    rope: "Rope"
    qkv_gains: dict[str, Tensor]
    inner_norm: NormFunction | None
    is_fused: bool

    def __call__(self, x_SND: Tensor) -> Tensor:
        lanes, tokens, _ = x_SND.shape
        groups = self.heads + 2 * self.kv_heads
        qkv_SNE = torch.bmm(x_SND, self.qkv_SDE)
        qkv = qkv_SNE.view(lanes * tokens // self.seq, self.seq, groups, -1)
        if self.qkv_gains:
            qkv = self._normed(qkv, lanes)
        if self.is_fused:
            y = fused.attend(qkv, self.rope.turn_1T1K, self.heads, self.kv_heads)
        else:
            y = self._attend(qkv)
        y_SNE = y.reshape(lanes, tokens, -1)
        if self.inner_norm is not None:
            y_SNE = self.inner_norm(y_SNE)
        return torch.bmm(y_SNE, self.out_SED)

    def _attend(self, qkv: Tensor) -> Tensor:
        """(S x B, T, heads of q, k and v, K) to (S x B, T, query heads, K)."""
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        y = F.scaled_dot_product_attention(
            self.rope(q).transpose(1, 2),
            self.rope(k).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return y.transpose(1, 2)

    def _normed(self, qkv: Tensor, lanes: int) -> Tensor:
        """RMSNorm of each head of q, k or v that has a gain; all heads of a kind share it."""
        norm = fused.rms_norm if self.is_fused else rms_norm
        parts = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        normed = [
            norm(part.reshape(lanes, -1, part.shape[-1]), gain).view(part.shape)
            if (gain := self.qkv_gains.get(name)) is not None
            else part
            for name, part in zip("qkv", parts, strict=True)
        ]
        return torch.cat(normed, dim=2)


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU, (S, N, D) to (S, N, D)."""

    gate_up_SDF: Tensor
    down_SFD: Tensor
    inner_norm: NormFunction | None
    is_fused: bool

    def __call__(self, x_SND: Tensor) -> Tensor:
        if self.is_fused and self.inner_norm is None:
            return fused.swiglu(x_SND, self.gate_up_SDF, self.down_SFD)
        gate, up = torch.bmm(x_SND, self.gate_up_SDF).chunk(2, dim=-1)
        h_SNF = F.silu(gate) * up
        if self.inner_norm is not None:
            h_SNF = self.inner_norm(h_SNF)
        return torch.bmm(h_SNF, self.down_SFD)


class Rope:
    """Rotary position embedding of interleaved pairs (Su et al. 2021, arXiv 2104.09864)."""

    def __init__(self, seq: int, head_dim: int, device: torch.device, dtype: torch.dtype):
        frequency = ROPE_THETA ** (
            -torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        )
        angle_TK = torch.outer(torch.arange(seq, dtype=torch.float64), frequency)
        turn = torch.polar(torch.ones_like(angle_TK), angle_TK)[None, :, None, :]
        complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        self.turn_1T1K = turn.to(device=device, dtype=complex_dtype)
        self.turn_1T1K2 = torch.view_as_real(self.turn_1T1K)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate (batch, T, heads, K); products in float32 or wider."""
        wide = x.float() if x.dtype == torch.bfloat16 else x
        if torch.compiler.is_compiling():  # compilers do not generate complex arithmetic
            even, odd = wide[..., 0::2], wide[..., 1::2]
            real, imaginary = self.turn_1T1K2.unbind(-1)
            turned = (even * real - odd * imaginary, even * imaginary + odd * real)
            return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turn_1T1K).flatten(-2).to(x.dtype)
