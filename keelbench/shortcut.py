"""Closed forms of the gradient that flows back through shortcuts (arXiv 2601.19895, 3.3)."""

import math

import numpy as np
from numpy.typing import NDArray

from keelbench.archs import ResidualRule, Site
from keelbench.archs.builtin import DeepNorm, HybridNorm, Keel, MixLN, PostLN, PreLN
from keelbench.archs.more import LayerNormScaling, Reordered, ResNet, ReZero, Sandwich, SubLN

IDENTITY = (PreLN, ResNet, Sandwich, Reordered, LayerNormScaling, ReZero, SubLN)
"""Rules whose trunk is added to and nothing else."""


def shortcut_factor(
    rule: ResidualRule, site: Site, trunk_rms: float, branch_rms: float
) -> float | None:
    """Factor that one site's shortcut puts on the gradient; None if no closed form is known.

    A norm behind y = α·x + F(x) divides by rms(y) = sqrt(α²·rms(x)² + rms(F)²), trunk and
    branch being uncorrelated at init, so the factor is α / rms(y): 1 / sqrt(1 + v) for
    Post-LN, with v the branch variance over a trunk of RMS 1, and near 1 for Keel. Gains
    that have moved away from 1 are not part of it.
    """
    if isinstance(rule, IDENTITY):
        return 1.0
    if isinstance(rule, HybridNorm):
        is_normed = site.branch == "ffn" and not rule.is_pre(site)
        return 1.0 / trunk_rms if is_normed else 1.0
    alpha, is_normed = 1.0, True
    if isinstance(rule, Keel):
        alpha, is_normed = rule.alpha_at(site), rule.has_outer_norm(site)
    elif isinstance(rule, DeepNorm):
        alpha = rule.alpha_at(site.depth)
    elif isinstance(rule, MixLN):
        is_normed = rule.is_post(site)
    elif not isinstance(rule, PostLN):
        return None
    return alpha / math.hypot(alpha * trunk_rms, branch_rms) if is_normed else alpha


def predicted_shortcut(
    rule: ResidualRule, trunk_rms: NDArray[np.float64], branch_rms: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Shortcut gradient behind each site, relative to the last: the product of the factors
    of all sites above it. None if no closed form is known.

    Args:
        trunk_rms, branch_rms: (sites,), before each site and of its branch.
    """
    depth = len(trunk_rms)
    behind = np.ones(depth)
    for index in range(depth - 1, 0, -1):
        factor = shortcut_factor(
            rule, Site(index, depth), float(trunk_rms[index]), float(branch_rms[index])
        )
        if factor is None:
            return None
        behind[index - 1] = behind[index] * factor
    return behind
