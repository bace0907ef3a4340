"""The lane-batched causal language model.

Every weight and activation carries a leading lane axis, so several independent runs train
in one pass. Shape suffixes: S lanes, B batch, T time, N = B x T tokens, D width, H query
heads, G KV heads, K head dimension, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from keelbench import fused
from keelbench.archs import ResidualRule, Site
from keelbench.compiled import Block, CompiledBlocks
from keelbench.layout import TensorLayout, layout, parameter_count, qkv_norm_names, sites
from keelbench.native.library import is_available
from keelbench.native.program import Program
from keelbench.native.program import losses as traced_losses
from keelbench.native.trace import UntraceableError, trace
from keelbench.norms import SiteNorms, make_norm, rms_norm
from keelbench.specs import ModelSpec
from keelbench.sublayers import Attention, FeedForward, Rope


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
        is_fused: compute in C (``native``); by default wherever that can be done, on a CPU
            with a compiler and without autocast. False is the plain path, the oracle.
        is_checkpointed: keep each block's input only and compute the block again in the
            backward pass; on the plain path.
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
        is_checkpointed: bool = False,
    ) -> None:
        self.spec = spec.resolved()
        self.rule = rule
        self.vocab = vocab
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype or dtype
        self.tensors = layout(self.spec, rule, vocab)
        self.is_checkpointed = is_checkpointed
        if is_fused is None:
            is_fused = not is_checkpointed and is_available(self.device, self.compute_dtype)
        self.is_fused = is_fused
        self.norm = make_norm(self.spec.norm, fused.rms_norm if self.is_fused else rms_norm)
        self.sites = sites(self.spec.depth)
        self._ropes: dict[int, Rope] = {}
        self._run_block: Block = self._block
        self._programs: dict[tuple[tuple[int, ...], bool], Program | None] = {}
        self._programs_rule = rule
        rows = [initial_weights(self.tensors, seed) for seed in seeds]
        self.flat_SP = torch.stack(rows).to(device=self.device, dtype=dtype)
        self.flat_SP.requires_grad_()

    @property
    def lanes(self) -> int:
        return self.flat_SP.shape[0]

    def keep(self, lanes: Sequence[int]) -> None:
        """Drop every lane but these; the others' weights and losses are not affected."""
        self.flat_SP = self.flat_SP.detach()[list(lanes)].clone().requires_grad_()
        self._programs.clear()

    def weights(self) -> dict[str, Tensor]:
        """Each tensor as a view (S, rows, columns) into the flat storage."""
        parts = self.flat_SP.split([tensor.size for tensor in self.tensors], dim=1)
        return {
            tensor.name: part.view(-1, tensor.rows, tensor.columns)
            for tensor, part in zip(self.tensors, parts, strict=True)
        }

    def losses(self, windows_SBT: Tensor) -> Tensor:
        """Mean cross-entropy per lane, (S,), in nats, of windows (S, B, T + 1)."""
        program = self._program(windows_SBT.shape, torch.is_grad_enabled())
        if program is not None:
            return traced_losses(program, self.flat_SP, windows_SBT)
        logits_SNV = self.logits(windows_SBT[:, :, :-1])
        targets = windows_SBT[:, :, 1:].reshape(-1)
        flat = logits_SNV.flatten(0, 1)
        flat = flat.float() if flat.dtype == torch.bfloat16 else flat
        losses = F.cross_entropy(flat, targets, reduction="none")
        return losses.view(self.lanes, -1).mean(dim=1)

    def train_losses(self, windows_SBT: Tensor) -> Tensor:
        """Losses (S,); leaves the gradient of their sum in ``flat_SP.grad``."""
        program = self._program(windows_SBT.shape, True)
        if program is None:
            losses_S = self.losses(windows_SBT)
            self.flat_SP.grad = None
            losses_S.sum().backward()
            return losses_S.detach()
        if self.flat_SP.grad is None:
            self.flat_SP.grad = torch.zeros_like(self.flat_SP)
        return program.train(self.flat_SP.detach(), windows_SBT, self.flat_SP.grad)

    def _program(self, shape: Sequence[int], is_training: bool) -> Program | None:
        """The model in C for windows of this shape; None on the plain path.

        Traced anew when the rule has been exchanged, as observers of a model do.
        """
        if not self.is_fused:
            return None
        if self._programs_rule is not self.rule:
            self._programs.clear()
            self._programs_rule = self.rule
        key = (tuple(shape), is_training)
        if key not in self._programs:
            self._programs[key] = self._make_program(shape, is_training)
        return self._programs[key]

    def _make_program(self, shape: Sequence[int], is_training: bool) -> Program | None:
        try:
            operations = trace(self.spec, self.rule, is_training=is_training)
        except UntraceableError:
            return None
        turn = self._rope(shape[2] - 1).turn_1T1K
        return Program(
            operations, self.spec, self.tensors, shape, turn, is_training=is_training
        )

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
        for attention, ffn in zip(self.sites[::2], self.sites[1::2], strict=True):
            block = partial(self._run_block, (attention, ffn), weights, seq)
            if self.is_checkpointed and torch.is_grad_enabled():
                state = checkpoint(block, state, use_reentrant=False, preserve_rng_state=False)
            else:
                state = block(state)
        x_SND = self.rule.finish(state, SiteNorms(weights, None, self.rule, self.norm))
        return torch.bmm(x_SND, weights["head"])

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile the plain path, one artefact per kind of block (see ``compiled``)."""
        self._run_block = CompiledBlocks(self._block, self.spec, self.rule, backend)

    def _block(
        self, sites: Sequence[Site], weights: dict[str, Tensor], seq: int, state: Any
    ) -> Any:
        for site in sites:
            branch = self.branch(site, weights, seq)
            norms = SiteNorms(weights, site, self.rule, self.norm)
            state = self.rule.step(state, branch, norms, site)
        return state

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
