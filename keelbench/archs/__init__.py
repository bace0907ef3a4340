"""Architectures by name: built-ins, entry points and files on one path.

A user's rule is a subclass of ``ResidualRule`` given as ``path/to/file.py:MyRule``, as
``pkg.module:MyRule``, or by a name under the entry-point group ``keelbench.archs``.
"""

import dataclasses
from typing import Any

from keelbench.archs.rule import Branch, Norms, Param, ResidualRule, Site
from keelbench.errors import KeelbenchError
from keelbench.registry import Registry, did_you_mean, format_call, parse_call

__all__ = [
    "ALL_ARCHS",
    "ARCHS",
    "PAPER_ARCHS",
    "Branch",
    "Norms",
    "Param",
    "ResidualRule",
    "Site",
    "canonical_name",
    "make_rule",
]

ARCHS = Registry("architecture", "keelbench.archs")

PAPER_ARCHS = ("post_ln", "deepnorm", "hybridnorm", "mix_ln", "pre_ln", "keel")
"""The six of arXiv 2601.19895, Table 1, in its order."""

for _name, _class in {
    "post_ln": "PostLN",
    "deepnorm": "DeepNorm",
    "hybridnorm": "HybridNorm",
    "mix_ln": "MixLN",
    "pre_ln": "PreLN",
    "keel": "Keel",
}.items():
    ARCHS.register(_name, f"keelbench.archs.builtin:{_class}")

_MORE = {
    "keel_naive": "more:KeelNaive",
    "keel_beta": "more:KeelBeta",
    "keel_norm_beta": "more:KeelNormBeta",
    "highway": "more:Highway",
    "resnet": "more:ResNet",
    "sandwich": "more:Sandwich",
    "reordered": "more:Reordered",
    "lns": "more:LayerNormScaling",
    "rezero": "more:ReZero",
    "sub_ln": "more:SubLN",
    "residual": "streams:ResiDual",
    "siamese": "streams:Siamese",
    "hyper_connections": "streams:HyperConnections",
}

for _name, _target in _MORE.items():
    ARCHS.register(_name, f"keelbench.archs.{_target}")

ALL_ARCHS = (*PAPER_ARCHS, *_MORE)
"""Every built-in architecture: the six, then the others."""


def make_rule(text: str) -> ResidualRule:
    """The rule behind ``keel`` or ``keel(alpha=64, first_block=v1)``.

    Raises:
        KeelbenchError: for an unknown name or parameter, or a value out of range.
    """
    name, arguments = parse_call(text)
    rule_class = _rule_class(name)
    fields = [field.name for field in dataclasses.fields(rule_class) if field.init]
    for key in arguments:
        if key not in fields:
            near = did_you_mean(key, fields)
            allowed = ", ".join(fields) or "none"
            raise KeelbenchError(f"{name} has no parameter '{key}'{near}: it has {allowed}")
    try:
        return rule_class(**arguments)
    except TypeError as error:
        raise KeelbenchError(f"cannot make {text}: {error}") from error


def canonical_name(text: str) -> str:
    """One spelling per architecture: parameters in order, defaults left out."""
    name, _ = parse_call(text)
    rule = make_rule(text)
    given: dict[str, Any] = {
        field.name: getattr(rule, field.name)
        for field in dataclasses.fields(rule)
        if field.init and getattr(rule, field.name) != field.default
    }
    return format_call(name, given)


def _rule_class(name: str) -> type[ResidualRule]:
    found = ARCHS.get(name)
    if not (isinstance(found, type) and issubclass(found, ResidualRule)):
        raise KeelbenchError(
            f"'{name}' is no architecture: expected a subclass of "
            f"keelbench.archs.ResidualRule, got {_kind(found)}"
        )
    return found


def _kind(found: Any) -> str:
    if isinstance(found, type):
        return f"the class {found.__name__}, which is none"
    return f"a value of type {type(found).__name__}"
