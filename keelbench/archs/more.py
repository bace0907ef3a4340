"""Further architectures: the ablation chain of Keel, and rules that others proposed.

x is the trunk, F the branch (attention or FFN), N an RMSNorm with gain, L the depth in
sub-layers, b the index of the block from 0. Each docstring says where the equation was
verified; ``streams`` holds the rules whose state is more than one trunk.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from keelbench.archs.builtin import Keel
from keelbench.archs.rule import Branch, Norms, Param, ResidualRule, Site, is_number, require

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeelNaive(Keel):
    """Section 4.2, first step: the scaled trunk alone, without DeepNorm's initialization.

    The paper does not say what the ablations do in the first block; here it is Keel's rule,
    so that neighbours in the chain differ in one thing.
    """

    title: ClassVar[str] = "Keel without inner norm"
    equation: ClassVar[str] = "x <- N(α·x + F(x)), α = L"
    source: ClassVar[str] = "arXiv 2601.19895 v2, section 4.2"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("out",) if self.has_outer_norm(site) else ()

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        y = branch(x).add(x, alpha=self.alpha_at(site))
        return norms["out"](y) if self.has_outer_norm(site) else y


@dataclass(frozen=True)
class KeelBeta(KeelNaive):
    """Section 4.2, second step: a trainable vector β (init 1) scales the branch's input."""

    title: ClassVar[str] = "Keel with β"
    equation: ClassVar[str] = "x <- N(α·x + F(β·x)), α = L, β trainable"

    def param_slots(self, site: Site) -> dict[str, Param]:
        return {"beta": Param("vector", init=1.0)}

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        y = branch(norms.param("beta") * x).add(x, alpha=self.alpha_at(site))
        return norms["out"](y) if self.has_outer_norm(site) else y


@dataclass(frozen=True)
class KeelNormBeta(Keel):
    """Section 4.2, third step: β after an inner norm.

    Keel with the inner gain g·β computes the same, which is why Keel has no β.
    """

    title: ClassVar[str] = "Keel with norm and β"
    equation: ClassVar[str] = "x <- N(α·x + F(β·N(x))), α = L, β trainable"
    source: ClassVar[str] = "arXiv 2601.19895 v2, section 4.2"

    def param_slots(self, site: Site) -> dict[str, Param]:
        return {"beta": Param("vector", init=1.0)}

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        u = norms.param("beta") * norms["in"](x)
        y = branch(u).add(x, alpha=self.alpha_at(site))
        return norms["out"](y) if self.has_outer_norm(site) else y


class FinalNormRule(ResidualRule):
    """A rule whose trunk is not normalized at its end."""

    @property
    def final_norm(self) -> bool:
        return True


@dataclass(frozen=True)
class Highway(FinalNormRule):
    """A trainable gate decides, per channel and token, between carrying and transforming.

    ``bias`` starts the gate: negative values carry. The gate costs width x width per site.
    """

    bias: float = -2.0

    title: ClassVar[str] = "Highway"
    equation: ClassVar[str] = "u = N(x); T = σ(W·u + b); x <- (1 - T)·x + T·F(u); final norm"
    source: ClassVar[str] = "Srivastava et al. 2015, arXiv 1505.00387"

    def __post_init__(self) -> None:
        require(is_number(self.bias), "highway", "bias", self.bias, "a number")

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("in",)

    def param_slots(self, site: Site) -> dict[str, Param]:
        return {"gate": Param("matrix"), "gate_bias": Param("vector", init=self.bias)}

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        u = norms["in"](x)
        gate = (u @ norms.param("gate") + norms.param("gate_bias")).sigmoid()
        return x + gate * (branch(u) - x)


@dataclass(frozen=True)
class ResNet(FinalNormRule):
    """Identity shortcut, no norm at any site; only the head's input is normalized."""

    title: ClassVar[str] = "ResNet"
    equation: ClassVar[str] = "x <- x + F(x); final norm"
    source: ClassVar[str] = "He et al. 2016, arXiv 1512.03385"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ()

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        return x + branch(x)


@dataclass(frozen=True)
class Sandwich(FinalNormRule):
    """Sandwich-LN, also Peri-LN: a norm on either side of the branch, none on the trunk."""

    title: ClassVar[str] = "Sandwich-LN"
    equation: ClassVar[str] = "x <- x + N(F(N(x))); final norm"
    source: ClassVar[str] = "Ding et al. 2021, arXiv 2105.13290; Peri-LN, arXiv 2502.02732"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("in", "branch")

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        return x + norms["branch"](branch(norms["in"](x)))


@dataclass(frozen=True)
class Reordered(FinalNormRule):
    """OLMo 2: the norm stands behind the branch. Its authors add QK-norm (``qk_norm``)."""

    title: ClassVar[str] = "Reordered norm"
    equation: ClassVar[str] = "x <- x + N(F(x)); final norm"
    source: ClassVar[str] = "OLMo 2, arXiv 2501.00656"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("branch",)

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        return x + norms["branch"](branch(x))


@dataclass(frozen=True)
class LayerNormScaling(FinalNormRule):
    """Pre-LN whose norms are scaled by a fixed 1/sqrt(b + 1), as in the authors' code."""

    title: ClassVar[str] = "LayerNorm Scaling"
    equation: ClassVar[str] = "x <- x + F(N(x) / sqrt(b + 1)); final norm"
    source: ClassVar[str] = "Sun et al. 2025, arXiv 2502.05795"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("in",)

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        return x + branch(norms["in"](x) * (site.block + 1) ** -0.5)


@dataclass(frozen=True)
class ReZero(FinalNormRule):
    """A trainable scalar a (init 0) per block opens its branches; no norm at any site.

    Attention and FFN of a block share the scalar. The original has no norm at all; the final
    norm is this package's, since a language model's head needs a bounded input.
    """

    title: ClassVar[str] = "ReZero"
    equation: ClassVar[str] = "x <- x + a·F(x), a = 0 at first; final norm"
    source: ClassVar[str] = "Bachlechner et al. 2020, arXiv 2003.04887"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ()

    def param_slots(self, site: Site) -> dict[str, Param]:
        return {"a": Param("scalar", init=0.0, scope="block")}

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        return x + norms.param("a") * branch(x)


@dataclass(frozen=True)
class SubLN(FinalNormRule):
    """Magneto: Pre-LN with a second norm before each sub-layer's output matrix.

    v, out and the FFN's matrices start sqrt(ln L) times larger, as in torchscale; with
    SwiGLU, fc1 is read as gate and up.
    """

    title: ClassVar[str] = "Sub-LN"
    equation: ClassVar[str] = "x <- x + W·N(F'(N(x))), F' without its output matrix W"
    source: ClassVar[str] = "Wang et al. 2022, arXiv 2210.06423"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("in",)

    def inner_norm(self, site: Site) -> bool:
        return True

    def gain(self, site: Site, weight: str) -> float:
        return 1.0 if weight in ("q", "k") else math.sqrt(math.log(site.depth))

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        return x + branch(norms["in"](x))

    def facts(self, depth: int) -> dict[str, str]:
        return {"γ": f"{math.sqrt(math.log(depth)):.4g}"}
