"""What an architecture may decide: the residual rule around a sub-layer.

A rule owns no parameters and reads no configuration, environment or global. It is
arithmetic on the tensors that it is handed, so this package never imports torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from keelbench.errors import KeelbenchError

if TYPE_CHECKING:
    from torch import Tensor

Branch = Callable[["Tensor"], "Tensor"]
"""The sub-layer itself (attention or FFN): (lanes, tokens, width) to the same shape."""


@dataclass(frozen=True, slots=True)
class Site:
    """One sub-layer position: ``index`` runs from 0 (attention) to ``depth`` - 1 (FFN)."""

    index: int
    depth: int

    @property
    def branch(self) -> Literal["attention", "ffn"]:
        return "ffn" if self.index % 2 else "attention"

    @property
    def block(self) -> int:
        return self.index // 2

    @property
    def blocks(self) -> int:
        return self.depth // 2


@dataclass(frozen=True, slots=True)
class Param:
    """A trainable tensor of a rule beyond its norms' gains.

    ``shape``: scalar, vector (width) or matrix (width x width, normal init with the model's
    std; the others start at ``init``). ``scope``: one per site, or shared by a block.
    """

    shape: Literal["scalar", "vector", "matrix"]
    init: float = 0.0
    scope: Literal["site", "block"] = "site"


class Norms(Protocol):
    """The norms and parameters of one site, as the model hands them to a rule."""

    def __getitem__(self, slot: str) -> Branch:
        """The norm of this slot: RMS over the width, times a trainable gain."""

    def param(self, slot: str) -> "Tensor":
        """A trainable parameter, shaped to broadcast over (lanes, tokens, width)."""


@dataclass(frozen=True)
class ResidualRule(ABC):
    """An architecture, seen as what happens around each sub-layer.

    Subclasses are frozen dataclasses: their fields are the parameters that a user may give
    in the name, as in ``mix_ln(post_fraction=0.25)``.
    """

    title: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    """One line of text; x trunk, F branch, N norm."""
    source: ClassVar[str] = ""

    @property
    def final_norm(self) -> bool:
        """True if a norm stands between the last sub-layer and the head."""
        return False

    def qkv_norm(self, site: Site) -> bool:
        """True if queries, keys and values are normalized per head, before RoPE."""
        return False

    def inner_norm(self, site: Site) -> bool:
        """True if the branch normalizes its hidden activations before its output matrix."""
        return False

    @abstractmethod
    def norm_slots(self, site: Site) -> tuple[str, ...]:
        """Names of the norms that this site needs; the model makes their gains."""

    def param_slots(self, site: Site) -> dict[str, Param]:
        """Further trainable parameters of this site."""
        return {}

    def gain(self, site: Site, weight: str) -> float:
        """Init multiplier for a weight of kind q, k, v, out, gate, up or down."""
        return 1.0

    def start(self, x: "Tensor") -> Any:
        """The state before the first site, from the embeddings (lanes, tokens, width)."""
        return x

    @abstractmethod
    def step(self, state: Any, branch: Branch, norms: Norms, site: Site) -> Any:
        """The state after one site."""

    def finish(self, state: Any, norms: Norms) -> "Tensor":
        """What the head reads, (lanes, tokens, width)."""
        return norms["final"](state) if self.final_norm else state

    def facts(self, depth: int) -> dict[str, str]:
        """Numbers that this rule derives from the depth, for ``keelbench describe``."""
        return {}


def require(condition: bool, rule: str, name: str, value: Any, allowed: str) -> None:
    """Raise the error that every rule uses for a parameter out of range."""
    if not condition:
        raise KeelbenchError(f"{rule}: {name} is {value!r}: allowed is {allowed}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
