"""Rules that watch or change what passes each site, put around a model's own rule.

A model is observed by exchanging its rule: ``model.rule = Observed(model.rule)``. Neither
the model nor the rule knows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keelbench.archs import Branch, Norms, Site
from keelbench.archs.wrapped import WrappedRule


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """What passed one site."""

    site: Site
    trunk_square_SN: Tensor
    """Mean square of the trunk before the site (all streams together), per token."""
    branch_square_SN: Tensor
    """Mean square of the branch's output; 0 if the rule did not call it."""
    after: tuple[Tensor, ...]
    """The trunk's tensors behind the site; they keep their gradient."""


@dataclass(frozen=True)
class Observed(WrappedRule):
    """Records what passes each site.

    With ``is_probe_only`` it records only under ``torch.no_grad`` (the engine's probe), and
    keeps no tensors of the trunk.
    """

    is_probe_only: bool = False
    passages: list[Passage] = field(default_factory=list, compare=False)

    def step(self, state: Any, branch: Branch, norms: Norms, site: Site) -> Any:
        if self.is_probe_only and torch.is_grad_enabled():
            return self.inner.step(state, branch, norms, site)
        squares: list[Tensor] = []

        def watched(x: Tensor) -> Tensor:
            y = branch(x)
            squares.append(mean_square((y,)))
            return y

        trunk = mean_square(tensors_of(state))
        after = self.inner.step(state, watched, norms, site)
        kept = () if self.is_probe_only else tensors_of(after)
        for tensor in kept:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.retain_grad()
        square = sum(squares, start=torch.zeros_like(trunk))
        self.passages.append(Passage(site, trunk, square, kept))
        return after


@dataclass(frozen=True)
class ShortcutOnly(WrappedRule):
    """Branches count as constants: what flows back is the shortcut's gradient alone."""

    def step(self, state: Any, branch: Branch, norms: Norms, site: Site) -> Any:
        def constant(x: Tensor) -> Tensor:
            with torch.no_grad():
                return branch(x)

        return self.inner.step(state, constant, norms, site)


@dataclass(frozen=True)
class Skipping(WrappedRule):
    """Leaves sub-layers out, their norms included: the trunk passes unchanged."""

    skipped: frozenset[int] = frozenset()
    """Indices of the sites to leave out."""

    def step(self, state: Any, branch: Branch, norms: Norms, site: Site) -> Any:
        if site.index in self.skipped:
            return state
        return self.inner.step(state, branch, norms, site)


def tensors_of(state: Any) -> tuple[Tensor, ...]:
    """The tensors of a rule's state, whatever it is made of: tensors, tuples, lists, dicts."""
    return tuple(_iterate(state))


def _iterate(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _iterate(value)
    elif isinstance(state, tuple | list):
        for value in state:
            yield from _iterate(value)


@torch.no_grad()
def mean_square(tensors: tuple[Tensor, ...]) -> Tensor:
    """Mean over channels and streams of the squares, per lane and token (S, N)."""
    means = [tensor.float().square().mean(dim=-1) for tensor in tensors]
    return torch.stack(means).mean(dim=0)
