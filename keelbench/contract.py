"""What every residual rule owes the model, tried on tiny models.

A rule that breaks the contract would still train, and its Max LR would mean nothing: it may
see the future, let lanes or sequences leak into each other, or leave norms unused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keelbench.archs import Branch, Norms, ResidualRule, Site, make_rule
from keelbench.archs.wrapped import WrappedRule
from keelbench.errors import KeelbenchError
from keelbench.layout import layout
from keelbench.model import LaneModel
from keelbench.observe import tensors_of
from keelbench.parsing import raise_problems
from keelbench.specs import ModelSpec

VOCAB = 31
SEQ = 8
BATCH = 2
EDGE_DEPTHS = (2, 64)
"""The smallest depth, and one at which growth from site to site shows."""

TOLERANCE = 1e-9
"""Relative difference in float64 that counts as none."""

LOSS_NATS = 1.0
"""How far the initial loss may lie from ln V. A head that reads a trunk of RMS r starts
0.2 r^2 nats above it, with this package's init."""

LOSS_LANES = 8
"""Inits that the initial loss is averaged over."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One clause of the contract."""

    clause: str
    passed: bool
    reason: str = ""
    """Why it failed, in a sentence; empty if it passed."""


class _BrokenError(Exception):
    """A clause that does not hold; its text is the reason."""


def check_rule(arch: str, *, depth: int = 6, width: int = 16, **model: Any) -> list[Finding]:
    """Try a rule against every clause of the contract.

    Args:
        arch: a name, ``path/to/file.py:MyRule`` or ``pkg.module:MyRule``.
        depth: sub-layers of the model that it is tried in; whatever depends on depth is
            also tried at the smallest and at a large one.
        width: of that model.
        model: further fields of the model, such as ``qk_norm=True`` or ``norm="dyt"``.

    Returns:
        A finding per clause. After one that the others build on (it runs, is finite, gives
        the same twice) has failed, later clauses are not tried: they would blame the rule for
        what it did not do.

    Raises:
        KeelbenchError: if there is no such rule, or no such model.
    """
    rule = make_rule(arch)
    spec = ModelSpec(arch=arch, depth=depth, width=width, **model)
    raise_problems(spec.problems())
    findings = []
    for clause, check in _CLAUSES.items():
        finding = _try(clause, check, rule, spec)
        findings.append(finding)
        if not finding.passed and clause in _NEEDED:
            break
    return findings


def render_findings(arch: str, findings: Sequence[Finding]) -> str:
    """The verdict and a line per clause, for people."""
    held = sum(finding.passed for finding in findings)
    verdict = "accepted" if held == len(_CLAUSES) else "refused"
    lines = [f"{arch}: {verdict}, {held} of {len(_CLAUSES)} clauses hold"]
    found = {finding.clause: finding for finding in findings}
    width = max(map(len, _CLAUSES))
    for clause, meaning in _MEANINGS.items():
        finding = found.get(clause)
        mark = "-" if finding is None else "ok" if finding.passed else "FAILED"
        text = meaning if finding is None or finding.passed else finding.reason
        lines.append(f"  {mark:<6}  {clause:<{width}}  {text}")
    return "\n".join(lines)


def all_passed(findings: Sequence[Finding]) -> bool:
    return all(finding.passed for finding in findings)


def _try(
    clause: str, check: Callable[[ResidualRule, ModelSpec], None], rule: ResidualRule, spec: Any
) -> Finding:
    try:
        check(rule, spec)
    except _BrokenError as broken:
        return Finding(clause, False, str(broken))
    except KeelbenchError as error:
        return Finding(clause, False, error.message)
    except Exception as error:
        return Finding(clause, False, f"{type(error).__name__}: {error}")
    return Finding(clause, True)


@dataclass(frozen=True)
class _Guarded(WrappedRule):
    """Names the site at which a rule goes wrong."""

    def step(self, state: Any, branch: Branch, norms: Norms, site: Site) -> Any:
        where = f"at site {site.index} ({site.branch}) of {site.depth}"

        def guarded(x: Any) -> Tensor:
            if not isinstance(x, Tensor) or x.shape != shape:
                raise _BrokenError(
                    f"step gives its branch {_said(x)} {where}, not {tuple(shape)}"
                )
            return branch(x)

        shape = tensors_of(state)[0].shape
        try:
            after = self.inner.step(state, guarded, _Named(norms, where), site)
        except _BrokenError:
            raise
        except Exception as error:
            raise _BrokenError(
                f"step raises {type(error).__name__} {where}: {error}"
            ) from error
        if isinstance(state, Tensor) and (
            not isinstance(after, Tensor) or after.shape != state.shape
        ):
            raise _BrokenError(f"step returns {_said(after)} {where}, not {tuple(state.shape)}")
        return after


@dataclass(frozen=True)
class _Named:
    """Norms that say which slot a rule has not declared."""

    inner: Norms
    where: str

    def __getitem__(self, slot: str) -> Branch:
        try:
            norm = self.inner[slot]
        except KeyError:
            raise _BrokenError(
                f"step uses norms['{slot}'] {self.where}, which norm_slots does not name"
            ) from None
        return norm

    def param(self, slot: str) -> Tensor:
        try:
            return self.inner.param(slot)
        except KeyError:
            raise _BrokenError(
                f"step uses param('{slot}') {self.where}, which param_slots does not name"
            ) from None


def _model(
    rule: ResidualRule, spec: ModelSpec, depth: int, lanes: int = 1, *, stirred: bool = True
) -> LaneModel:
    """A float64 model; stirred: every weight is moved, so that no gain is 1 and none is 0."""
    model = LaneModel(
        replace(spec, depth=depth), _Guarded(rule), VOCAB, range(lanes), dtype=torch.float64
    )
    if stirred:
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(model.flat_SP.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            model.flat_SP.add_(0.2 * noise)
    return model


def _depths(spec: ModelSpec) -> list[int]:
    return sorted({*EDGE_DEPTHS, spec.depth})


def _tokens(lanes: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB, (lanes, BATCH, SEQ + 1), generator=generator)


def _runs(rule: ResidualRule, spec: ModelSpec) -> None:
    for depth in _depths(spec):
        model = _model(rule, spec, depth)
        logits = model.logits(_tokens()[:, :, :-1])
        expected = (1, BATCH * SEQ, VOCAB)
        if logits.shape != expected:
            raise _BrokenError(f"finish gives logits {tuple(logits.shape)}, not {expected}")


def _finite(rule: ResidualRule, spec: ModelSpec) -> None:
    for depth, is_stirred in [(spec.depth, True), *((d, False) for d in _depths(spec))]:
        model = _model(rule, spec, depth, stirred=is_stirred)
        loss = model.losses(_tokens()).sum()
        if not torch.isfinite(loss):
            raise _BrokenError(f"the loss is {loss.item()} at depth {depth}")
        if _gradient(model, loss).isfinite().logical_not().any():
            raise _BrokenError(f"a gradient is not finite at depth {depth}")


def _gradient(model: LaneModel, loss: Tensor) -> Tensor:
    """The weights' gradient; torch's words for a change in place say nothing about rules."""
    try:
        loss.backward()
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise _BrokenError(
            "step changes a tensor in place, which its gradient needs: write x = x + ..., not "
            "x += ..."
        ) from error
    assert model.flat_SP.grad is not None
    return model.flat_SP.grad


def _causal(rule: ResidualRule, spec: ModelSpec) -> None:
    model, tokens = _model(rule, spec, spec.depth), _tokens()[:, :, :-1]
    changed = tokens.clone()
    changed[:, 0, SEQ // 2] = (changed[:, 0, SEQ // 2] + 1) % VOCAB
    with torch.no_grad():
        logits = [model.logits(t).view(BATCH, SEQ, VOCAB) for t in (tokens, changed)]
    for position in range(SEQ // 2):
        if _differs(logits[0][0, position], logits[1][0, position]):
            raise _BrokenError(
                f"position {position} changes with the token at {SEQ // 2}: the rule sees the "
                "future (it may mix tokens; work on the last axis only)"
            )
    if _differs(logits[0][1], logits[1][1]):
        raise _BrokenError("one sequence of the batch changes with a token of another")


def _lanes(rule: ResidualRule, spec: ModelSpec) -> None:
    both, tokens = _model(rule, spec, spec.depth, lanes=2), _tokens(2)[:, :, :-1]
    with torch.no_grad():
        together = both.logits(tokens)
        for lane in (0, 1):
            alone = _model(rule, spec, spec.depth, lanes=2)
            alone.keep([lane])
            if _differs(together[lane], alone.logits(tokens[lane : lane + 1])[0]):
                raise _BrokenError(
                    "a lane's logits change with its neighbour: the rule mixes the first axis"
                )


def _repeats(rule: ResidualRule, spec: ModelSpec) -> None:
    model, tokens = _model(rule, spec, spec.depth), _tokens()[:, :, :-1]
    with torch.no_grad():
        if not torch.equal(model.logits(tokens), model.logits(tokens)):
            raise _BrokenError("two calls with the same weights and tokens differ")


def _uses_everything(rule: ResidualRule, spec: ModelSpec) -> None:
    model = _model(rule, spec, spec.depth)
    gradient = _gradient(model, model.losses(_tokens()).sum())
    parts = gradient.split([tensor.size for tensor in model.tensors], dim=1)
    unused = [
        tensor.name for tensor, part in zip(model.tensors, parts, strict=True) if not part.any()
    ]
    if unused:
        shown = ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else "")
        raise _BrokenError(
            f"no gradient reaches {shown}: a norm, parameter or branch that is declared but "
            "not used"
        )


def _starts_near_chance(rule: ResidualRule, spec: ModelSpec) -> None:
    for depth in _depths(spec):
        model = _model(rule, spec, depth, LOSS_LANES, stirred=False)
        with torch.no_grad():
            loss = model.losses(_tokens(LOSS_LANES)).mean().item()
        if abs(loss - math.log(VOCAB)) > LOSS_NATS:
            raise _BrokenError(
                f"the loss at init is {loss:.2f} at depth {depth}; ln V is "
                f"{math.log(VOCAB):.2f}: the trunk is not normalized where the head reads it"
            )


def _declares(rule: ResidualRule, spec: ModelSpec) -> None:
    for depth in _depths(spec):
        for site in (Site(index, depth) for index in range(depth)):
            slots = rule.norm_slots(site)
            if not isinstance(slots, tuple | list):  # a text would count letter by letter
                raise _BrokenError(
                    f"norm_slots returns {slots!r} at site {site.index} ({site.branch}) of "
                    f"{depth}: return a tuple of names, such as ('in',)"
                )
        names = [tensor.name for tensor in layout(replace(spec, depth=depth), rule, VOCAB)]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise _BrokenError(f"declared twice: {', '.join(sorted(twice))}")
    if not rule.equation:
        raise _BrokenError(
            "equation is empty: one line of text that tells readers what this is"
        )


_CLAUSES: dict[str, Callable[[ResidualRule, ModelSpec], None]] = {
    "declared": _declares,
    "shape": _runs,
    "finite": _finite,
    "deterministic": _repeats,
    "causal": _causal,
    "lane-independent": _lanes,
    "gains used": _uses_everything,
    "initial loss": _starts_near_chance,
}

_MEANINGS = {
    "declared": "every slot once, and an equation in a line of text",
    "shape": "runs at every depth, and keeps (lanes, tokens, width)",
    "finite": "losses and gradients are finite at every depth",
    "deterministic": "the same weights and tokens give the same logits",
    "causal": "no position changes with a later token or another sequence",
    "lane-independent": "no lane changes with its neighbours",
    "gains used": "a gradient reaches every weight, norm and parameter",
    "initial loss": "starts near ln V",
}

_NEEDED = ("declared", "shape", "finite", "deterministic")
"""Without these the others cannot be tried: what is not a number, or is drawn anew, differs
from itself, which would look like a glance at the future or at a neighbour."""


def _differs(a: Tensor, b: Tensor) -> bool:
    scale = max(a.abs().max().item(), 1e-300)
    return not (a - b).abs().max().item() <= TOLERANCE * scale


def _said(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
