"""Architectures as people write them: ``pre_ln`` is Pre-LN.

A fixed list and not the registry, because a stored result must be reportable on a machine
that has neither torch nor the file with the user's own rule.
"""

TITLES = {
    "post_ln": "Post-LN",
    "deepnorm": "DeepNorm",
    "hybridnorm": "HybridNorm",
    "mix_ln": "Mix-LN",
    "pre_ln": "Pre-LN",
    "keel": "Keel",
}


def base_of(arch: str) -> str:
    """The name without its parameters: ``keel`` for ``keel(alpha=16)``."""
    return arch.partition("(")[0].strip()


def title_of(arch: str) -> str:
    """The title with the parameters, if any: ``Keel (alpha=16)``."""
    base = base_of(arch)
    title = TITLES.get(base, base.rpartition(":")[2])
    arguments = arch[len(base) :].strip()
    return f"{title} {arguments}" if arguments else title
