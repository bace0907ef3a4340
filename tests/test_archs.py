"""Architectures by name, and the facts that each rule states about itself."""

import math
from pathlib import Path
from typing import Any

import pytest
from helpers import EVERY_RULE, SIX, refusal

from keelbench.archs import ARCHS, PAPER_ARCHS, ResidualRule, Site, canonical_name, make_rule
from keelbench.layout import sites


def site(index: int, depth: int = 8) -> Site:
    return Site(index, depth)


def slots(arch: str, depth: int = 8) -> list[tuple[str, ...]]:
    return [make_rule(arch).norm_slots(place) for place in sites(depth)]


# Sites


def test_even_sites_are_attention_and_odd_ones_ffn() -> None:
    assert [place.branch for place in sites(4)] == ["attention", "ffn"] * 2
    assert [place.block for place in sites(4)] == [0, 0, 1, 1]
    assert {place.blocks for place in sites(4)} == {2}


# Names


def test_the_papers_six_are_registered_in_the_order_of_its_table() -> None:
    assert set(PAPER_ARCHS) == set(SIX)
    assert tuple(ARCHS.names()[: len(PAPER_ARCHS)]) == PAPER_ARCHS


@pytest.mark.parametrize("arch", SIX)
def test_every_architecture_tells_its_title_equation_and_source(arch: str) -> None:
    rule = make_rule(arch)
    assert rule.title and rule.source and rule.equation
    assert "\n" not in rule.equation


@pytest.mark.parametrize("arch", EVERY_RULE)
def test_a_rule_is_a_value(arch: str) -> None:
    assert make_rule(arch) == make_rule(arch)
    assert hash(make_rule(arch)) == hash(make_rule(arch))
    assert [other for other in EVERY_RULE if make_rule(other) == make_rule(arch)] == [arch]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("keel", "keel"),
        (" keel ( ) ", "keel"),
        ("keel(first_block=v2)", "keel"),
        ("keel(first_block='v1', alpha=64)", "keel(alpha=64, first_block=v1)"),
        ("mix_ln(post_fraction=0.25)", "mix_ln"),
        ("hybridnorm(star=True)", "hybridnorm(star=true)"),
        ("deepnorm(beta=deepnet)", "deepnorm(beta=deepnet)"),
    ],
)
def test_an_architecture_has_one_spelling(text: str, canonical: str) -> None:
    assert canonical_name(text) == canonical
    assert canonical_name(canonical) == canonical
    assert make_rule(text) == make_rule(canonical)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kel", ["unknown architecture 'kel'", "did you mean 'keel'?", "known: post_ln"]),
        ("transformer", ["unknown architecture 'transformer'", "pre_ln"]),
        ("", ["unknown architecture ''"]),
        ("keel(alfa=3)", ["no parameter 'alfa'", "did you mean 'alpha'?", "first_block"]),
        ("pre_ln(alpha=3)", ["pre_ln has no parameter 'alpha'", "it has none"]),
        ("keel(title='x')", ["no parameter 'title'"]),
        ("keel(3)", ["cannot read 'keel(3)'", "name(key=value"]),
        ("keel(alpha=2*3)", ["cannot read", "literal"]),
        ("keel(alpha=1, alpha=2)", ["cannot read"]),
        ("keel(**{})", ["cannot read"]),
        ("keel(alpha=", ["cannot read"]),
        ("keel(alpha=0)", ["keel: alpha is 0", "a number > 0"]),
        ("keel(alpha=-2.5)", ["alpha is -2.5"]),
        ("keel(alpha=true)", ["alpha is True", "a number > 0"]),
        ("keel(alpha=big)", ["alpha is 'big'"]),
        ("keel(first_block=v3)", ["first_block is 'v3'", "v2, v1 or none"]),
        ("deepnorm(alpha=0)", ["deepnorm: alpha is 0"]),
        ("deepnorm(beta=xavier)", ["beta is 'xavier'", "keel, deepnet or a number > 0"]),
        ("deepnorm(beta=0)", ["beta is 0"]),
        ("hybridnorm(star=1)", ["star is 1", "true or false"]),
        ("mix_ln(post_fraction=1.5)", ["post_fraction is 1.5", "0 to 1"]),
        ("mix_ln(post_fraction=some)", ["post_fraction is 'some'"]),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_allowed(text: str, said: list[str]) -> None:
    message = refusal(lambda: make_rule(text))
    assert all(part in message for part in said), message


USER_RULE = """
from dataclasses import dataclass
from keelbench.archs import ResidualRule

@dataclass(frozen=True)
class Sandwich(ResidualRule):
    scale: float = 1.0
    title = "Sandwich-LN"

    def norm_slots(self, site):
        return ("in", "out")

    def step(self, x, branch, norms, site):
        return x + self.scale * norms["out"](branch(norms["in"](x)))

@dataclass(frozen=True)
class Unfinished(ResidualRule):
    def norm_slots(self, site):
        return ()

not_a_rule = 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "my rules.py"
    path.write_text(USER_RULE)
    return path


def test_a_users_rule_comes_from_a_file_with_parameters(user_file: Path) -> None:
    rule = make_rule(f"{user_file}:Sandwich(scale=0.5)")
    assert isinstance(rule, ResidualRule)
    assert rule == type(rule)(scale=0.5)  # type: ignore[call-arg]
    assert canonical_name(f"{user_file}:Sandwich(scale=1.0)") == f"{user_file}:Sandwich"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Sandwhich", "did you mean 'Sandwich'?"),
        ("not_a_rule", "is no architecture"),
        ("Sandwich(size=2)", "it has scale"),
        ("Unfinished", "cannot make"),
    ],
)
def test_what_is_wrong_with_a_users_rule_is_said(user_file: Path, name: str, said: str) -> None:
    assert said in refusal(lambda: make_rule(f"{user_file}:{name}"))


# Formulas (values of shared/architectures.md, section 2.3: computed there by hand)


@pytest.mark.parametrize(
    ("blocks", "alpha", "beta"), [(8, 2.000, 0.354), (32, 2.828, 0.250), (256, 4.757, 0.149)]
)
def test_deepnorm_has_the_constants_of_deepnet(blocks: int, alpha: float, beta: float) -> None:
    rule: Any = make_rule("deepnorm(beta=deepnet)")
    assert rule.alpha_at(2 * blocks) == pytest.approx(alpha, abs=5e-4)
    assert rule.alpha_at(2 * blocks) == pytest.approx((2 * blocks) ** 0.25)
    assert rule.beta_at(2 * blocks) == pytest.approx(beta, abs=5e-4)
    assert rule.beta_at(2 * blocks) == pytest.approx((8 * blocks) ** -0.25)


def test_deepnorm_by_default_has_the_beta_of_the_keel_paper() -> None:
    rule: Any = make_rule("deepnorm")
    assert rule.beta_at(64) == pytest.approx(64**-0.25)
    deepnet: Any = make_rule("deepnorm(beta=deepnet)")
    assert rule.beta_at(64) / deepnet.beta_at(64) == pytest.approx(math.sqrt(2))


def test_deepnorm_scales_values_outputs_and_ffn_but_not_queries_and_keys() -> None:
    rule = make_rule("deepnorm(beta=0.3)")
    gains = {weight: rule.gain(site(2), weight) for weight in ("q", "k", "v", "out")}
    assert gains == {"q": 1.0, "k": 1.0, "v": 0.3, "out": 0.3}
    assert {rule.gain(site(3), weight) for weight in ("gate", "up", "down")} == {0.3}


@pytest.mark.parametrize("arch", [arch for arch in EVERY_RULE if arch != "deepnorm"])
def test_the_others_scale_no_initial_weight(arch: str) -> None:
    rule = make_rule(arch)
    kinds = ("q", "k", "v", "out", "gate", "up", "down")
    assert {rule.gain(place, weight) for place in sites(8) for weight in kinds} == {1.0}


def test_keels_alpha_is_the_depth_but_for_the_first_block() -> None:
    rule: Any = make_rule("keel")
    assert [rule.alpha_at(place) for place in sites(6)] == [1, 1, 6, 6, 6, 6]
    assert rule.alpha_at(site(511, 512)) == 512
    without: Any = make_rule("keel(first_block=none)")
    assert [without.alpha_at(place) for place in sites(4)] == [4, 4, 4, 4]
    tuned: Any = make_rule("keel(alpha=2.5)")
    assert [tuned.alpha_at(place) for place in sites(4)] == [1, 1, 2.5, 2.5]


@pytest.mark.parametrize(
    ("first_block", "norms"), [("v2", (1, 2)), ("v1", (1, 1)), ("none", (2, 2))]
)
def test_keels_first_block_has_the_norms_of_its_version(
    first_block: str, norms: tuple[int, int]
) -> None:
    counts = [len(names) for names in slots(f"keel(first_block={first_block})")]
    assert counts == [*norms, 2, 2, 2, 2, 2, 2]
    assert not make_rule(f"keel(first_block={first_block})").final_norm


@pytest.mark.parametrize(
    ("fraction", "depth", "post_blocks"),
    [(0.25, 64, 8), (0.25, 8, 1), (0.25, 14, 1), (0.25, 6, 0), (0.0, 8, 0), (1.0, 8, 4)],
)
def test_mix_ln_rounds_the_number_of_post_ln_blocks_down(
    fraction: float, depth: int, post_blocks: int
) -> None:
    rule: Any = make_rule(f"mix_ln(post_fraction={fraction})")
    is_post = [rule.is_post(place) for place in sites(depth)]
    assert is_post == [place.block < post_blocks for place in sites(depth)]
    assert rule.facts(depth)["Post-LN blocks"] == f"{post_blocks} of {depth // 2}"


def test_hybridnorm_norms_qkv_in_attention_and_the_trunk_in_the_ffn() -> None:
    rule = make_rule("hybridnorm")
    assert [rule.qkv_norm(place) for place in sites(4)] == [True, False] * 2
    assert slots("hybridnorm", 4) == [(), ("in",), (), ("in",)]
    assert slots("hybridnorm(star=true)", 4) == [("in",), ("in",), (), ("in",)]


@pytest.mark.parametrize("arch", SIX)
def test_a_final_norm_follows_where_the_output_is_not_normed(arch: str) -> None:
    assert make_rule(arch).final_norm == (arch in ("pre_ln", "mix_ln", "hybridnorm"))


@pytest.mark.parametrize(
    ("arch", "fact"), [("keel", ("α", "512")), ("deepnorm", ("α", "4.757"))]
)
def test_facts_for_describe_are_those_of_the_depth(arch: str, fact: tuple[str, str]) -> None:
    assert make_rule(arch).facts(512)[fact[0]] == fact[1]
