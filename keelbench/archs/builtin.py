"""The six architectures of arXiv 2601.19895, Table 1, side by side.

x is the trunk, F the branch (attention or FFN), N an RMSNorm with gain, L the depth in
sub-layers, M = L / 2 the blocks. Equations, initialization and their sources were compared
with the original papers and code; where those disagree, the docstring says which is taken.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from keelbench.archs.rule import Branch, Norms, ResidualRule, Site, is_number, require

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PostLN(ResidualRule):
    """Vaswani et al. 2017. No final norm: the last operation is a norm already."""

    title: ClassVar[str] = "Post-LN"
    equation: ClassVar[str] = "x <- N(x + F(x))"
    source: ClassVar[str] = "Vaswani et al. 2017, arXiv 1706.03762"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("out",)

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        return norms["out"](x + branch(x))


@dataclass(frozen=True)
class PreLN(ResidualRule):
    """Xiong et al. 2020. Plain initialization: outputs are not scaled with depth."""

    title: ClassVar[str] = "Pre-LN"
    equation: ClassVar[str] = "x <- x + F(N(x)); final norm"
    source: ClassVar[str] = "Xiong et al. 2020, arXiv 2002.04745"

    @property
    def final_norm(self) -> bool:
        return True

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("in",)

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        return x + branch(norms["in"](x))


@dataclass(frozen=True)
class DeepNorm(ResidualRule):
    """Wang et al. 2022, decoder-only: alpha = (2M)^(1/4), beta scales v, out and the FFN.

    ``beta=keel`` is L^(-1/4), as arXiv 2601.19895 writes it; ``beta=deepnet`` is the original
    (8M)^(-1/4), smaller by sqrt(2). Either multiplies this package's base std.
    """

    alpha: float | None = None
    beta: float | str = "keel"

    title: ClassVar[str] = "DeepNorm"
    equation: ClassVar[str] = "x <- N(α·x + F(x)), α = L^(1/4)"
    source: ClassVar[str] = "Wang et al. 2022, arXiv 2203.00555"

    def __post_init__(self) -> None:
        is_alpha = self.alpha is None or (is_number(self.alpha) and self.alpha > 0)
        require(is_alpha, "deepnorm", "alpha", self.alpha, "a number > 0")
        is_beta = self.beta in ("keel", "deepnet") or (
            not isinstance(self.beta, str) and is_number(self.beta) and self.beta > 0
        )
        require(is_beta, "deepnorm", "beta", self.beta, "keel, deepnet or a number > 0")

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("out",)

    def alpha_at(self, depth: int) -> float:
        return math.pow(depth, 0.25) if self.alpha is None else self.alpha

    def beta_at(self, depth: int) -> float:
        if isinstance(self.beta, str):
            base = depth if self.beta == "keel" else 4 * depth
            return math.pow(base, -0.25)
        return self.beta

    def gain(self, site: Site, weight: str) -> float:
        return 1.0 if weight in ("q", "k") else self.beta_at(site.depth)

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        return norms["out"](branch(x).add(x, alpha=self.alpha_at(site.depth)))

    def facts(self, depth: int) -> dict[str, str]:
        return {"α": f"{self.alpha_at(depth):.4g}", "β": f"{self.beta_at(depth):.4g}"}


@dataclass(frozen=True)
class HybridNorm(ResidualRule):
    """Zhuo et al. 2025: QKV-norm in attention; in the FFN the trunk itself is normalized.

    The FFN's norm stands before it and replaces the trunk, as in the authors' code, so the
    output is un-normed and a final norm is needed. ``star=true``: block 0 is Pre-LN on top.
    """

    star: bool = False

    title: ClassVar[str] = "HybridNorm"
    equation: ClassVar[str] = (
        "y <- x + A(x) with QKV-norm; z <- N(y); x <- z + F(z); final norm"
    )
    source: ClassVar[str] = "Zhuo et al. 2025, arXiv 2503.04598"

    def __post_init__(self) -> None:
        require(isinstance(self.star, bool), "hybridnorm", "star", self.star, "true or false")

    @property
    def final_norm(self) -> bool:
        return True

    def is_pre(self, site: Site) -> bool:
        return self.star and site.block == 0

    def qkv_norm(self, site: Site) -> bool:
        return site.branch == "attention"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("in",) if site.branch == "ffn" or self.is_pre(site) else ()

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        if self.is_pre(site):
            return x + branch(norms["in"](x))
        z = norms["in"](x) if site.branch == "ffn" else x
        return z + branch(z)


@dataclass(frozen=True)
class MixLN(ResidualRule):
    """Li et al. 2024: the first floor(post_fraction * M) blocks Post-LN, the rest Pre-LN."""

    post_fraction: float = 0.25

    title: ClassVar[str] = "Mix-LN"
    equation: ClassVar[str] = "Post-LN in the first quarter of blocks, then Pre-LN; final norm"
    source: ClassVar[str] = "Li et al. 2024, arXiv 2412.13795"

    def __post_init__(self) -> None:
        is_fraction = is_number(self.post_fraction) and 0 <= self.post_fraction <= 1
        require(is_fraction, "mix_ln", "post_fraction", self.post_fraction, "0 to 1")

    @property
    def final_norm(self) -> bool:
        """None is needed if every block is Post-LN: the last operation is a norm then."""
        return self.post_fraction < 1

    def is_post(self, site: Site) -> bool:
        return site.block < int(self.post_fraction * site.blocks)

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("out",) if self.is_post(site) else ("in",)

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        if self.is_post(site):
            return norms["out"](x + branch(x))
        return x + branch(norms["in"](x))

    def facts(self, depth: int) -> dict[str, str]:
        return {"Post-LN blocks": f"{int(self.post_fraction * (depth // 2))} of {depth // 2}"}


@dataclass(frozen=True)
class Keel(ResidualRule):
    """arXiv 2601.19895: Post-LN with a trunk scaled by alpha and an inner norm.

    alpha = L unless given. ``first_block``: v2 (the paper's second version, default): the
    first attention has no outer norm and no alpha, the first FFN keeps its norm with
    alpha = 1; v1 (the first version): both are plain Pre-LN; none: no exception.
    """

    alpha: float | None = None
    first_block: str = "v2"

    title: ClassVar[str] = "Keel"
    equation: ClassVar[str] = "x <- N(α·x + F(N(x))), α = L"
    source: ClassVar[str] = "arXiv 2601.19895 v2, section 3"

    def __post_init__(self) -> None:
        is_alpha = self.alpha is None or (is_number(self.alpha) and self.alpha > 0)
        require(is_alpha, "keel", "alpha", self.alpha, "a number > 0")
        is_rule = self.first_block in ("v2", "v1", "none")
        require(is_rule, "keel", "first_block", self.first_block, "v2, v1 or none")

    def has_outer_norm(self, site: Site) -> bool:
        return site.index >= {"v2": 1, "v1": 2, "none": 0}[self.first_block]

    def alpha_at(self, site: Site) -> float:
        if self.first_block != "none" and site.block == 0:
            return 1.0
        return float(site.depth) if self.alpha is None else self.alpha

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("in", "out") if self.has_outer_norm(site) else ("in",)

    def step(self, x: "Tensor", branch: Branch, norms: Norms, site: Site) -> "Tensor":
        y = branch(norms["in"](x)).add(x, alpha=self.alpha_at(site))
        return norms["out"](y) if self.has_outer_norm(site) else y

    def facts(self, depth: int) -> dict[str, str]:
        return {"α": f"{self.alpha_at(Site(depth - 1, depth)):.4g}"}
