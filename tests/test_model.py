"""The lane-batched model: size, initialization, causality, precision, independent lanes."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import (
    ALL_RULES,
    EVERY_RULE,
    SIX,
    VOCAB,
    assert_close,
    by_name,
    losses_and_gradients,
    make_model,
    random_floats,
    random_tokens,
    shape,
    stirred,
)
from torch import Tensor

from keelbench.archs import Branch, Norms, Param, ResidualRule, Site, make_rule
from keelbench.layout import flops_per_token, layout, parameter_count
from keelbench.model import LaneModel
from keelbench.norms import SiteNorms, dyt, layer_norm

# Size

NORMS_PER_MODEL = {
    "post_ln": lambda depth: depth,
    "deepnorm": lambda depth: depth,
    "pre_ln": lambda depth: depth + 1,
    "mix_ln": lambda depth: depth + 1,
    "hybridnorm": lambda depth: depth // 2 + 1,
    "hybridnorm(star=true)": lambda depth: depth // 2 + 2,
    "keel": lambda depth: 2 * depth - 1,
    "keel(first_block=v1)": lambda depth: 2 * depth - 2,
    "keel(first_block=none)": lambda depth: 2 * depth,
}
"""Norms over the width, final norm included."""


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("arch", list(NORMS_PER_MODEL))
def test_the_number_of_parameters_is_the_closed_form(arch: str, qk_norm: bool) -> None:
    depth, d, heads, kv, f = 8, 24, 4, 2, 40
    k = d // heads
    spec = shape(arch, depth=depth, width=d, hidden=f, qk_norm=qk_norm)
    attention = d * (d + 2 * kv * k) + d * d
    head_gains = 3 * k if arch.startswith("hybridnorm") else 2 * k if qk_norm else 0
    blocks = depth // 2 * (attention + 3 * d * f + head_gains)
    expected = 2 * VOCAB * d + blocks + NORMS_PER_MODEL[arch](depth) * d
    assert parameter_count(layout(spec, make_rule(arch), VOCAB)) == expected
    model = make_model(arch, depth=depth, width=d, hidden=f, qk_norm=qk_norm)
    assert model.flat_SP.shape == (1, expected)
    assert model.parameters_per_lane == expected


def test_flops_are_six_per_matrix_weight_plus_attention_scores() -> None:
    spec = shape("pre_ln", depth=4, width=16).resolved()
    tensors = layout(spec, make_rule("pre_ln"), VOCAB)
    matrices = 2 * (16 * (16 + 2 * 8) + 16 * 16 + 3 * 16 * 48) + 16 * VOCAB
    keys_per_query = (9 + 1) / 2
    scores = 2 * (2 * 2 * 16 * keys_per_query)
    assert flops_per_token(spec, tensors, seq=9) == 6 * matrices + 3 * scores


# Initialization


@pytest.mark.parametrize("arch", SIX)
def test_a_fresh_model_knows_no_more_than_the_size_of_the_vocabulary(arch: str) -> None:
    """Logits are normal with std 0.64 where the head reads unit RMS: ln V + 0.64^2 / 2."""
    model = make_model(arch, vocab=64, seeds=(0, 1, 2), width=64, dtype=torch.float32)
    losses = model.losses(random_tokens(3, batch=8, length=33, vocab=64))
    expected = math.log(64) + 0.64**2 / 2
    assert torch.allclose(losses, torch.tensor(expected), atol=0.12), losses


@pytest.mark.parametrize("arch", ["keel", "deepnorm(beta=0.5)", "hybridnorm"])
def test_every_tensor_starts_at_its_documented_scale(arch: str) -> None:
    model = make_model(arch, vocab=64, width=64)
    base = 0.64 / math.sqrt(64)
    for tensor in model.tensors:
        parts = model.weights()[tensor.name][0].split([p.columns for p in tensor.pieces], dim=1)
        for piece, part in zip(tensor.pieces, parts, strict=True):
            if tensor.kind == "vector":
                assert torch.all(part == 1)
                continue
            is_scaled = arch.startswith("deepnorm") and piece.name not in ("q", "k", "head")
            expected = 0.02 if piece.name == "embedding" else base * (0.5 if is_scaled else 1)
            error_of_std = 1 / math.sqrt(2 * part.numel())
            assert part.std().item() == pytest.approx(expected, rel=5 * error_of_std)
            assert abs(part.mean().item()) < 5 * expected / math.sqrt(part.numel())


def test_init_and_embedding_std_can_be_chosen() -> None:
    weights = make_model(width=64, vocab=64, init_std=0.3, embed_std=0.7).weights()
    assert weights["embedding"].std().item() == pytest.approx(0.7, rel=0.1)
    assert weights["0.attention.qkv"].std().item() == pytest.approx(0.3, rel=0.1)
    assert weights["head"].std().item() == pytest.approx(0.3, rel=0.1)


def test_rules_with_one_seed_share_every_tensor_that_they_have_in_common() -> None:
    models = {arch: make_model(arch, seeds=(5,)).weights() for arch in SIX}
    reference = models.pop("pre_ln")
    for arch, weights in models.items():
        shared = set(weights) & set(reference)
        assert len(shared) >= 2 + 2 * 4, "embedding, head and two matrices per site"
        if arch == "deepnorm":
            shared = {"embedding", "head"}
        for name in shared:
            assert torch.equal(weights[name], reference[name]), (arch, name)


def test_deepnorms_weights_are_the_shared_draw_times_beta() -> None:
    plain = make_model("pre_ln").weights()
    scaled = make_model("deepnorm(beta=0.5)").weights()
    for name in ("0.attention.out", "1.ffn.gate_up", "1.ffn.down"):
        assert_close(scaled[name], 0.5 * plain[name], 1e-7)
    q_and_k = slice(0, 16 + 8)
    assert torch.equal(
        scaled["0.attention.qkv"][..., q_and_k], plain["0.attention.qkv"][..., q_and_k]
    )
    assert_close(
        scaled["0.attention.qkv"][..., 24:], 0.5 * plain["0.attention.qkv"][..., 24:], 1e-7
    )


def test_no_two_tensors_or_seeds_share_a_draw() -> None:
    model = make_model("pre_ln", seeds=(0, 1))
    weights = model.weights()
    first, second = weights["0.attention.qkv"], weights["2.attention.qkv"]
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_a_lanes_weights_depend_on_its_seed_alone() -> None:
    together = make_model(seeds=(3, 1, 4))
    alone = make_model(seeds=(4,))
    assert torch.equal(together.flat_SP[2], alone.flat_SP[0])


# Causality and independence


@pytest.mark.parametrize("arch", ALL_RULES)
def test_no_logit_depends_on_a_later_token(arch: str) -> None:
    time = 6
    model = stirred(make_model(arch, vocab=time))
    tokens = torch.arange(time)[None, None]  # each position has an embedding of its own
    logits = model.logits(tokens)[0]
    for t in range(time):
        (gradient,) = torch.autograd.grad(
            logits[t].square().sum(), model.flat_SP, retain_graph=True
        )
        touched = by_name(model, gradient)["embedding"][0].abs().sum(dim=1)
        assert torch.all(touched[: t + 1] > 0), "every earlier token counts"
        assert torch.all(touched[t + 1 :] == 0), "no later token counts"


def test_neither_rows_of_a_batch_nor_lanes_mix() -> None:
    model = stirred(make_model(seeds=(0, 1)))
    tokens = random_tokens(2, batch=2, length=6)
    changed = tokens.clone()
    changed[1, 1] = (changed[1, 1] + 1) % VOCAB
    before, after = (model.logits(ids).view(2, 2, 6, VOCAB) for ids in (tokens, changed))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1, 0], after[1, 0])
    assert not torch.equal(before[1, 1], after[1, 1])
    (gradient,) = torch.autograd.grad(before[0].square().sum(), model.flat_SP)
    assert torch.any(gradient[0] != 0)
    assert torch.all(gradient[1] == 0)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("arch", ALL_RULES)
def test_a_lane_computes_the_same_bits_in_any_company(arch: str, is_fused: bool) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "is_fused": is_fused, "width": 32}
    windows = random_tokens(3, batch=4, length=17)
    together = make_model(arch, seeds=(0, 1, 2), **options)
    losses, gradients = losses_and_gradients(together, windows)
    for lane in range(3):
        alone = make_model(arch, seeds=(lane,), **options)
        loss, gradient = losses_and_gradients(alone, windows[lane : lane + 1])
        assert torch.equal(loss[0], losses[lane])
        assert torch.equal(gradient[0], gradients[lane])


def test_dropping_lanes_keeps_the_others_weights() -> None:
    model = make_model(seeds=(0, 1, 2))
    before = model.flat_SP.detach().clone()
    model.keep([0, 2])
    assert model.lanes == 2
    assert torch.equal(model.flat_SP, before[[0, 2]])
    assert model.flat_SP.requires_grad and model.flat_SP.is_leaf
    model.keep([])
    assert model.lanes == 0


# Loss


def test_losses_are_the_mean_cross_entropy_of_each_lane() -> None:
    model = make_model(seeds=(0, 1))
    windows = random_tokens(2, batch=3, length=7)
    log_p = model.logits(windows[:, :, :-1]).view(2, 3, 6, VOCAB).log_softmax(-1)
    expected = -log_p.gather(-1, windows[:, :, 1:, None]).mean(dim=(1, 2, 3))
    assert_close(model.losses(windows), expected, 1e-12)


# Precision


def watched(arch: str, seen: list[tuple[str, torch.dtype]]) -> ResidualRule:
    """The same rule, noting the precision of branches and states."""
    rule = make_rule(arch)

    class Watched(type(rule)):  # type: ignore[misc]
        def step(self, state: Tensor, branch: Branch, norms: Norms, site: Site) -> Tensor:
            def spied(x: Tensor) -> Tensor:
                y = branch(x)
                seen.append(("branch", y.dtype))
                return y

            after: Tensor = super().step(state, spied, norms, site)
            seen.append(("state", after.dtype))
            return after

    return Watched(**vars(rule))


def in_bf16(arch: str, rule: ResidualRule, **settings: Any) -> LaneModel:
    spec = shape(arch, **settings)
    return LaneModel(spec, rule, VOCAB, (0,), compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("arch", [*EVERY_RULE, "keel(alpha=512)"])
def test_under_bf16_branches_are_bf16_but_the_trunk_stays_in_float32(arch: str) -> None:
    seen: list[tuple[str, torch.dtype]] = []
    model = in_bf16(arch, watched(arch, seen))
    losses, gradient = losses_and_gradients(model, random_tokens(1))
    assert set(seen) == {("branch", torch.bfloat16), ("state", torch.float32)}
    assert losses.dtype == gradient.dtype == torch.float32


def test_under_bf16_a_branch_512_times_smaller_than_the_trunk_is_not_lost() -> None:
    """bf16 has 8 bits: it resolves no less than one part in 256 of the sum."""
    arch = "keel(alpha=512)"
    model = in_bf16(arch, make_rule(arch))
    place = model.sites[2]
    norms = SiteNorms(model.weights(), place, model.rule, model.norm)
    x = random_floats(1, 8, 16, dtype=torch.float32)
    y = random_floats(1, 8, 16, seed=2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved = model.rule.step(x, lambda _: y, norms, place)
        unmoved = model.rule.step(x, lambda _: torch.zeros_like(y), norms, place)
    sum_ = 512 * x.double() + y.double()
    exact = sum_ / sum_.square().mean(-1, keepdim=True).sqrt()
    trunk = 512 * x.double()
    exact_unmoved = trunk / trunk.square().mean(-1, keepdim=True).sqrt()
    assert_close(moved - unmoved, exact - exact_unmoved, 1e-3)


@pytest.mark.parametrize("settings", [{}, {"qk_norm": True}, {"norm": "layernorm"}])
@pytest.mark.parametrize("arch", ["keel(alpha=512)", "hybridnorm", "pre_ln"])
def test_bf16_agrees_with_float32_to_its_precision(arch: str, settings: dict[str, Any]) -> None:
    windows = random_tokens(1, batch=4, length=17)
    half = in_bf16(arch, make_rule(arch), **settings)
    single = make_model(arch, dtype=torch.float32, **settings)
    loss, gradient = losses_and_gradients(half, windows)
    exact_loss, exact_gradient = losses_and_gradients(single, windows)
    assert_close(loss, exact_loss, 5e-3)
    cosine = torch.nn.functional.cosine_similarity(gradient, exact_gradient)
    assert cosine.item() > 0.999


# Norms


def test_layernorm_is_torchs_with_gain_and_no_bias() -> None:
    x, gain = random_floats(2, 3, 8), random_floats(2, 1, 8, seed=1)
    expected = torch.nn.functional.layer_norm(x, (8,), eps=1e-5) * gain
    assert_close(layer_norm(x, gain), expected, 1e-12)


def test_dynamic_tanh_starts_at_half_the_slope() -> None:
    x, gain, alpha = random_floats(1, 3, 8), torch.full((1, 1, 8), 2.0), torch.tensor(0.5)
    assert_close(dyt(x, gain, alpha), 2.0 * torch.tanh(x / 2), 1e-12)
    weights = make_model("pre_ln", norm="dyt").weights()
    assert weights["0.attention.norm_in.alpha"].tolist() == [[[0.5]]]
    assert weights["final.alpha"].tolist() == [[[0.5]]]


@pytest.mark.parametrize("arch", ["pre_ln", "hybridnorm"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "dyt"])
def test_every_parameter_takes_part_whatever_the_norm(norm: str, arch: str) -> None:
    model = stirred(make_model(arch, norm=norm, qk_norm=True))
    _, gradient = losses_and_gradients(model, random_tokens(1, batch=4, length=17))
    for name, part in by_name(model, gradient).items():
        assert torch.any(part != 0), name


# Rules of one's own


@dataclass(frozen=True)
class ReZero(ResidualRule):
    """x + a * F(x) with one scalar per block, a gate per channel, and a mixing matrix."""

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ()

    def param_slots(self, site: Site) -> dict[str, Param]:
        return {
            "scale": Param("scalar", init=0.5, scope="block"),
            "gate": Param("vector", init=2.0),
            "mix": Param("matrix"),
        }

    def step(self, x: Tensor, branch: Branch, norms: Norms, site: Site) -> Tensor:
        mixed = torch.bmm(branch(x), norms.param("mix"))
        return x + norms.param("scale") * norms.param("gate") * mixed


@dataclass(frozen=True)
class TwoStreams(ResidualRule):
    """ResiDual's shape: a normed and an un-normed stream, joined at the end."""

    @property
    def final_norm(self) -> bool:
        return True

    def inner_norm(self, site: Site) -> bool:
        return True

    def norm_slots(self, site: Site) -> tuple[str, ...]:
        return ("out",)

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def step(
        self, state: tuple[Tensor, Tensor], branch: Branch, norms: Norms, site: Site
    ) -> tuple[Tensor, Tensor]:
        normed, raw = state
        y = branch(normed)
        return norms["out"](normed + y), raw + y

    def finish(self, state: tuple[Tensor, Tensor], norms: Norms) -> Tensor:
        normed, raw = state
        return normed + norms["final"](raw)


def test_a_rule_may_own_scalars_vectors_and_matrices() -> None:
    model = LaneModel(shape(), ReZero(), VOCAB, (0, 1), dtype=torch.float64)
    shapes = {name: tuple(part.shape) for name, part in model.weights().items()}
    owned = {name: size for name, size in shapes.items() if ".rule." in name}
    scales = {f"{block}.rule.scale": (2, 1, 1) for block in (0, 2)}
    gates = {f"{index}.rule.gate": (2, 1, 16) for index in range(4)}
    mixes = {f"{index}.rule.mix": (2, 16, 16) for index in range(4)}
    assert owned == {**scales, **gates, **mixes}
    assert model.weights()["0.rule.scale"].flatten().tolist() == [0.5, 0.5]
    assert torch.all(model.weights()["3.rule.gate"] == 2.0)
    _, gradient = losses_and_gradients(model, random_tokens(2))
    for name, part in by_name(model, gradient).items():
        assert torch.any(part != 0), name


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_rule_may_carry_several_streams_and_norm_inside_the_branch(is_fused: bool) -> None:
    model = LaneModel(
        shape(), TwoStreams(), VOCAB, (0,), dtype=torch.float64, is_fused=is_fused
    )
    assert model.weights()["0.attention.inner_norm"].shape == (1, 1, 16)
    assert model.weights()["1.ffn.inner_norm"].shape == (1, 1, 48)
    losses, gradient = losses_and_gradients(stirred(model), random_tokens(1))
    assert torch.isfinite(losses).all()
    for name, part in by_name(model, gradient).items():
        assert torch.any(part != 0), name
