"""What was asked: frozen, validated inputs with a content hash.

YAML is only a serialisation of these. Fields that are ``None`` are filled by
``CellSpec.resolved``; a resolved cell holds every number that can change a result, and its
hash is what records are stored under.
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Self

from keelbench.parsing import build_dataclass, content_hash, raise_problems
from keelbench.registry import Registry, did_you_mean

PAPER_WIDTH = 1024
"""Width of the models in arXiv 2601.19895, Table 8: the width that LRs are normalized to."""

PAPER_SLOPE = 1e-5
"""LR per step of the paper's ramp: 5e-2 over 5,000 warm-up steps (section 5.1)."""

PAPER_PEAK = 5e-2
"""LR at which the paper's ramp ends (section 5.1)."""

INIT_STD_TIMES_SQRT_WIDTH = 0.64
"""Equals the paper's std of 0.02 at width 1024; docs/protocol.md says why it follows width."""

HEAD_DIM = 16
"""Head dimension below width 256; from there on 16 heads, as in the paper's Table 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only language model. Depth counts sub-layers: blocks = depth / 2."""

    arch: str = "keel"
    """Name of the residual rule, with parameters: ``mix_ln(post_fraction=0.25)``."""
    depth: int = 64
    """Sub-layers: attention and FFN counted separately, as in the paper. Even."""
    width: int = 64
    heads: int | None = None
    """Query heads; by default width / 16, between 2 and 16."""
    kv_heads: int | None = None
    """Key and value heads; by default half of the query heads."""
    hidden: int | None = None
    """SwiGLU hidden size; by default 3 x width."""
    norm: str = "rmsnorm"
    """Normalization: rmsnorm (gain only), layernorm (gain only) or dyt."""
    qk_norm: bool = False
    """RMSNorm per head on queries and keys, before RoPE, for every rule."""
    init_std: float | None = None
    """Std of matrices and head; by default 0.64 / sqrt(width)."""
    embed_std: float = 0.02
    """Std of embeddings, at every width: their RMS does not depend on it."""
    module: str | None = None
    """A model of one's own: ``pkg.module:build`` or ``file.py:build``; arch names it only."""

    @property
    def blocks(self) -> int:
        return self.depth // 2

    def resolved(self) -> "ModelSpec":
        """The same model with every default written out."""
        heads = max(2, min(16, self.width // HEAD_DIM)) if self.heads is None else self.heads
        defaults = {
            "heads": heads,
            "kv_heads": max(1, heads // 2),
            "hidden": 3 * self.width,
            "init_std": INIT_STD_TIMES_SQRT_WIDTH / self.width**0.5,
        }
        missing = {
            name: value for name, value in defaults.items() if getattr(self, name) is None
        }
        return dataclasses.replace(self, **missing)

    def problems(self) -> list[str]:
        """Everything wrong with this spec, one sentence each, without building a model."""
        found = []
        if self.depth < 2 or self.depth % 2:
            found.append(
                f"model.depth is {self.depth}: it counts sub-layers (attention and FFN), "
                "so it must be even and at least 2"
            )
        if self.width < 4:
            found.append(f"model.width is {self.width}: it must be at least 4")
            return found
        model = self.resolved()
        heads, kv_heads = model.heads or 0, model.kv_heads or 0
        if heads < 1 or self.width % max(heads, 1):
            found.append(
                f"model.width {self.width} is not divisible by model.heads {heads}: "
                "each head takes width / heads"
            )
        elif (self.width // heads) % 2:
            found.append(
                f"model.width {self.width} / model.heads {heads} is odd: RoPE rotates "
                "pairs, so the head dimension must be even"
            )
        if kv_heads < 1 or heads % max(kv_heads, 1):
            found.append(
                f"model.heads {heads} is not divisible by model.kv_heads {kv_heads}: "
                "each KV head serves an equal group of query heads"
            )
        if (model.hidden or 0) < 1:
            found.append(f"model.hidden is {self.hidden}: it must be at least 1")
        if self.norm not in NORMS:
            near = did_you_mean(self.norm, NORMS)
            found.append(f"model.norm is '{self.norm}'{near}: allowed are {', '.join(NORMS)}")
        for name, value in (("init_std", model.init_std), ("embed_std", self.embed_std)):
            if value is None or not 0 < value < float("inf"):
                found.append(f"model.{name} is {value}: it must be a positive number")
        return found


NORMS = ("rmsnorm", "layernorm", "dyt")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Where tokens come from, how many a step takes, and the fixed probe batch."""

    source: str = "kjv"
    """kjv, words, markov, text:PATH, words:PATH, tokens:PATH, hf:NAME or task:NAME."""
    batch: int = 8
    """Sequences per step and lane."""
    seq: int = 64
    """Tokens per sequence."""
    probe_batch: int = 8
    """Held-out sequences in the probe: the same ones every time."""
    probe_every: int = 4
    """Steps between two probes."""
    vocab: int | None = None
    """Vocabulary size; by default what the source knows."""

    def problems(self) -> list[str]:
        found = []
        for name, least in (("batch", 1), ("seq", 2), ("probe_batch", 1), ("probe_every", 1)):
            value = getattr(self, name)
            if value < least:
                found.append(f"data.{name} is {value}: it must be at least {least}")
        return found


OPTIMIZERS = Registry("optimizer", "keelbench.optimizers")
for _name in ("adamw", "sgd", "muon"):
    OPTIMIZERS.register(_name, f"keelbench.optim:{_name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSpec:
    """AdamW with decoupled weight decay and clipping by global norm, per lane."""

    name: str = "adamw"
    """adamw, sgd, muon or ``pkg.module:factory``."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    lr_scaling: str = "none"
    """none: one LR for all; mup: vectors and embeddings at LR x width / 1024."""

    def problems(self) -> list[str]:
        found = []
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"optim.{name} is {getattr(self, name)}: it must lie in [0, 1)")
        for name in ("eps", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                found.append(f"optim.{name} is {getattr(self, name)}: it must be >= 0")
        if ":" not in self.name and self.name not in OPTIMIZERS.names():
            near = did_you_mean(self.name, OPTIMIZERS.names())
            known = ", ".join(OPTIMIZERS.names())
            found.append(
                f"optim.name is '{self.name}'{near}: allowed are {known} or pkg.module:factory"
            )
        if self.lr_scaling not in ("none", "mup"):
            found.append(f"optim.lr_scaling is '{self.lr_scaling}': allowed are none, mup")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RampSpec:
    """The learning-rate ramp and the question that is put to it."""

    slope: float | None = None
    """LR per step; by default 1e-5 x 1024 / width: normalized LRs rise as in the paper."""
    peak: float | None = None
    """LR at which the ramp ends; by default 5e-2 x 1024 / width: the paper's 5,000 steps."""
    protocol: str = "ramp"
    """ramp: LR rises until the run breaks; hold: the largest LR that is sustained."""
    hold_steps: int = 200
    """Steps at constant LR in the hold protocol."""
    hold_resolution: float = 0.05
    """Relative width to which the hold protocol narrows the answer down."""
    lr_multiplier: float = 1.0
    """Scales the LR that the optimizer sees; 0 freezes the model (a test of the detector)."""

    def resolved(self, width: int) -> "RampSpec":
        scale = PAPER_WIDTH / width
        return dataclasses.replace(
            self,
            slope=self.slope if self.slope is not None else PAPER_SLOPE * scale,
            peak=self.peak if self.peak is not None else PAPER_PEAK * scale,
        )

    @property
    def steps(self) -> int:
        """Number of steps from 0 to the peak, the step at the peak included."""
        assert self.slope is not None and self.peak is not None
        return round(self.peak / self.slope)

    def problems(self) -> list[str]:
        found = []
        for name in ("slope", "peak"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                found.append(f"ramp.{name} is {value}: it must be a positive LR")
        if not found and self.slope and self.peak and self.peak < self.slope:
            found.append(
                f"ramp.peak {self.peak:g} lies below the first step's LR {self.slope:g}: "
                "raise the peak or lower the slope"
            )
        if self.protocol not in PROTOCOLS:
            near = did_you_mean(self.protocol, PROTOCOLS)
            found.append(
                f"ramp.protocol is '{self.protocol}'{near}: allowed are {', '.join(PROTOCOLS)}"
            )
        if self.hold_steps < 16:
            found.append(f"ramp.hold_steps is {self.hold_steps}: it must be at least 16")
        if not 0.005 <= self.hold_resolution <= 0.5:
            found.append(
                f"ramp.hold_resolution is {self.hold_resolution}: it must lie in [0.005, 0.5]"
            )
        if not 0 <= self.lr_multiplier < float("inf"):
            found.append(f"ramp.lr_multiplier is {self.lr_multiplier}: it must be >= 0")
        return found


PROTOCOLS = ("ramp", "hold")
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSpec:
    """One (architecture, shape, data, optimizer, precision, protocol): seeds share it."""

    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    ramp: RampSpec = field(default_factory=RampSpec)
    device: str = "cpu"
    """cpu or cuda: the class of device, since it can change the number."""
    dtype: str = "float32"
    """Precision of matrix products; weights, optimizer, norms and trunk stay in float32."""
    threads: int = 1
    """CPU threads of one run. A part of the cell, since it can change the last bits."""

    def resolved(self) -> "CellSpec":
        """The same cell with every default written out: what is hashed and stored."""
        return dataclasses.replace(
            self, model=self.model.resolved(), ramp=self.ramp.resolved(self.model.width)
        )

    def problems(self) -> list[str]:
        found = [
            *self.model.problems(),
            *self.data.problems(),
            *self.optim.problems(),
            *self.ramp.problems(),
        ]
        if self.threads < 1:
            found.append(f"threads is {self.threads}: it must be at least 1")
        for name, allowed in (("device", DEVICES), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                found.append(
                    f"{name} is '{getattr(self, name)}': allowed are {', '.join(allowed)}"
                )
        return found

    def validated(self) -> "CellSpec":
        """Resolved, or an error that lists every problem at once.

        Raises:
            KeelbenchError: if any field is out of range or fields contradict each other.
        """
        raise_problems(self.problems())
        return self.resolved()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read nested plain values; unknown keys and wrong types are all reported at once."""
        problems: list[str] = []
        cell = build_dataclass(cls, values, "", problems)
        raise_problems(problems)
        assert isinstance(cell, cls)
        return cell

    def replaced(self, overrides: dict[str, Any]) -> "CellSpec":
        """A copy with dotted fields replaced: ``{"ramp.slope": 2e-5}``."""
        values = self.to_dict()
        problems = [
            problem
            for key, value in overrides.items()
            if (problem := _set_dotted(values, key, value))
        ]
        raise_problems(problems)
        return CellSpec.from_dict(values)

    @property
    def hash(self) -> str:
        """Hash of the resolved cell: 12 hex digits."""
        return content_hash(self.resolved().to_dict())


FIELD_NAMES = tuple(
    f"{outer.name}.{inner.name}" if inner else outer.name
    for outer in dataclasses.fields(CellSpec)
    for inner in (
        dataclasses.fields(typing.get_type_hints(CellSpec)[outer.name])
        if dataclasses.is_dataclass(typing.get_type_hints(CellSpec)[outer.name])
        else (None,)
    )
)
"""Every dotted field of a cell, such as ``model.width``."""


def find_field(key: str) -> str | None:
    """The dotted name for ``ramp.slope`` or, where only one fits, for ``slope``."""
    if key in FIELD_NAMES:
        return key
    matches = [name for name in FIELD_NAMES if name.rpartition(".")[2] == key]
    return matches[0] if len(matches) == 1 else None


def _set_dotted(values: dict[str, Any], key: str, value: Any) -> str | None:
    name = find_field(key)
    if name is None:
        last_parts = [field_name.rpartition(".")[2] for field_name in FIELD_NAMES]
        near = did_you_mean(key, [*FIELD_NAMES, *last_parts])
        return f"unknown setting '{key}'{near}: settings are {', '.join(FIELD_NAMES)}"
    outer, _, inner = name.rpartition(".")
    target = values[outer] if outer else values
    target[inner] = value
    return None
