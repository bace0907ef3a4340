"""The lane-batched causal language model.

Every weight and activation carries a leading lane axis, so several independent runs train
in one pass. Shape suffixes: S lanes, B batch, T time, N = B x T tokens, D width, H query
heads, G KV heads, K head dimension, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from keelbench import fused
from keelbench.archs import ResidualRule, Site
from keelbench.layout import TensorLayout, layout, parameter_count, qkv_norm_names, sites
from keelbench.norms import NormFunction, SiteNorms, make_norm, rms_norm
from keelbench.specs import ModelSpec

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
        # Each of q, k, v: (S x B, T, heads, K)
        q, k, v = self._heads(x_SND).split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self.qkv_gains:
            q, k, v = (self._normed(n, t, lanes) for n, t in (("q", q), ("k", k), ("v", v)))
            q, k = self.rope(q), self.rope(k)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        y_SNE = y.transpose(1, 2).reshape(lanes, tokens, -1)
        if self.inner_norm is not None:
            y_SNE = self.inner_norm(y_SNE)
        return torch.bmm(y_SNE, self.out_SED)

    def _heads(self, x_SND: Tensor) -> Tensor:
        """All heads, (S x B, T, heads of q, k and v, K), turned unless norms come first."""
        rotated = self.heads + self.kv_heads
        if self.is_fused and not self.qkv_gains:
            turn = self.rope.turn_1T1K
            return fused.rotated_qkv(x_SND, self.qkv_SDE, turn, self.seq, rotated)
        groups = self.heads + 2 * self.kv_heads
        qkv = torch.bmm(x_SND, self.qkv_SDE)
        qkv = qkv.view(x_SND.shape[0] * (x_SND.shape[1] // self.seq), self.seq, groups, -1)
        if self.qkv_gains:
            return qkv
        return torch.cat((self.rope(qkv[:, :, :rotated]), qkv[:, :, rotated:]), dim=2)

    def _normed(self, name: str, heads: Tensor, lanes: int) -> Tensor:
        if name not in self.qkv_gains:
            return heads
        gain = self.qkv_gains[name]
        norm = fused.rms_norm if self.is_fused else rms_norm
        return norm(heads.reshape(lanes, -1, gain.shape[-1]), gain).view(heads.shape)


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

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate (batch, T, heads, K); products in float32 or wider."""
        wide = x.float() if x.dtype == torch.bfloat16 else x
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turn_1T1K).flatten(-2).to(x.dtype)


class LaneModel:
    """Several independent models of one shape, one per lane, with their weights in one tensor.

    Args:
        spec: the shape; every lane shares it.
        rule: the residual rule.
        vocab: size of the vocabulary.
        seeds: one per lane; a lane's weights are a function of its seed and tensor names only.
        device: where the weights live.
        dtype: float32, or float64 for tests.
        compute_dtype: precision of matrix products (bfloat16 runs under autocast).
        is_fused: use the hand-written backward passes of ``fused``; by default wherever
            matrix products are not under autocast. False is the plain path, the oracle.
    """

    def __init__(
        self,
        spec: ModelSpec,
        rule: ResidualRule,
        vocab: int,
        seeds: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        is_fused: bool | None = None,
    ) -> None:
        self.spec = spec.resolved()
        self.rule = rule
        self.vocab = vocab
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype or dtype
        self.tensors = layout(self.spec, rule, vocab)
        is_autocast = self.compute_dtype == torch.bfloat16
        self.is_fused = not is_autocast if is_fused is None else is_fused
        self.norm = make_norm(self.spec.norm, fused.rms_norm if self.is_fused else rms_norm)
        self.sites = sites(self.spec.depth)
        self._ropes: dict[int, Rope] = {}
        rows = [initial_weights(self.tensors, seed) for seed in seeds]
        self.flat_SP = torch.stack(rows).to(device=self.device, dtype=dtype)
        self.flat_SP.requires_grad_()

    @property
    def lanes(self) -> int:
        return self.flat_SP.shape[0]

    def keep(self, lanes: Sequence[int]) -> None:
        """Drop every lane but these; the others' weights and losses are not affected."""
        self.flat_SP = self.flat_SP.detach()[list(lanes)].clone().requires_grad_()

    def weights(self) -> dict[str, Tensor]:
        """Each tensor as a view (S, rows, columns) into the flat storage."""
        parts = self.flat_SP.split([tensor.size for tensor in self.tensors], dim=1)
        return {
            tensor.name: part.view(-1, tensor.rows, tensor.columns)
            for tensor, part in zip(self.tensors, parts, strict=True)
        }

    def losses(self, windows_SBT: Tensor) -> Tensor:
        """Mean cross-entropy per lane, (S,), in nats, of windows (S, B, T + 1)."""
        logits_SNV = self.logits(windows_SBT[:, :, :-1])
        targets = windows_SBT[:, :, 1:].reshape(-1)
        flat = logits_SNV.flatten(0, 1)
        flat = flat.float() if flat.dtype == torch.bfloat16 else flat
        losses = F.cross_entropy(flat, targets, reduction="none")
        return losses.view(self.lanes, -1).mean(dim=1)

    def logits(self, tokens_SBT: Tensor) -> Tensor:
        """Next-token logits, (S, B x T, V)."""
        autocast = torch.autocast(
            self.device.type,
            dtype=torch.bfloat16,
            enabled=self.compute_dtype == torch.bfloat16,
            cache_enabled=False,
        )
        with autocast:
            return self._logits(tokens_SBT)

    def _logits(self, tokens_SBT: Tensor) -> Tensor:
        weights = self.weights()
        lanes, _, seq = tokens_SBT.shape
        tokens_SN = tokens_SBT.reshape(lanes, -1)
        lane_S1 = torch.arange(lanes, device=self.device)[:, None]
        x_SND = weights["embedding"][lane_S1, tokens_SN]
        state = self.rule.start(x_SND)
        for site in self.sites:
            branch = self.branch(site, weights, seq)
            norms = SiteNorms(weights, site, self.rule, self.norm)
            state = self.rule.step(state, branch, norms, site)
        x_SND = self.rule.finish(state, SiteNorms(weights, None, self.rule, self.norm))
        return torch.bmm(x_SND, weights["head"])

    def branch(
        self, site: Site, weights: dict[str, Tensor], seq: int
    ) -> Attention | FeedForward:
        """The sub-layer at a site, with its weights."""
        prefix = f"{site.index}.{site.branch}"
        inner = None
        if self.rule.inner_norm(site):
            inner = self.norm(weights, f"{prefix}.inner_norm")
        if site.branch == "ffn":
            gate_up, down = weights[f"{prefix}.gate_up"], weights[f"{prefix}.down"]
            return FeedForward(gate_up, down, inner, self.is_fused)
        names = qkv_norm_names(self.spec, self.rule, site)
        assert self.spec.heads and self.spec.kv_heads
        return Attention(
            weights[f"{prefix}.qkv"],
            weights[f"{prefix}.out"],
            self.spec.heads,
            self.spec.kv_heads,
            seq,
            self._rope(seq),
            {name: weights[f"{prefix}.{name}_norm"] for name in names},
            inner,
            self.is_fused,
        )

    def _rope(self, seq: int) -> Rope:
        if seq not in self._ropes:
            assert self.spec.heads
            head_dim = self.spec.width // self.spec.heads
            self._ropes[seq] = Rope(seq, head_dim, self.device, self.flat_SP.dtype)
        return self._ropes[seq]

    @property
    def parameters_per_lane(self) -> int:
        return parameter_count(self.tensors)


def initial_weights(tensors: Sequence[TensorLayout], seed: int) -> Tensor:
    """One lane's weights, (P,), float32.

    Each tensor draws from a generator of its own, seeded by (seed, name): two rules that
    share a tensor share its draw, so architectures are compared from paired starts, and
    the draw does not depend on device or lanes.
    """
    parts = []
    for tensor in tensors:
        digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        matrix = torch.empty(tensor.rows, tensor.columns)
        if tensor.kind != "vector":
            matrix.normal_(generator=generator)
        for piece, columns in zip(
            tensor.pieces,
            matrix.split([piece.columns for piece in tensor.pieces], dim=1),
            strict=True,
        ):
            columns.mul_(piece.std) if tensor.kind != "vector" else columns.fill_(
                piece.constant
            )
        parts.append(matrix.flatten())
    return torch.cat(parts)
