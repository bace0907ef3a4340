"""The model against independent implementations: x-transformers, and plain ones below."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    SIX,
    VOCAB,
    as_numbers,
    assert_close,
    by_name,
    losses_and_gradients,
    make_model,
    random_floats,
    random_tokens,
    stirred,
)
from torch import Tensor, nn

from keelbench.model import LaneModel

EXACT = 1e-10
"""Relative tolerance in float64: a few hundred rounding errors."""

LANES = 2
DEPTH = 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4
WIDTH = HEADS * HEAD_DIM
HIDDEN = 3 * WIDTH

RULES = {
    "pre_ln": {"pre_norm": True},
    "post_ln": {"pre_norm": False},
    "keel(first_block=none)": {"pre_and_post_norm": True, "scale_residual_constant": DEPTH},
}
"""What x-transformers can express, and how."""

NORMS = {
    "layernorm": lambda: nn.LayerNorm(WIDTH, eps=1e-5, bias=False),
    "rmsnorm": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
}
"""torch's own norms: x-transformers' have another epsilon or none."""


def foreign_model(options: dict[str, Any], norm: str) -> nn.Module:
    """x-transformers' decoder, shaped like ours, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.script at import
        from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=WIDTH,
        depth=DEPTH // 2,
        heads=HEADS,
        attn_dim_head=HEAD_DIM,
        attn_kv_heads=KV_HEADS,
        rotary_pos_emb=True,
        rotary_emb_dim=HEAD_DIM,
        attn_custom_attn_fn=partial(torch.softmax, dim=-1),  # theirs is in float32
        ff_glu=True,
        ff_swish=True,
        ff_mult=3,
        ff_no_bias=True,
        verbose=False,
        **options,
    )
    wrapper = TransformerWrapper(num_tokens=VOCAB, max_seq_len=32, attn_layers=layers)
    for norms, _, _ in layers.layers:
        for position, module in enumerate(norms):
            if module is not None:
                norms[position] = NORMS[norm]()
    if options.get("pre_norm"):
        layers.final_norm = NORMS[norm]()
    wrapper.double()
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM
    layers.rotary_pos_emb.inv_freq = 10_000.0**-exponents  # in float64 from the start
    return wrapper


def query_columns() -> Tensor:
    """Their query heads take turns at KV heads (0, 1, 0, 1), ours are grouped (0, 0, 1, 1)."""
    groups = HEADS // KV_HEADS
    theirs = [kv * groups + turn for turn in range(groups) for kv in range(KV_HEADS)]
    return torch.cat([torch.arange(HEAD_DIM) + head * HEAD_DIM for head in theirs])


Gradients = dict[str, Callable[[], Tensor]]


def copy_lane(weights: dict[str, Tensor], lane: int, foreign: Any) -> Gradients:
    """Copy one lane over. Returns, by our names, how to read a foreign gradient."""
    layers: Any = foreign.attn_layers
    columns = query_columns()
    splits = (WIDTH, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    gradients: Gradients = {}

    def give(parameter: nn.Parameter, value: Tensor) -> None:
        assert parameter.shape == value.shape
        with torch.no_grad():
            parameter.copy_(value)

    def take(name: str) -> Tensor:
        return weights[name][lane].detach()

    def in_our_order(grad: Tensor) -> Tensor:
        ours = torch.empty_like(grad)
        ours[:, columns] = grad
        return ours

    def pair(name: str, parameter: nn.Parameter) -> None:
        value = take(name)
        give(parameter, value.flatten() if parameter.ndim == 1 else value.T)
        gradients[name] = lambda: (
            parameter.grad[None] if parameter.ndim == 1 else parameter.grad.T
        )

    give(foreign.token_emb.emb.weight, take("embedding"))
    gradients["embedding"] = lambda: foreign.token_emb.emb.weight.grad
    pair("head", foreign.to_logits.weight)
    if isinstance(layers.final_norm, nn.LayerNorm | nn.RMSNorm):
        pair("final", layers.final_norm.weight)
    for index, (norms, branch, _) in enumerate(layers.layers):
        kind = "ffn" if index % 2 else "attention"
        before, _, after = norms
        for slot, norm in (("in", before), ("out", after)):
            if norm is not None:
                pair(f"{index}.{kind}.norm_{slot}", norm.weight)
        prefix = f"{index}.{kind}"
        if kind == "attention":
            q, k, v = take(f"{prefix}.qkv").split(splits, dim=1)
            give(branch.to_q.weight, q[:, columns].T)
            give(branch.to_k.weight, k.T)
            give(branch.to_v.weight, v.T)
            give(branch.to_out.weight, take(f"{prefix}.out")[columns].T)
            gradients[f"{prefix}.qkv"] = lambda branch=branch: torch.cat(
                [
                    in_our_order(branch.to_q.weight.grad.T),
                    branch.to_k.weight.grad.T,
                    branch.to_v.weight.grad.T,
                ],
                dim=1,
            )
            gradients[f"{prefix}.out"] = lambda branch=branch: (
                in_our_order(branch.to_out.weight.grad).T
            )
        else:
            gated, _, down = branch.ff
            gate, up = take(f"{prefix}.gate_up").chunk(2, dim=1)
            give(gated.proj.weight, torch.cat((up, gate), dim=1).T)
            give(gated.proj.bias, torch.zeros(2 * HIDDEN, dtype=torch.float64))
            pair(f"{prefix}.down", down.weight)
            gradients[f"{prefix}.gate_up"] = lambda gated=gated: torch.cat(
                gated.proj.weight.grad.T.chunk(2, dim=1)[::-1], dim=1
            )
    return gradients


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("rule", list(RULES))
def test_logits_and_gradients_equal_x_transformers(rule: str, norm: str) -> None:
    model = stirred(make_model(rule, seeds=range(LANES), depth=DEPTH, width=WIDTH, norm=norm))
    windows = random_tokens(LANES, batch=2, length=13)
    logits = model.logits(windows[:, :, :-1])
    loss, gradient = losses_and_gradients(model, windows)
    weights, gradients = model.weights(), by_name(model, gradient)
    for lane in range(LANES):
        foreign = foreign_model(RULES[rule], norm)
        their_gradients = copy_lane(weights, lane, foreign)
        their_logits = foreign(windows[lane, :, :-1])
        their_loss = nn.functional.cross_entropy(
            their_logits.flatten(0, 1), windows[lane, :, 1:].flatten()
        )
        their_loss.backward()
        assert_close(logits[lane], their_logits.flatten(0, 1), EXACT)
        assert_close(loss[lane], their_loss, EXACT)
        assert set(their_gradients) == set(gradients)
        for name, theirs in their_gradients.items():
            assert_close(gradients[name][lane], theirs(), EXACT)


# Plain implementations: one lane, one sequence at a time, no batching, no shared code.


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain


def rotations(length: int) -> Tensor:
    """RoPE's matrices (T, K, K): each pair of channels turns by t x theta ** (-2 pair / K)."""
    matrices = torch.zeros(length, HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    for t in range(length):
        for even in range(0, HEAD_DIM, 2):
            angle = t * 10_000.0 ** (-even / HEAD_DIM)
            cosine, sine = math.cos(angle), math.sin(angle)
            turn = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)
            matrices[t, even : even + 2, even : even + 2] = turn
    return matrices


def turned(head: Tensor) -> Tensor:
    """RoPE of one head (T, K)."""
    return (rotations(len(head)) @ head[:, :, None])[:, :, 0]


class Plain:
    """One lane's weights, and the two kinds of sub-layer on a sequence (T, D)."""

    def __init__(self, model: LaneModel, lane: int) -> None:
        self.weights = {name: part[lane] for name, part in model.weights().items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.weights[name])

    def attention(self, x: Tensor, index: int) -> Tensor:
        prefix = f"{index}.attention"
        qkv = x @ self.weights[f"{prefix}.qkv"]
        heads = list(qkv.split(HEAD_DIM, dim=1))
        queries, rest = heads[:HEADS], heads[HEADS:]
        keys, values = rest[:KV_HEADS], rest[KV_HEADS:]
        if f"{prefix}.q_norm" in self.weights:
            queries = [self.norm(q, f"{prefix}.q_norm") for q in queries]
            keys = [self.norm(k, f"{prefix}.k_norm") for k in keys]
        if f"{prefix}.v_norm" in self.weights:
            values = [self.norm(v, f"{prefix}.v_norm") for v in values]
        mixed = []
        for head, query in enumerate(queries):
            shared = head * KV_HEADS // HEADS
            scores = turned(query) @ turned(keys[shared]).T / math.sqrt(HEAD_DIM)
            future = torch.ones_like(scores).triu(1).bool()
            mixed.append(scores.masked_fill(future, -math.inf).softmax(-1) @ values[shared])
        return torch.cat(mixed, dim=1) @ self.weights[f"{prefix}.out"]

    def ffn(self, x: Tensor, index: int) -> Tensor:
        gate, up = (x @ self.weights[f"{index}.ffn.gate_up"]).chunk(2, dim=1)
        return (gate * torch.sigmoid(gate) * up) @ self.weights[f"{index}.ffn.down"]


def plain_post(net: Plain, x: Tensor, block: int, alpha: float = 1.0) -> Tensor:
    a, f = 2 * block, 2 * block + 1
    x = net.norm(alpha * x + net.attention(x, a), f"{a}.attention.norm_out")
    return net.norm(alpha * x + net.ffn(x, f), f"{f}.ffn.norm_out")


def plain_pre(net: Plain, x: Tensor, block: int) -> Tensor:
    a, f = 2 * block, 2 * block + 1
    x = x + net.attention(net.norm(x, f"{a}.attention.norm_in"), a)
    return x + net.ffn(net.norm(x, f"{f}.ffn.norm_in"), f)


def plain_hybrid(net: Plain, x: Tensor, block: int) -> Tensor:
    a, f = 2 * block, 2 * block + 1
    z = net.norm(x + net.attention(x, a), f"{f}.ffn.norm_in")
    return z + net.ffn(z, f)


def plain_keel(net: Plain, x: Tensor, block: int, alpha: float = DEPTH) -> Tensor:
    a, f = 2 * block, 2 * block + 1
    inner = net.norm(x, f"{a}.attention.norm_in")
    x = net.norm(alpha * x + net.attention(inner, a), f"{a}.attention.norm_out")
    inner = net.norm(x, f"{f}.ffn.norm_in")
    return net.norm(alpha * x + net.ffn(inner, f), f"{f}.ffn.norm_out")


def plain_keel_v2(net: Plain, x: Tensor, block: int) -> Tensor:
    """The first attention without outer norm and alpha, the first FFN without alpha."""
    if block:
        return plain_keel(net, x, block)
    x = x + net.attention(net.norm(x, "0.attention.norm_in"), 0)
    return net.norm(x + net.ffn(net.norm(x, "1.ffn.norm_in"), 1), "1.ffn.norm_out")


PLAIN: dict[str, tuple[Callable[[Plain, Tensor, int], Tensor], bool]] = {
    "post_ln": (plain_post, False),
    "pre_ln": (plain_pre, True),
    "deepnorm": (lambda net, x, b: plain_post(net, x, b, DEPTH**0.25), False),
    "deepnorm(alpha=3)": (lambda net, x, b: plain_post(net, x, b, 3.0), False),
    "hybridnorm": (plain_hybrid, True),
    "hybridnorm(star=true)": (
        lambda net, x, b: (plain_hybrid if b else plain_pre)(net, x, b),
        True,
    ),
    "mix_ln": (lambda net, x, b: (plain_post if b < 1 else plain_pre)(net, x, b), True),
    "mix_ln(post_fraction=0.8)": (
        lambda net, x, b: (plain_post if b < 3 else plain_pre)(net, x, b),
        True,
    ),
    "keel": (plain_keel_v2, False),
    "keel(first_block=v1)": (
        lambda net, x, b: (plain_keel if b else plain_pre)(net, x, b),
        False,
    ),
    "keel(first_block=none)": (plain_keel, False),
    "keel(alpha=3, first_block=none)": (
        lambda net, x, b: plain_keel(net, x, b, 3.0),
        False,
    ),
}
"""Name to (one block, whether a final norm follows); depth 8 is four blocks."""


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("rule", list(PLAIN))
def test_losses_and_gradients_equal_a_plain_implementation(rule: str, is_fused: bool) -> None:
    block_of, has_final_norm = PLAIN[rule]
    model = stirred(make_model(rule, seeds=(0, 1), depth=DEPTH, width=WIDTH, is_fused=is_fused))
    windows = random_tokens(2, batch=2, length=6)
    expected = torch.empty(2, 2, 5, VOCAB, dtype=torch.float64)
    for lane in range(2):
        net = Plain(model, lane)
        for row in range(2):
            x = net.weights["embedding"][windows[lane, row, :-1]]
            for block in range(DEPTH // 2):
                x = block_of(net, x, block)
            if has_final_norm:
                x = net.norm(x, "final")
            expected[lane, row] = x @ net.weights["head"]
    assert_close(model.logits(windows[:, :, :-1]).view(expected.shape), expected, EXACT)
    log_p = expected.log_softmax(-1).gather(-1, windows[:, :, 1:, None])
    expected_losses = -log_p.mean(dim=(1, 2, 3))
    (expected_gradient,) = torch.autograd.grad(expected_losses.sum(), model.flat_SP)
    losses, gradient = losses_and_gradients(model, windows)
    assert_close(losses, expected_losses, EXACT)
    assert_close(gradient, expected_gradient, EXACT)


def test_qk_norm_is_an_rms_norm_of_each_head_before_rope() -> None:
    model = stirred(make_model("pre_ln", depth=2, width=WIDTH, qk_norm=True))
    x = random_floats(1, 5, WIDTH)
    branch = model.branch(model.sites[0], model.weights(), seq=5)
    assert_close(branch(x)[0], Plain(model, 0).attention(x[0], 0), EXACT)


# Identities between rules.


@pytest.mark.parametrize(
    ("rule", "same_as"),
    [
        ("deepnorm(alpha=1, beta=1)", "post_ln"),
        ("mix_ln(post_fraction=0)", "pre_ln"),
        ("mix_ln(post_fraction=1)", "post_ln"),
    ],
)
def test_a_limiting_parameter_gives_the_simpler_rule_exactly(rule: str, same_as: str) -> None:
    windows = random_tokens(2, length=9)
    pairs = [
        (model.flat_SP, *losses_and_gradients(model, windows))
        for model in (make_model(name, seeds=(0, 1), depth=DEPTH) for name in (rule, same_as))
    ]
    for ours, theirs in zip(*pairs, strict=True):
        assert torch.equal(ours, theirs)


def test_rules_that_differ_do_not_agree() -> None:
    """Guards the comparisons above: the inputs tell the six rules apart."""
    windows = random_tokens(1)
    models = {rule: make_model(rule, depth=DEPTH) for rule in SIX}
    losses = {rule: float(as_numbers(models[rule].losses(windows))) for rule in SIX}
    assert len({round(loss, 9) for loss in losses.values()}) == len(SIX)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("rule", SIX)
def test_gradients_of_one_block_agree_with_finite_differences(
    rule: str, is_fused: bool
) -> None:
    small = {"depth": 2, "width": 4, "heads": 2, "kv_heads": 1, "hidden": 3}
    model = stirred(make_model(rule, vocab=3, is_fused=is_fused, **small))
    windows = random_tokens(1, batch=1, length=4, vocab=3)

    def loss_of(flat: Tensor) -> Tensor:
        model.flat_SP = flat
        return model.losses(windows)

    assert torch.autograd.gradcheck(loss_of, (model.flat_SP.detach().requires_grad_(),))
