"""How much memory a run takes, without building it and without torch.

The numbers of ``saved`` are exact for the six rules of the paper (a test compares them with
what autograd keeps and with what the C step reserves); a rule with several streams or
parameters of its own needs more. A peak adds what a step holds for a moment.
"""

from keelbench.archs import ResidualRule, Site, make_rule
from keelbench.layout import layout, parameter_count, qkv_norm_names, sites
from keelbench.specs import CellSpec, ModelSpec

SAFE_SHARE = 0.85
"""Of free memory: what an estimate may fill, since allocators leave gaps."""

MOST_LANES = 64
"""More lanes than this no longer make a step cheaper per lane."""


def estimate_memory(
    cell: CellSpec, vocab: int, lanes: int, *, is_checkpointed: bool = False
) -> int:
    """Bytes at the peak of a training step.

    Args:
        cell: resolved or not.
        vocab: size of the vocabulary.
        lanes: runs in one batch.
        is_checkpointed: keep each block's input only, and compute the block again.
    """
    cell = cell.resolved()
    rule = make_rule(cell.model.arch)
    parameters = parameter_count(layout(cell.model, rule, vocab))
    tokens = lanes * cell.data.batch * cell.data.seq
    wide = 8 if cell.dtype == "float64" else 4
    state = lanes * parameters * wide * (2 + _moments(cell.optim.name))
    saved = saved_bytes(cell, vocab, lanes, is_checkpointed=is_checkpointed)
    assert cell.model.hidden
    moment = tokens * wide * max(6 * cell.model.hidden, 2 * vocab, 6 * cell.model.width)
    return state + saved + moment


def saved_bytes(
    cell: CellSpec, vocab: int, lanes: int, *, is_checkpointed: bool = False
) -> int:
    """Bytes of activations that a forward pass keeps for the backward pass."""
    cell = cell.resolved()
    model, rule = cell.model, make_rule(cell.model.arch)
    tokens = lanes * cell.data.batch * cell.data.seq
    is_half = cell.dtype == "bfloat16"
    wide = 8 if cell.dtype == "float64" else 4
    in_c = cell.device == "cpu" and not is_half and not is_checkpointed
    if in_c:
        body = wide * sum(_kept_in_c(model, rule, site) for site in sites(model.depth))
        end = wide * (vocab + model.width * (2 if rule.final_norm else 1))
        return tokens * (body + end)
    per_site = [_kept(model, rule, site, wide, is_half) for site in sites(model.depth)]
    end = wide * (vocab + model.width + (2 * model.width + 1) * rule.final_norm)
    copies = 2 * _matrix_weights(model) * lanes if is_half else 0
    if not is_checkpointed:
        return tokens * (sum(per_site) + end) + copies
    blocks = [sum(per_site[at : at + 2]) for at in range(0, len(per_site), 2)]
    return tokens * (wide * model.width * model.blocks + max(blocks) + end) + (
        copies // model.blocks
    )


def should_checkpoint(cell: CellSpec, vocab: int, lanes: int, free: int) -> bool:
    """Whether a step would not fit without checkpointing."""
    return estimate_memory(cell, vocab, lanes) > SAFE_SHARE * free


def lanes_that_fit(cell: CellSpec, vocab: int, free: int) -> int:
    """The most lanes of a cell that fit into ``free`` bytes; at least 1."""
    lanes = 1
    while lanes < MOST_LANES and (estimate_memory(cell, vocab, lanes + 1) <= SAFE_SHARE * free):
        lanes += 1
    return lanes


def _kept(model: ModelSpec, rule: ResidualRule, site: Site, wide: int, is_half: bool) -> int:
    """Bytes per token that autograd keeps of one site on the plain path."""
    assert model.heads and model.kv_heads and model.hidden
    narrow = 2 if is_half else wide
    width, head_dim = model.width, model.width // model.heads
    kv = model.kv_heads * head_dim
    # A norm keeps its input, the input divided by its RMS, and 1 / RMS.
    bytes_ = len(rule.norm_slots(site)) * wide * (2 * width + 1) + narrow * width
    if site.branch == "ffn":
        # Gate and up, silu(gate), and their product.
        return bytes_ + narrow * 4 * model.hidden
    # Keys, queries and values; turned queries and keys; the output; the log-sum-exp.
    bytes_ += narrow * ((width + 2 * kv) + (width + kv) + width)
    bytes_ += (8 if wide == 8 else 4) * model.heads
    if qkv_norm_names(model, rule, site):
        bytes_ += narrow * (width + 2 * kv) + wide * (width + 2 * kv + model.heads)
        bytes_ += wide * 2 * model.kv_heads
    return bytes_


def _kept_in_c(model: ModelSpec, rule: ResidualRule, site: Site) -> int:
    """Numbers per token that the C step keeps of one site."""
    assert model.heads and model.kv_heads and model.hidden
    norms = len(rule.norm_slots(site))
    numbers = norms * (model.width + 1) + model.width
    if site.branch == "ffn":
        return numbers + 2 * model.hidden
    kv = model.kv_heads * (model.width // model.heads)
    return numbers + (model.width + 2 * kv) + model.width + 2 * model.heads


def _matrix_weights(model: ModelSpec) -> int:
    """Weights that take part in matrix products: cast to bfloat16 once a step."""
    assert model.heads and model.kv_heads and model.hidden
    kv = model.kv_heads * (model.width // model.heads)
    attention = model.width * (2 * model.width + 2 * kv)
    return model.blocks * (attention + 3 * model.width * model.hidden)


def _moments(optimizer: str) -> int:
    """Optimizer state per weight, in numbers; 2 for optimizers that are not known here."""
    return {"sgd": 1}.get(optimizer, 2)
