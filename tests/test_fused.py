"""The hand-written backward passes equal the plain expressions that they replace."""

from collections.abc import Callable

import pytest
import torch
from helpers import (
    ALL_RULES,
    assert_close,
    losses_and_gradients,
    make_model,
    random_floats,
    random_tokens,
    stirred,
)
from torch import Tensor

from keelbench import fused
from keelbench.model import Rope

EXACT = 1e-12
SINGLE = 2e-6
"""Relative to the largest value: some ten float32 rounding errors."""

S, B, T, D, F, HEADS, KV_HEADS, K = 2, 3, 5, 8, 6, 4, 2, 6
"""Lanes, batch, time, width, hidden, query heads, KV heads, head dimension."""

Op = Callable[..., Tensor]


def turn(dtype: torch.dtype) -> Tensor:
    return Rope(T, K, torch.device("cpu"), dtype).turn_1T1K


def fused_attend(qkv: Tensor) -> Tensor:
    return fused.attend(qkv, turn(qkv.dtype), HEADS, KV_HEADS)


def plain_rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def plain_swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = x @ gate_up[..., :F], x @ gate_up[..., F:]
    return (gate * torch.sigmoid(gate) * up) @ down


def plain_attend(qkv: Tensor) -> Tensor:
    angle = torch.angle(turn(qkv.dtype))
    cosine, sine = angle.cos(), angle.sin()
    rotated = HEADS + KV_HEADS
    even, odd = qkv[:, :, :rotated, 0::2], qkv[:, :, :rotated, 1::2]
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    q, k = turned.flatten(-2).transpose(1, 2).split((HEADS, KV_HEADS), dim=1)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, qkv[:, :, rotated:].transpose(1, 2)))
    scores = (q @ k.transpose(-1, -2) / K**0.5).masked_fill(
        torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf")
    )
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


CASES: dict[str, tuple[Op, Op, list[tuple[int, ...]]]] = {
    "rms_norm": (fused.rms_norm, plain_rms_norm, [(S, B * T, D), (S, 1, D)]),
    "swiglu": (fused.swiglu, plain_swiglu, [(S, B * T, D), (S, D, 2 * F), (S, F, D)]),
    "attend": (fused_attend, plain_attend, [(S * B, T, HEADS + 2 * KV_HEADS, K)]),
}


def inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    return [
        random_floats(*shape, seed=seed, dtype=dtype).requires_grad_()
        for seed, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)]
)
@pytest.mark.parametrize("name", list(CASES))
def test_value_and_every_gradient_equal_the_plain_expression(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    op, plain, shapes = CASES[name]
    arguments, wide = inputs(shapes, dtype), inputs(shapes, torch.float64)
    value, expected = op(*arguments), plain(*wide)
    assert value.dtype == dtype
    assert_close(value, expected, tolerance)
    direction = random_floats(*value.shape, seed=99)
    gradients = torch.autograd.grad((value * direction.to(dtype)).sum(), arguments)
    for ours, theirs in zip(
        gradients, torch.autograd.grad((expected * direction).sum(), wide), strict=True
    ):
        assert_close(ours, theirs, tolerance)


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_agree_with_finite_differences(name: str) -> None:
    op, _, shapes = CASES[name]
    assert torch.autograd.gradcheck(op, inputs(shapes, torch.float64), fast_mode=True)


@pytest.mark.parametrize("name", list(CASES))
def test_neither_inputs_nor_incoming_gradients_are_changed(name: str) -> None:
    op, _, shapes = CASES[name]
    arguments = inputs(shapes, torch.float64)
    value = op(*arguments)
    incoming = random_floats(*value.shape, seed=5)
    before = [part.detach().clone() for part in (*arguments, incoming)]
    value.backward(incoming)
    for part, old in zip((*arguments, incoming), before, strict=True):
        assert torch.equal(part.detach(), old)


@pytest.mark.parametrize("name", list(CASES))
def test_incoming_gradients_may_be_expanded_views(name: str) -> None:
    op, plain, shapes = CASES[name]
    arguments = inputs(shapes, torch.float64)
    ours = torch.autograd.grad(op(*arguments).sum(), arguments)
    theirs = torch.autograd.grad(plain(*arguments).sum(), arguments)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, EXACT)


@pytest.mark.parametrize("name", list(CASES))
def test_a_second_derivative_is_refused_rather_than_wrong(name: str) -> None:
    op, _, shapes = CASES[name]
    arguments = inputs(shapes, torch.float64)
    (first, *_) = torch.autograd.grad(
        op(*arguments).square().sum(), arguments, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("rule", "settings"),
    [(rule, {}) for rule in ALL_RULES]
    + [
        ("keel", {"qk_norm": True}),
        ("keel", {"norm": "layernorm"}),
        ("pre_ln", {"norm": "dyt"}),
    ],
)
def test_the_fused_model_equals_the_plain_one(rule: str, settings: dict[str, str]) -> None:
    windows = random_tokens(2, length=9)
    (loss, gradient), (plain_loss, plain_gradient) = (
        losses_and_gradients(
            stirred(make_model(rule, seeds=(0, 1), is_fused=is_fused, **settings)), windows
        )
        for is_fused in (True, False)
    )
    assert_close(loss, plain_loss, EXACT)
    assert_close(gradient, plain_gradient, EXACT)


@pytest.mark.parametrize("rule", ["keel", "hybridnorm"])
def test_in_float32_both_paths_are_equally_close_to_float64(rule: str) -> None:
    windows = random_tokens(2, length=9)
    start = stirred(make_model(rule, seeds=(0, 1), dtype=torch.float32)).flat_SP.detach()

    def outcome(dtype: torch.dtype, is_fused: bool) -> tuple[Tensor, Tensor]:
        model = make_model(rule, seeds=(0, 1), dtype=dtype, is_fused=is_fused)
        model.flat_SP = start.to(dtype).requires_grad_()
        return losses_and_gradients(model, windows)

    exact = outcome(torch.float64, False)
    for is_fused in (True, False):
        for part, reference in zip(outcome(torch.float32, is_fused), exact, strict=True):
            assert part.dtype == torch.float32
            assert_close(part, reference, 10 * SINGLE)


def test_the_fused_path_is_taken_wherever_products_are_not_under_autocast() -> None:
    assert make_model().is_fused
    assert make_model(dtype=torch.float32).is_fused
    assert not make_model(dtype=torch.float32, compute_dtype=torch.bfloat16).is_fused
    assert not make_model(is_fused=False).is_fused


@pytest.mark.parametrize(
    ("batch", "time", "heads", "kv_heads", "head_dim"),
    [
        (2, 70, 4, 2, 24),  # whole vectors and a rest; a last strip of queries that is not full
        (2, 64, 4, 2, 16),
        (1, 16, 4, 4, 64),
        (3, 33, 6, 3, 40),
        (2, 50, 4, 1, 18),
        (1, 7, 2, 1, 2),
    ],
)
def test_attention_of_any_shape_equals_torchs(
    batch: int, time: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    angles = Rope(time, head_dim, torch.device("cpu"), torch.float64).turn_1T1K
    qkv = random_floats(batch, time, heads + 2 * kv_heads, head_dim).requires_grad_()
    ours = fused.attend(qkv, angles, heads, kv_heads)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(-2).transpose(1, 2)

    theirs = torch.nn.functional.scaled_dot_product_attention(
        turned(q), turned(k), v.transpose(1, 2), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    weights = random_floats(*theirs.shape, seed=3)
    assert_close(ours.reshape(theirs.shape), theirs, EXACT)
    (our_grad,) = torch.autograd.grad((ours.reshape(theirs.shape) * weights).sum(), qkv)
    (their_grad,) = torch.autograd.grad((theirs * weights).sum(), qkv)
    assert_close(our_grad, their_grad, EXACT)
