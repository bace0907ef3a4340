"""Norms over the width, per lane, and how a rule reaches those of its site."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from keelbench.archs import ResidualRule, Site
from keelbench.layout import param_name

NORM_EPS = 1e-5
"""Added to the mean square (arXiv 2601.19895, Table 8)."""

NormFunction = Callable[[Tensor], Tensor]
NormMaker = Callable[[Mapping[str, Tensor], str], NormFunction]


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis, in float32 or wider.

    Args:
        x: (lanes, tokens, channels).
        gain: (lanes, 1, channels).
    """
    wide = x.float() if x.dtype == torch.bfloat16 else x
    scale = wide.square().mean(dim=-1, keepdim=True).add(NORM_EPS).rsqrt()
    return wide * scale * gain


def layer_norm(x: Tensor, gain: Tensor) -> Tensor:
    """LayerNorm with gain and no bias: the mean is subtracted first."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return rms_norm(wide - wide.mean(dim=-1, keepdim=True), gain)


def dyt(x: Tensor, gain: Tensor, alpha: Tensor) -> Tensor:
    """Dynamic Tanh, gain * tanh(alpha * x) (Zhu et al. 2025, arXiv 2503.10622)."""
    return gain * torch.tanh(alpha * x)


def make_norm(name: str, rms: Callable[[Tensor, Tensor], Tensor] = rms_norm) -> NormMaker:
    """How to make a norm of this kind from the weights stored under a name.

    ``rms``: the implementation of RMSNorm, plain or fused.
    """

    def rmsnorm(weights: Mapping[str, Tensor], name: str) -> NormFunction:
        gain = weights[name]
        return lambda x: rms(x, gain)

    def layernorm(weights: Mapping[str, Tensor], name: str) -> NormFunction:
        gain = weights[name]
        return lambda x: layer_norm(x, gain)

    def dynamic_tanh(weights: Mapping[str, Tensor], name: str) -> NormFunction:
        gain, alpha = weights[name], weights[f"{name}.alpha"]
        return lambda x: dyt(x, gain, alpha)

    return {"rmsnorm": rmsnorm, "layernorm": layernorm, "dyt": dynamic_tanh}[name]


class SiteNorms:
    """The norms and parameters of one site (or, without a site, of the model's end)."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        site: Site | None,
        rule: ResidualRule,
        norm: NormMaker,
    ) -> None:
        self._weights = weights
        self._site = site
        self._rule = rule
        self._norm = norm

    def __getitem__(self, slot: str) -> NormFunction:
        if self._site is None:
            return self._norm(self._weights, slot)
        return self._norm(self._weights, f"{self._site.index}.{self._site.branch}.norm_{slot}")

    def param(self, slot: str) -> Tensor:
        assert self._site is not None
        declared = self._rule.param_slots(self._site)[slot]
        return self._weights[param_name(self._site, slot, declared)]
