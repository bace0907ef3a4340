"""Architectures whose state is more than one trunk."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from keelbench.archs.more import FinalNormRule
from keelbench.archs.rule import Branch, Norms, Param, Site, is_number, require

if TYPE_CHECKING:
    from torch import Tensor

Pair = tuple["Tensor", "Tensor"]

MOST_STREAMS = 16
"""Mixing costs n^2 scalars per site; the paper goes to 8."""


@dataclass(frozen=True)
class ResiDual(FinalNormRule):
    """A Post-LN stream x feeds the branches; r sums them up and joins at the end.

    As in microsoft/ResiDual with both of its scales at their default of 1.
    """

    title: ClassVar[str] = "ResiDual"
    equation: ClassVar[str] = "o = F(x); r <- r + o; x <- N(x + o); output x + N(r)"
    source: ClassVar[str] = "Xie et al. 2023, arXiv 2304.14802"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("out",)

    def start(self, x: "Tensor") -> Pair:
        return x, x

    def step(self, state: Pair, branch: Branch, norms: Norms, site: Site) -> Pair:
        x, r = state
        out = branch(x)
        return norms["out"](x + out), r + out

    def finish(self, state: Pair, norms: Norms) -> "Tensor":
        x, r = state
        return x + norms["final"](r)


@dataclass(frozen=True)
class Siamese(FinalNormRule):
    """SiameseNorm: a Post-LN-like stream x and a Pre-LN-like stream y share every branch.

    As in the authors' code (Qwen-Applications/SiameseNorm @46b6bf4, DeiT): x is normalized
    when a site reads it, the branch's input is normalized once more, and its output enters x
    divided by c = sqrt(2(b + 1)). After the last site x and y are normalized, summed, and
    normalized again. The authors' language models put HybridNorm into x instead.
    """

    title: ClassVar[str] = "SiameseNorm"
    equation: ClassVar[str] = (
        "x <- N(x); o = F(N(x + N(y))); x <- x + o/c; y <- y + o; output N(N(x) + N(y))"
    )
    source: ClassVar[str] = "Li et al. 2026, arXiv 2602.08064"

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        slots = ("x", "y", "in")
        return (*slots, "end_x", "end_y") if site.index == site.depth - 1 else slots

    def start(self, x: "Tensor") -> Pair:
        return x, x

    def step(self, state: Pair, branch: Branch, norms: Norms, site: Site) -> Pair:
        x, y = norms["x"](state[0]), state[1]
        out = branch(norms["in"](x + norms["y"](y)))
        x, y = x + out * (2 * (site.block + 1)) ** -0.5, y + out
        if site.index == site.depth - 1:
            return norms["end_x"](x), norms["end_y"](y)
        return x, y

    def finish(self, state: Pair, norms: Norms) -> "Tensor":
        return norms["final"](state[0] + state[1])


@dataclass(frozen=True)
class HyperConnections(FinalNormRule):
    """Static hyper-connections: n trunks, and trainable weights that read, write and mix them.

    The branch reads Σ read_i·h_i, and h_i <- write_i·F + Σ_j mix_ij·h_j. At first the l-th
    site reads trunk l mod n, writes to all, and mix is the identity, so that all trunks equal
    Pre-LN's; the head reads their sum (the paper's appendices I and J).
    """

    n: int = 4

    title: ClassVar[str] = "Hyper-connections"
    equation: ClassVar[str] = "h_i <- write_i·F(N(Σ read_j·h_j)) + Σ mix_ij·h_j; final norm"
    source: ClassVar[str] = "Zhu et al. 2024, arXiv 2409.19606"

    def __post_init__(self) -> None:
        is_whole = isinstance(self.n, int) and is_number(self.n)
        is_count = is_whole and 1 <= self.n <= MOST_STREAMS
        allowed = f"a whole number, 1 to {MOST_STREAMS}"
        require(is_count, "hyper_connections", "n", self.n, allowed)

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("in",)

    def param_slots(self, site: Site) -> dict[str, Param]:
        trunks = range(self.n)
        slots = {f"read_{i}": Param("scalar", float(i == site.index % self.n)) for i in trunks}
        slots |= {f"write_{i}": Param("scalar", 1.0) for i in trunks}
        slots |= {
            f"mix_{i}_{j}": Param("scalar", float(i == j)) for i in trunks for j in trunks
        }
        return slots

    def start(self, x: "Tensor") -> tuple["Tensor", ...]:
        return (x,) * self.n

    def step(
        self, state: tuple["Tensor", ...], branch: Branch, norms: Norms, site: Site
    ) -> tuple["Tensor", ...]:
        def weighted(name: str) -> "Tensor":
            first, *rest = (norms.param(f"{name}_{j}") * h for j, h in enumerate(state))
            return sum(rest, start=first)

        out = branch(norms["in"](weighted("read")))
        return tuple(
            norms.param(f"write_{i}") * out + weighted(f"mix_{i}") for i in range(self.n)
        )

    def finish(self, state: tuple["Tensor", ...], norms: Norms) -> "Tensor":
        first, *rest = state
        return norms["final"](sum(rest, start=first))
