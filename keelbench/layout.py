"""Every tensor of a model and what it costs, known without building it (no torch).

``keelbench describe`` prints this; the model allocates exactly this.
"""

from dataclasses import dataclass
from typing import Literal

from keelbench.archs import Param, ResidualRule, Site
from keelbench.specs import ModelSpec

Kind = Literal["matrix", "embedding", "vector"]
"""What an optimizer may treat differently: matrices, embeddings and head-free vectors."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A column block of a tensor with its own init: std > 0 is normal, 0 is constant."""

    name: str
    columns: int
    std: float
    constant: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One trainable tensor of one lane, stored row-major: (rows, columns)."""

    name: str
    rows: int
    pieces: tuple[Piece, ...]
    kind: Kind

    @property
    def columns(self) -> int:
        return sum(piece.columns for piece in self.pieces)

    @property
    def size(self) -> int:
        return self.rows * self.columns


def sites(depth: int) -> list[Site]:
    """All sub-layer positions, in order."""
    return [Site(index, depth) for index in range(depth)]


def layout(model: ModelSpec, rule: ResidualRule, vocab: int) -> list[TensorLayout]:
    """Every trainable tensor, in the order of storage: embedding, sites, final norm, head."""
    model = model.resolved()
    assert model.init_std is not None
    tensors = [_matrix("embedding", vocab, [("embedding", model.width, model.embed_std)])]
    tensors[0] = TensorLayout("embedding", vocab, tensors[0].pieces, "embedding")
    for site in sites(model.depth):
        tensors += _site_tensors(model, rule, site)
    if rule.final_norm:
        tensors += _norm("final", model, model.width)
    tensors.append(_matrix("head", model.width, [("head", vocab, model.init_std)]))
    return tensors


def _site_tensors(model: ModelSpec, rule: ResidualRule, site: Site) -> list[TensorLayout]:
    assert model.heads and model.kv_heads and model.hidden and model.init_std
    head_dim = model.width // model.heads
    prefix = f"{site.index}.{site.branch}"

    def columns(*named: tuple[str, int]) -> list[tuple[str, int, float]]:
        std = model.init_std or 0.0
        return [(name, count, std * rule.gain(site, name)) for name, count in named]

    if site.branch == "attention":
        q, kv = model.width, model.kv_heads * head_dim
        tensors = [
            _matrix(f"{prefix}.qkv", model.width, columns(("q", q), ("k", kv), ("v", kv))),
            _matrix(f"{prefix}.out", q, columns(("out", model.width))),
        ]
        inner = q
    else:
        gate_up = columns(("gate", model.hidden), ("up", model.hidden))
        tensors = [
            _matrix(f"{prefix}.gate_up", model.width, gate_up),
            _matrix(f"{prefix}.down", model.hidden, columns(("down", model.width))),
        ]
        inner = model.hidden
    if rule.inner_norm(site):
        tensors += _norm(f"{prefix}.inner_norm", model, inner)
    if site.branch == "attention":
        for name in qkv_norm_names(model, rule, site):
            tensors.append(_gain(f"{prefix}.{name}_norm", head_dim))
    for slot in rule.norm_slots(site):
        tensors += _norm(f"{prefix}.norm_{slot}", model, model.width)
    for slot, param in rule.param_slots(site).items():
        if param.scope == "site" or site.branch == "attention":
            tensors.append(_param(param_name(site, slot, param), model, param))
    return tensors


def qkv_norm_names(model: ModelSpec, rule: ResidualRule, site: Site) -> tuple[str, ...]:
    """Which of q, k, v are normalized per head at this site."""
    if rule.qkv_norm(site):
        return ("q", "k", "v")
    return ("q", "k") if model.qk_norm else ()


def param_name(site: Site, slot: str, param: Param) -> str:
    """Where a rule's parameter is stored; block-scoped ones live at the block's attention."""
    index = 2 * site.block if param.scope == "block" else site.index
    return f"{index}.rule.{slot}"


def _matrix(name: str, rows: int, columns: list[tuple[str, int, float]]) -> TensorLayout:
    pieces = tuple(Piece(piece, count, std) for piece, count, std in columns)
    return TensorLayout(name, rows, pieces, "matrix")


def _norm(name: str, model: ModelSpec, size: int) -> list[TensorLayout]:
    if model.norm != "dyt":
        return [_gain(name, size)]
    alpha = TensorLayout(f"{name}.alpha", 1, (Piece("alpha", 1, 0.0, DYT_ALPHA),), "vector")
    return [_gain(name, size), alpha]


def _gain(name: str, size: int) -> TensorLayout:
    return TensorLayout(name, 1, (Piece("gain", size, 0.0, 1.0),), "vector")


DYT_ALPHA = 0.5
"""Initial input scale of Dynamic Tanh (Zhu et al. 2025, arXiv 2503.10622)."""


def _param(name: str, model: ModelSpec, param: Param) -> TensorLayout:
    if param.shape == "matrix":
        return _matrix(name, model.width, [("matrix", model.width, model.init_std or 0.0)])
    size = 1 if param.shape == "scalar" else model.width
    return TensorLayout(name, 1, (Piece("param", size, 0.0, param.init),), "vector")


def parameter_count(tensors: list[TensorLayout]) -> int:
    return sum(tensor.size for tensor in tensors)


def flops_per_token(model: ModelSpec, tensors: list[TensorLayout], seq: int) -> int:
    """Training FLOPs per token: 6 per matrix weight, plus attention's two products.

    A causal query sees (seq + 1) / 2 keys on average; scores and weighted sum take 2 FLOPs
    per key and channel each, and the backward pass twice the forward's.
    """
    matrices = sum(tensor.size for tensor in tensors if tensor.kind == "matrix")
    attention = 3 * 2 * 2 * model.blocks * model.width * (seq + 1) // 2
    return 6 * matrices + attention
