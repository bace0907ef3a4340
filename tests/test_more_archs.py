"""The architectures beyond the six: each against its formula, written out a second time."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    assert_close,
    by_name,
    losses_and_gradients,
    make_model,
    random_tokens,
    refusal,
    stirred,
)
from torch import Tensor

from keelbench import contract
from keelbench.archs import ALL_ARCHS, ARCHS, PAPER_ARCHS, Site, make_rule
from keelbench.contract import all_passed, check_rule
from keelbench.layout import sites
from keelbench.model import LaneModel
from keelbench.norms import NORM_EPS

MORE = ALL_ARCHS[len(PAPER_ARCHS) :]


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + NORM_EPS).sqrt() * gain


class Parts:
    """A model's weights under short names, and its branches, for formulas below."""

    def __init__(self, model: LaneModel, place: Site) -> None:
        self.weights = by_name(model, model.flat_SP)
        self.site = place
        self.branch = model.branch(place, model.weights(), seq=8)

    def gain(self, slot: str) -> Tensor:
        return self.weights[f"{self.site.index}.{self.site.branch}.norm_{slot}"]

    def param(self, slot: str) -> Tensor:
        return self.weights[f"{self.site.index}.rule.{slot}"]

    def shared(self, slot: str) -> Tensor:
        return self.weights[f"{2 * self.site.block}.rule.{slot}"]


def keel_alpha(p: Parts) -> float:
    return 1.0 if p.site.block == 0 else float(p.site.depth)


def outer(p: Parts, y: Tensor) -> Tensor:
    return y if p.site.index == 0 else norm(y, p.gain("out"))


def highway(p: Parts, x: Tensor) -> Tensor:
    u = norm(x, p.gain("in"))
    gate = torch.sigmoid(torch.bmm(u, p.param("gate")) + p.param("gate_bias"))
    return (1 - gate) * x + gate * p.branch(u)


FORMULAS: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "keel_naive": lambda p, x: outer(p, keel_alpha(p) * x + p.branch(x)),
    "keel_beta": lambda p, x: outer(p, keel_alpha(p) * x + p.branch(p.param("beta") * x)),
    "keel_norm_beta": lambda p, x: outer(
        p, keel_alpha(p) * x + p.branch(p.param("beta") * norm(x, p.gain("in")))
    ),
    "highway": highway,
    "resnet": lambda p, x: x + p.branch(x),
    "sandwich": lambda p, x: x + norm(p.branch(norm(x, p.gain("in"))), p.gain("branch")),
    "reordered": lambda p, x: x + norm(p.branch(x), p.gain("branch")),
    "lns": lambda p, x: x + p.branch(norm(x, p.gain("in")) / math.sqrt(p.site.index // 2 + 1)),
    "rezero": lambda p, x: x + p.shared("a") * p.branch(x),
    "sub_ln": lambda p, x: x + p.branch(norm(x, p.gain("in"))),
}


def logits_by_formula(model: LaneModel, tokens: Tensor, formula: Any) -> Tensor:
    """Logits of a single-stream rule from its formula alone."""
    weights = by_name(model, model.flat_SP)
    x = weights["embedding"][0][tokens[0].flatten()][None]
    for place in sites(model.spec.depth):
        x = formula(Parts(model, place), x)
    if model.rule.final_norm:
        x = norm(x, weights["final"])
    return torch.bmm(x, weights["head"])


@pytest.mark.parametrize("arch", FORMULAS)
def test_a_rule_computes_its_formula(arch: str) -> None:
    model = stirred(make_model(arch))
    tokens = random_tokens(length=8)
    with torch.no_grad():
        expected = logits_by_formula(model, tokens, FORMULAS[arch])
        assert_close(model.logits(tokens), expected, 1e-12)


def test_residual_sums_its_branches_beside_a_post_ln_stream() -> None:
    model = stirred(make_model("residual"))
    tokens, weights = random_tokens(length=8), by_name(model, model.flat_SP)
    x = r = weights["embedding"][0][tokens[0].flatten()][None]
    for place in sites(4):
        p = Parts(model, place)
        out = p.branch(x)
        x, r = norm(x + out, p.gain("out")), r + out
    expected = torch.bmm(x + norm(r, weights["final"]), weights["head"])
    assert_close(model.logits(tokens), expected, 1e-12)


def test_siamese_feeds_every_branch_from_both_streams() -> None:
    model = stirred(make_model("siamese"))
    tokens, weights = random_tokens(length=8), by_name(model, model.flat_SP)
    x = y = weights["embedding"][0][tokens[0].flatten()][None]
    for place in sites(4):
        p = Parts(model, place)
        x = norm(x, p.gain("x"))
        out = p.branch(norm(x + norm(y, p.gain("y")), p.gain("in")))
        x, y = x + out / math.sqrt((place.block + 1) * 2), y + out
    x = norm(norm(x, p.gain("end_x")) + norm(y, p.gain("end_y")), weights["final"])
    assert_close(model.logits(tokens), torch.bmm(x, weights["head"]), 1e-12)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_hyper_connections_read_write_and_mix_with_matrices(n: int) -> None:
    """The paper's appendix: h0 = A_m^T H; H' = A_r^T H; H <- B^T F(N(h0)) + H'."""
    model = stirred(make_model(f"hyper_connections(n={n})"))
    tokens, weights = random_tokens(length=8), by_name(model, model.flat_SP)
    h_nND = weights["embedding"][0][tokens[0].flatten()].expand(n, -1, -1)
    for place in sites(4):
        p = Parts(model, place)
        read = torch.stack([p.param(f"read_{i}").flatten()[0] for i in range(n)])
        write = torch.stack([p.param(f"write_{i}").flatten()[0] for i in range(n)])
        rows = [[p.param(f"mix_{i}_{j}").flatten()[0] for j in range(n)] for i in range(n)]
        mix = torch.stack([torch.stack(row) for row in rows])
        h0 = torch.einsum("n,nkd->kd", read, h_nND)[None]
        out = p.branch(norm(h0, p.gain("in")))
        h_nND = write[:, None, None] * out + torch.einsum("ij,jkd->ikd", mix, h_nND)
    x = norm(h_nND.sum(0)[None], weights["final"])
    assert_close(model.logits(tokens), torch.bmm(x, weights["head"]), 1e-12)


# Relations between rules


def copy_weights(source: LaneModel, target: LaneModel) -> None:
    """Tensors that both have, by name."""
    given = by_name(source, source.flat_SP.detach())
    with torch.no_grad():
        for name, part in by_name(target, target.flat_SP).items():
            if name in given:
                part.copy_(given[name])


def test_keel_norm_beta_equals_keel_when_beta_is_absorbed_by_the_gain() -> None:
    with_beta, keel = stirred(make_model("keel_norm_beta")), make_model("keel")
    copy_weights(with_beta, keel)
    given = by_name(with_beta, with_beta.flat_SP.detach())
    with torch.no_grad():
        for name, part in by_name(keel, keel.flat_SP).items():
            if name.endswith("norm_in"):
                part.mul_(given[f"{name.partition('.')[0]}.rule.beta"])
    tokens = random_tokens()
    assert_close(with_beta.losses(tokens), keel.losses(tokens), 1e-13)
    assert not torch.allclose(with_beta.losses(tokens), make_model("keel").losses(tokens))


def test_without_its_beta_keel_beta_is_keel_naive() -> None:
    tokens = random_tokens()
    naive, beta = make_model("keel_naive"), make_model("keel_beta")
    assert_close(beta.losses(tokens), naive.losses(tokens), 1e-13)


def test_keel_naive_with_deepnorms_alpha_is_deepnorm_without_its_beta() -> None:
    tokens = random_tokens()
    naive = make_model(f"keel_naive(alpha={4**0.25!r}, first_block=none)")
    assert_close(naive.losses(tokens), make_model("deepnorm(beta=1)").losses(tokens), 1e-13)


def test_hyper_connections_start_as_pre_ln() -> None:
    tokens = random_tokens()
    pre_ln = make_model("pre_ln", depth=6).losses(tokens)
    one = make_model("hyper_connections(n=1)", depth=6).losses(tokens)
    assert_close(one, pre_ln, 1e-13)
    four = make_model("hyper_connections", depth=6).losses(tokens)
    assert_close(four, pre_ln, 1e-3)  # the final norm's eps weighs 16 times less


def test_hyper_connections_first_read_one_trunk_in_turn_and_write_to_all() -> None:
    """The paper's init: A_m = e_(l mod n), B = 1, A_r = I."""
    for index in (0, 1, 5):
        slots = make_rule("hyper_connections(n=3)").param_slots(Site(index, 8))
        read = [slots[f"read_{i}"].init for i in range(3)]
        assert read == [float(i == index % 3) for i in range(3)]
        assert [slots[f"write_{i}"].init for i in range(3)] == [1, 1, 1]
        mix = [[slots[f"mix_{i}_{j}"].init for j in range(3)] for i in range(3)]
        assert mix == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_lns_is_pre_ln_in_the_first_block_only() -> None:
    tokens = random_tokens()
    shallow = [make_model(arch, depth=2).losses(tokens) for arch in ("lns", "pre_ln")]
    assert_close(shallow[0], shallow[1], 1e-13)
    deep = [make_model(arch, depth=6).losses(tokens) for arch in ("lns", "pre_ln")]
    assert not torch.allclose(deep[0], deep[1], rtol=1e-6)


def test_rezero_starts_closed_and_its_scalar_opens_both_branches_of_a_block() -> None:
    model = make_model("rezero")
    _, gradient = losses_and_gradients(model, random_tokens())
    found = by_name(model, gradient)
    names = [name for name in found if ".rule." in name]
    assert names == ["0.rule.a", "2.rule.a"]
    assert all(found[name].abs().item() > 0 for name in names)
    assert not any(found[name].any() for name in found if ".qkv" in name or ".down" in name)


def test_highways_bias_decides_between_carrying_and_transforming() -> None:
    tokens = random_tokens()
    closed = make_model("highway(bias=-60)").losses(tokens)
    x = make_model("highway(bias=-60)")
    with torch.no_grad():
        for name, part in by_name(x, x.flat_SP).items():
            if name.endswith((".out", ".down")):
                part.zero_()
    assert_close(closed, x.losses(tokens), 1e-13)
    assert not torch.allclose(closed, make_model("highway(bias=2)").losses(tokens))


def test_sub_ln_scales_values_outputs_and_ffn_by_the_root_of_the_log_of_the_depth() -> None:
    rule, place = make_rule("sub_ln"), Site(3, 48)
    gains = {name: rule.gain(place, name) for name in ("q", "k", "v", "out", "gate", "down")}
    root = pytest.approx(math.sqrt(math.log(48)))
    assert gains == {"q": 1, "k": 1, "v": root, "out": root, "gate": root, "down": root}
    names = [tensor.name for tensor in make_model("sub_ln", depth=2).tensors]
    assert "0.attention.inner_norm" in names and "1.ffn.inner_norm" in names


# Names, parameters, switches


def test_the_others_come_after_the_six() -> None:
    assert tuple(ARCHS.names()[: len(ALL_ARCHS)]) == ALL_ARCHS
    assert ALL_ARCHS[:6] == PAPER_ARCHS


@pytest.mark.parametrize("arch", MORE)
def test_each_tells_its_title_equation_and_source(arch: str) -> None:
    rule = make_rule(arch)
    assert rule.title and rule.source and rule.equation and "\n" not in rule.equation
    assert rule == make_rule(arch) and hash(rule) == hash(make_rule(arch))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("highway(bias=open)", "highway: bias is 'open'"),
        ("highway(bias=true)", "highway: bias is True"),
        ("hyper_connections(n=0)", "n is 0: allowed is a whole number, 1 to 16"),
        ("hyper_connections(n=2.5)", "n is 2.5"),
        ("hyper_connections(n=true)", "n is True"),
        ("keel_beta(alpha=0)", "alpha is 0"),
        ("keel_naive(first_block=v3)", "first_block is 'v3'"),
    ],
)
def test_a_wrong_parameter_is_refused(text: str, said: str) -> None:
    assert said in refusal(lambda: make_rule(text))


@pytest.mark.parametrize("arch", ALL_ARCHS)
def test_every_rule_keeps_the_contract(arch: str) -> None:
    findings = check_rule(arch)
    assert all_passed(findings), [f.reason for f in findings if not f.passed]


SWITCHES: tuple[dict[str, Any], ...] = (
    {"qk_norm": True},
    {"norm": "layernorm"},
    {"norm": "dyt", "qk_norm": True},
)


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
@pytest.mark.parametrize("arch", ALL_ARCHS)
def test_every_rule_keeps_the_contract_under_every_switch(
    arch: str, switch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "EDGE_DEPTHS", ())
    findings = check_rule(arch, **switch)
    assert all_passed(findings), [f.reason for f in findings if not f.passed]


@pytest.mark.parametrize("arch", ALL_ARCHS)
def test_qk_norm_is_a_switch_on_every_rule(arch: str) -> None:
    plain = {tensor.name for tensor in make_model(arch).tensors}
    switched = {tensor.name for tensor in make_model(arch, qk_norm=True).tensors}
    added = {"0.attention.q_norm", "0.attention.k_norm"}
    assert added <= switched
    assert bool(added - plain) == (arch != "hybridnorm")
