"""Gradients, activations and updates per sub-layer, against autograd and closed forms."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers import make_model, random_tokens, stirred, tiny_cell
from torch import Tensor

from keelbench.archs import ALL_ARCHS, Site, make_rule
from keelbench.engine import Engine
from keelbench.gradients import (
    Profile,
    fitted_decay,
    gradient_profiles,
    profile_cell,
    summary_rows,
)
from keelbench.layout import sites
from keelbench.norms import SiteNorms
from keelbench.observe import Observed, ShortcutOnly, Skipping
from keelbench.report.plots.gradients import gradient_figure
from keelbench.shortcut import predicted_shortcut, shortcut_factor
from keelbench.specs import CellSpec


def cell_of(arch: str, **settings: object) -> CellSpec:
    return tiny_cell(arch, **{"probe_batch": 2, **settings})


def profile(
    arch: str, seeds: tuple[int, ...] = (0,), at: int = 0, **settings: object
) -> Profile:
    (found,) = profile_cell(cell_of(arch, **settings), seeds, at=at)
    return found


def trunks(engine: Engine) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Loss on the probe, trunk behind every site, branch outputs: a forward pass by hand."""
    model, data = engine.model, engine.cell.data
    probe = torch.from_numpy(engine.source.probe(data.probe_batch, data.seq))[None]
    weights = model.weights()
    x = weights["embedding"][0][probe[0, :, :-1].flatten()][None]
    behind, branches = [], []
    for place in sites(model.spec.depth):
        inner = model.branch(place, weights, data.seq)

        def branch(u: Tensor, inner: object = inner) -> Tensor:
            branches.append(inner(u))  # type: ignore[operator]
            return branches[-1]

        x = model.rule.step(x, branch, SiteNorms(weights, place, model.rule, model.norm), place)
        behind.append(x)
    end = model.rule.finish(x, SiteNorms(weights, None, model.rule, model.norm))
    logits = torch.bmm(end, weights["head"])[0]
    loss = torch.nn.functional.cross_entropy(logits, probe[0, :, 1:].flatten())
    return loss, behind, branches


@pytest.mark.parametrize("arch", ["keel", "hybridnorm", "sandwich"])
def test_gradients_and_activations_are_those_of_a_pass_by_hand(arch: str) -> None:
    found = profile(arch)
    engine = Engine(cell_of(arch), [0], 1)
    loss, behind, branches = trunks(engine)
    grads = torch.autograd.grad(loss, behind)
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    for place, trunk, branch, grad in zip(found.sites, behind, branches, grads, strict=True):
        assert place.trunk_rms == pytest.approx(trunk.square().mean().sqrt().item(), rel=1e-4)
        assert place.branch_rms == pytest.approx(branch.square().mean().sqrt().item(), rel=1e-4)
        assert place.trunk_grad == pytest.approx(grad.norm().item(), rel=1e-4)
        assert place.relative_grad == pytest.approx(
            (grad.norm() * trunk.square().mean().sqrt()).item(), rel=1e-4
        )
    assert found.sites[1].ratio == pytest.approx(
        (branches[1].square().mean() / behind[0].square().mean()).sqrt().item(), rel=1e-4
    )


def test_weight_gradients_are_cut_at_the_sites() -> None:
    found = profile("pre_ln")
    engine = Engine(cell_of("pre_ln"), [0], 1)
    loss, _, _ = trunks(engine)
    loss.backward()
    assert engine.model.flat_SP.grad is not None
    squares = dict.fromkeys(range(4), 0.0)
    offset = 0
    for tensor in engine.model.tensors:
        part = engine.model.flat_SP.grad[0, offset : offset + tensor.size]
        offset += tensor.size
        if tensor.name[0].isdigit():
            squares[int(tensor.name[0])] += part.square().sum().item()
    for place in found.sites:
        assert place.weight_grad == pytest.approx(math.sqrt(squares[place.index]), rel=1e-4)


def test_the_update_of_plain_sgd_is_the_lr_times_the_gradient() -> None:
    plain = {"optim.name": "sgd", "beta1": 0, "weight_decay": 0, "clip": 0}
    cell = cell_of("post_ln", **plain)
    (found,) = profile_cell(cell, (0,))
    engine = Engine(cell, [0], 1)
    windows = engine.source.batch(0, 0, cell.data.batch, cell.data.seq)
    engine.model.losses(torch.from_numpy(windows)[None]).sum().backward()
    weights = engine.model.weights()
    assert engine.model.flat_SP.grad is not None
    offset, norms = 0, {}
    for tensor in engine.model.tensors:
        grad = engine.model.flat_SP.grad[0, offset : offset + tensor.size]
        offset += tensor.size
        norms[tensor.name] = (grad.norm().item(), weights[tensor.name].norm().item())
    names = ("1.ffn.gate_up", "1.ffn.down")
    grad_norm = math.hypot(*(norms[name][0] for name in names))
    weight_norm = math.hypot(*(norms[name][1] for name in names))
    assert found.lr == cell.ramp.slope == 1e-3
    assert found.sites[1].update_ratio == pytest.approx(
        1e-3 * grad_norm / weight_norm, rel=1e-3
    )


def test_profiles_after_steps_of_the_ramp_are_those_of_its_weights() -> None:
    cell = cell_of("keel")
    (found,) = profile_cell(cell, (3,), at=5)
    engine = Engine(cell, [3], 5)
    assert cell.ramp.slope is not None
    engine.advance(cell.ramp.slope * np.arange(1, 6)[:, None])
    assert found.step == 5 and found.lr == pytest.approx(6e-3)
    loss, behind, _ = trunks(engine)
    grads = torch.autograd.grad(loss, behind)
    assert found.sites[-1].trunk_grad == pytest.approx(grads[-1].norm().item(), rel=1e-4)
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)


def test_seeds_are_averaged_geometrically() -> None:
    one, two = profile("post_ln", (0,)), profile("post_ln", (1,))
    both = profile("post_ln", (0, 1))
    for place in range(4):
        values = [p.sites[place].trunk_grad or 0.0 for p in (one, two)]
        assert both.sites[place].trunk_grad == pytest.approx(
            math.sqrt(values[0] * values[1]), rel=1e-4
        )


@pytest.mark.parametrize("arch", ALL_ARCHS)
def test_watching_changes_nothing_and_works_for_every_rule(arch: str) -> None:
    model = stirred(make_model(arch))
    tokens = random_tokens()
    (plain,) = torch.autograd.grad(model.losses(tokens).sum(), model.flat_SP)
    model.rule = Observed(make_rule(arch))
    (watched,) = torch.autograd.grad(model.losses(tokens).sum(), model.flat_SP)
    # An unwatched model may run in C, a watched one never does: equal up to rounding.
    torch.testing.assert_close(plain, watched, rtol=1e-10, atol=1e-12)
    assert [passage.site.index for passage in model.rule.passages] == [0, 1, 2, 3]


def test_a_probe_watcher_sees_only_what_runs_without_gradients() -> None:
    model = make_model("keel")
    model.rule = Observed(make_rule("keel"), is_probe_only=True)
    model.losses(random_tokens())
    assert not model.rule.passages
    with torch.no_grad():
        model.losses(random_tokens())
    assert len(model.rule.passages) == 4 and not model.rule.passages[0].after


def test_without_branches_pre_ln_passes_the_gradient_on_unchanged() -> None:
    model = make_model("pre_ln")
    watcher = Observed(ShortcutOnly(make_rule("pre_ln")))
    model.rule = watcher
    model.losses(random_tokens()).sum().backward()
    grads = [passage.after[0].grad for passage in watcher.passages]
    assert all(grad is not None and torch.equal(grad, grads[0]) for grad in grads)


def test_skipping_every_site_leaves_the_embedding() -> None:
    model = make_model("pre_ln")
    model.rule = Skipping(make_rule("pre_ln"), frozenset(range(4)))
    none = make_model("pre_ln")
    with torch.no_grad():
        for tensor, part in zip(
            none.tensors,
            none.flat_SP.split([tensor.size for tensor in none.tensors], dim=1),
            strict=True,
        ):
            if tensor.name.endswith((".out", ".down")):
                part.zero_()
    assert torch.equal(model.losses(random_tokens()), none.losses(random_tokens()))


# Closed forms


def test_post_ln_with_branches_as_large_as_the_trunk_halves_the_square_at_every_site() -> None:
    """The paper's bound: (1/2)^(L/2)."""
    found = predicted_shortcut(make_rule("post_ln"), np.ones((64, 1)), np.ones((64, 1)))
    assert found is not None
    assert found[0] == pytest.approx(0.5 ** (63 / 2))


@pytest.mark.parametrize(("depth", "product"), [(64, 0.9922), (512, 0.9990)])
def test_keels_product_tends_to_one(depth: int, product: float) -> None:
    """(1 + 1/L^2)^(-L/2): shared/architectures.md 2.6."""
    rule = make_rule("keel(first_block=none)")
    found = predicted_shortcut(rule, np.ones((depth, 1)), np.ones((depth, 1)))
    assert found is not None
    assert found[0] * depth / math.hypot(depth, 1) == pytest.approx(product, abs=5e-5)


@pytest.mark.parametrize(
    ("arch", "index", "expected"),
    [
        ("post_ln", 2, 1 / math.sqrt(1.25)),
        ("deepnorm", 2, 8**0.25 / math.hypot(8**0.25, 0.5)),
        ("keel", 0, 1.0),
        ("keel", 1, 1 / math.sqrt(1.25)),
        ("keel", 2, 8 / math.hypot(8, 0.5)),
        ("keel_beta", 2, 8 / math.hypot(8, 0.5)),
        ("mix_ln", 1, 1 / math.sqrt(1.25)),
        ("mix_ln", 2, 1.0),
        ("hybridnorm", 2, 1.0),
        ("pre_ln", 2, 1.0),
        ("sandwich", 2, 1.0),
        ("siamese", 2, None),
    ],
)
def test_the_factor_of_a_site(arch: str, index: int, expected: float | None) -> None:
    found = shortcut_factor(make_rule(arch), Site(index, 8), np.float64(1), np.float64(0.25))
    assert found == (None if expected is None else pytest.approx(expected))


def test_hybridnorms_ffn_divides_by_the_trunk() -> None:
    squares = np.array([1.5625, 4.0]), np.array([9.0, 9.0])
    found = shortcut_factor(make_rule("hybridnorm"), Site(3, 8), *squares)
    assert found is not None and found.tolist() == [0.8, 0.5]
    star = shortcut_factor(make_rule("hybridnorm(star=true)"), Site(1, 8), *squares)
    assert star is not None and star.tolist() == [1, 1]


def test_tokens_are_multiplied_up_before_they_are_averaged() -> None:
    trunk, branch = np.ones((3, 2)), np.array([[0.0, 3.0], [0.0, 3.0], [0.0, 3.0]])
    found = predicted_shortcut(make_rule("post_ln"), trunk, branch)
    assert found is not None
    assert found.tolist() == pytest.approx([math.sqrt((1 + 1 / 16) / 2), math.sqrt(0.625), 1])


def test_a_geometric_series_has_its_own_decay() -> None:
    values = 3.0 * 0.9 ** np.arange(20)[::-1]
    assert fitted_decay(values) == pytest.approx(0.9)
    assert fitted_decay(values[:5]) is None
    assert fitted_decay(np.append(values, 0.0)) is None
    assert fitted_decay(np.append(values, math.nan)) is None
    assert fitted_decay(None) is None


@pytest.fixture(scope="module")
def deep() -> Iterator[dict[str, Profile]]:
    archs = ("post_ln", "keel", "pre_ln")
    cells = [cell_of(arch, depth=64, width=64, seq=64, probe_batch=1) for arch in archs]
    yield {found.arch: found for found in gradient_profiles(cells, (0, 1), workers=0)}


def test_post_ln_decays_as_its_branch_variance_predicts(deep: dict[str, Profile]) -> None:
    found = deep["post_ln"]
    assert found.shortcut_decay and found.predicted_decay
    assert found.shortcut_decay < 0.98
    rate, predicted = math.log(found.shortcut_decay), math.log(found.predicted_decay)
    assert rate == pytest.approx(predicted, rel=0.10)


def test_keel_and_pre_ln_keep_their_shortcut_open(deep: dict[str, Profile]) -> None:
    assert deep["keel"].shortcut_decay == pytest.approx(1, abs=1e-3)
    assert deep["pre_ln"].shortcut_decay == pytest.approx(1, abs=1e-6)
    assert deep["pre_ln"].sites[0].shortcut_grad == pytest.approx(1, abs=1e-5)


def test_keels_first_and_last_gradient_are_alike_at_512_sub_layers() -> None:
    found = profile("keel", depth=512, width=8, seq=8)
    assert found.first_to_last is not None and 0.5 <= found.first_to_last <= 2


def test_the_table_has_a_row_per_cell_in_the_order_asked(deep: dict[str, Profile]) -> None:
    rows = summary_rows(list(deep.values()))
    assert [row["arch"] for row in rows] == ["post_ln", "keel", "pre_ln"]
    assert rows[0]["bound_decay"] == pytest.approx(math.sqrt(0.5))
    assert deep["keel"].to_dict()["sites"][3]["branch"] == "ffn"


def test_attention_and_ffn_are_curves_of_their_own(deep: dict[str, Profile]) -> None:
    keel = deep["keel"].to_dict()
    figure = gradient_figure([keel])
    lengths = {
        axes.get_title(loc="left"): sorted(len(line.get_xdata()) for line in axes.lines)  # type: ignore[arg-type]
        for axes in figure.axes
    }
    assert lengths["update / weight"] == lengths["weight gradient"] == [32, 32]
    assert lengths["trunk RMS"] == [64] and lengths["gradient through shortcuts"] == [64, 64]
    both = gradient_figure([keel, keel | {"width": 32}])
    titles = [axes.get_title(loc="left") for axes in both.axes]
    assert len(titles) == 12 and titles[-1] == "trunk RMS, 64 × 32"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["Keel", "FFN", "closed form"]


def test_two_streams_have_a_gradient_but_no_closed_form() -> None:
    found = profile("siamese", depth=8)
    assert found.predicted_decay is None and found.sites[0].predicted_shortcut is None
    assert found.decay and found.sites[0].trunk_grad
