"""Closed forms of the gradient that flows back through shortcuts (arXiv 2601.19895, 3.3)."""

import numpy as np
from numpy.typing import NDArray

from keelbench.archs import ResidualRule, Site
from keelbench.archs.builtin import DeepNorm, HybridNorm, Keel, MixLN, PostLN, PreLN
from keelbench.archs.more import LayerNormScaling, Reordered, ResNet, ReZero, Sandwich, SubLN

FloatArray = NDArray[np.float64]

IDENTITY = (PreLN, ResNet, Sandwich, Reordered, LayerNormScaling, ReZero, SubLN)
"""Rules whose trunk is added to and nothing else."""


def shortcut_factor(
    rule: ResidualRule, site: Site, trunk_square: FloatArray, branch_square: FloatArray
) -> FloatArray | None:
    """Factor that one site's shortcut puts on the gradient; None if no closed form is known.

    A norm behind y = α·x + F(x) divides by rms(y) = sqrt(α²·x² + F²), trunk and branch being
    uncorrelated at init, so the factor is α / rms(y): 1 / sqrt(1 + v) for Post-LN, with v the
    branch variance over a trunk of RMS 1, and near 1 for Keel. Gains that have moved away
    from 1 are not part of it, nor is what a finite width D leaves of the correlation (a share
    of about 2 / D of the decay).

    Args:
        trunk_square, branch_square: mean squares, per token or of any other shape.
    """
    one = np.ones_like(trunk_square)
    if isinstance(rule, IDENTITY):
        return one
    if isinstance(rule, HybridNorm):
        is_normed = site.branch == "ffn" and not rule.is_pre(site)
        return trunk_square**-0.5 if is_normed else one
    alpha, is_normed = 1.0, True
    if isinstance(rule, Keel):
        alpha, is_normed = rule.alpha_at(site), rule.has_outer_norm(site)
    elif isinstance(rule, DeepNorm):
        alpha = rule.alpha_at(site.depth)
    elif isinstance(rule, MixLN):
        is_normed = rule.is_post(site)
    elif not isinstance(rule, PostLN):
        return None
    if not is_normed:
        return alpha * one
    factor: FloatArray = alpha / np.sqrt(alpha**2 * trunk_square + branch_square)
    return factor


def predicted_shortcut(
    rule: ResidualRule, trunk_square: FloatArray, branch_square: FloatArray
) -> FloatArray | None:
    """Norm of the shortcut's gradient behind each site, relative to the last site.

    It is the product of the factors of all sites above, token by token, all tokens having
    the same gradient at the last site. None if no closed form is known.

    Args:
        trunk_square, branch_square: (sites, tokens), before each site and of its branch.
    """
    depth = len(trunk_square)
    behind = np.ones_like(trunk_square)
    for index in range(depth - 1, 0, -1):
        factor = shortcut_factor(
            rule, Site(index, depth), trunk_square[index], branch_square[index]
        )
        if factor is None:
            return None
        behind[index - 1] = behind[index] * factor
    norm: FloatArray = np.sqrt(np.square(behind).mean(axis=-1))
    return norm
