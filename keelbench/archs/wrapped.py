"""A rule around a rule: how tools watch or change what happens at a site."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keelbench.archs.rule import Branch, Norms, Param, ResidualRule, Site

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WrappedRule(ResidualRule):
    """Passes everything on to ``inner``; subclasses change ``start`` or ``step``."""

    inner: ResidualRule

    @property
    def final_norm(self) -> bool:
        return self.inner.final_norm

    def qkv_norm(self, site: Site) -> bool:
        return self.inner.qkv_norm(site)

    def inner_norm(self, site: Site) -> bool:
        return self.inner.inner_norm(site)

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return self.inner.norm_slots(site)

    def param_slots(self, site: Site) -> dict[str, Param]:
        return self.inner.param_slots(site)

    def gain(self, site: Site, weight: str) -> float:
        return self.inner.gain(site, weight)

    def start(self, x: "Tensor") -> Any:
        return self.inner.start(x)

    def step(self, state: Any, branch: Branch, norms: Norms, site: Site) -> Any:
        return self.inner.step(state, branch, norms, site)

    def finish(self, state: Any, norms: Norms) -> "Tensor":
        return self.inner.finish(state, norms)

    def facts(self, depth: int) -> dict[str, str]:
        return self.inner.facts(depth)
