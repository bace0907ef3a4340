"""A rule's arithmetic, traced once into a list of operations.

A rule is called with stand-ins for tensors that write down what is done to them. Rules of
additions, multiples, norms and branches (all six of the paper) can be traced; a rule that
does anything else cannot, and runs under autograd instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from keelbench.archs import ResidualRule, Site
from keelbench.archs.wrapped import WrappedRule
from keelbench.layout import qkv_norm_names, sites
from keelbench.specs import ModelSpec


class UntraceableError(Exception):
    """The rule does something that a program cannot express."""


@dataclass(frozen=True)
class Operation:
    """One step of a program: ``out`` computed from values ``a`` and, for sums, ``b``."""

    kind: str
    out: int
    a: int = -1
    b: int = -1
    weights: tuple[str, ...] = ()
    """Names of tensors; an empty name stands for none."""
    alpha: float = 1.0
    beta: float = 1.0

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(value for value in (self.a, self.b) if value >= 0)


class Traced:
    """Stands in for an activation (S, N, D) while a rule runs."""

    def __init__(self, trace: "Trace", value: int) -> None:
        self._trace = trace
        self.value = value

    def add(self, other: "Traced", *, alpha: float = 1.0) -> "Traced":
        return self._trace.sum(self, other, 1.0, alpha)

    def __add__(self, other: "Traced") -> "Traced":
        return self._trace.sum(self, other, 1.0, 1.0)

    def __sub__(self, other: "Traced") -> "Traced":
        return self._trace.sum(self, other, 1.0, -1.0)

    def __mul__(self, factor: float) -> "Traced":
        return self._trace.sum(self, None, factor, 0.0)

    __rmul__ = __mul__


@dataclass
class Trace:
    """Writes down operations."""

    operations: list[Operation] = field(default_factory=list)

    def do(self, kind: str, weights: Sequence[str], *inputs: Traced, **more: float) -> Traced:
        out = len(self.operations)
        if any(not isinstance(x, Traced) for x in inputs):
            raise UntraceableError(f"{kind} of something that is no activation")
        if not torch.is_grad_enabled():
            raise UntraceableError("a part that is kept from the gradient")
        a, b = [*[x.value for x in inputs], -1, -1][:2]
        self.operations.append(Operation(kind, out, a, b, tuple(weights), **more))
        return Traced(self, out)

    def sum(self, a: Traced, b: Traced | None, alpha: float, beta: float) -> Traced:
        if not all(isinstance(x, int | float) for x in (alpha, beta)):
            raise UntraceableError("arithmetic with something that is no activation or number")
        inputs = (a,) if b is None else (a, b)
        return self.do("add", (), *inputs, alpha=float(alpha), beta=float(beta))


@dataclass(frozen=True)
class _TracedNorms:
    trace: Trace
    site: Site | None

    def __getitem__(self, slot: str) -> Callable[[Traced], Traced]:
        site = self.site
        name = slot if site is None else f"{site.index}.{site.branch}.norm_{slot}"
        return lambda x: self.trace.do("norm", (name,), x)

    def param(self, slot: str) -> Any:
        raise UntraceableError(f"the trainable parameter '{slot}'")


def trace(spec: ModelSpec, rule: ResidualRule, *, is_training: bool) -> list[Operation]:
    """The model as operations; the last one computes the losses.

    A rule around a rule, which may watch the probe alone, is traced for training only.

    Raises:
        UntraceableError: if the rule or the model goes beyond what a program can do.
    """
    if spec.norm != "rmsnorm":
        raise UntraceableError(f"norm {spec.norm}")
    log = Trace()
    if isinstance(rule, WrappedRule) and not is_training:
        raise UntraceableError("a rule that may be watching")
    try:
        with torch.enable_grad():
            _run(log, spec, rule)
    except Exception as error:  # whatever a rule does that stand-ins do not know
        raise UntraceableError(str(error)) from error
    return log.operations


def _run(log: Trace, spec: ModelSpec, rule: Any) -> None:
    """Call the rule as the model does; to it, stand-ins are tensors."""
    state = rule.start(log.do("embed", ("embedding",)))
    for site in sites(spec.depth):
        branch = _branch(log, spec, rule, site)
        state = rule.step(state, branch, _TracedNorms(log, site), site)
    log.do("head", ("head",), rule.finish(state, _TracedNorms(log, None)))


def _branch(
    log: Trace, spec: ModelSpec, rule: ResidualRule, site: Site
) -> Callable[[Traced], Traced]:
    if rule.inner_norm(site):
        raise UntraceableError("a norm inside a branch")
    prefix = f"{site.index}.{site.branch}"
    if site.branch == "ffn":
        return lambda x: log.do("ffn", (f"{prefix}.gate_up", f"{prefix}.down"), x)
    normed = qkv_norm_names(spec, rule, site)
    gains = tuple(f"{prefix}.{name}_norm" if name in normed else "" for name in "qkv")
    return lambda x: log.do("attention", (f"{prefix}.qkv", f"{prefix}.out", *gains), x)
