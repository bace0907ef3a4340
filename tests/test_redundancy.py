"""Layers left out: every number against a forward pass by hand."""

import math

import numpy as np
import pytest
import torch
from helpers import refusal, tiny_cell
from matplotlib.figure import Figure
from torch import Tensor

from keelbench.engine import Engine
from keelbench.errors import RunFailedError
from keelbench.layout import sites
from keelbench.norms import SiteNorms
from keelbench.redundancy import (
    Redundancy,
    cheapest,
    layer_rows,
    redundancies,
    removal_losses,
    removed_sites,
    summary_rows,
    train_and_remove,
)
from keelbench.report.plots.redundancy import redundancy_figure
from keelbench.training import Schedule, train

SCHEDULE = Schedule(steps=40)
LR = 2e-2


def loss_without(engine: Engine, removed: set[int], windows: Tensor) -> float:
    """Held-out loss of a single-lane model with these sites left out, written out."""
    model = engine.model
    weights = model.weights()
    with torch.no_grad():
        x = weights["embedding"][0][windows[:, :-1].flatten()][None]
        for place in sites(model.spec.depth):
            if place.index not in removed:
                branch = model.branch(place, weights, windows.shape[1] - 1)
                norms = SiteNorms(weights, place, model.rule, model.norm)
                x = model.rule.step(x, branch, norms, place)
        x = model.rule.finish(x, SiteNorms(weights, None, model.rule, model.norm))
        logits = torch.bmm(x, weights["head"])[0].double()
    return torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten()).item()


@pytest.fixture(scope="module")
def trained() -> tuple[Redundancy, Engine]:
    """pre_ln with 32 sub-layers, trained: the result of the study, and its engine again."""
    cell = tiny_cell("pre_ln", depth=32)
    (found,) = redundancies([cell], (3,), lr=LR, schedule=SCHEDULE, sequences=12, workers=0)
    engine = Engine(cell, [3], SCHEDULE.steps)
    train(engine, SCHEDULE.lrs(LR)[:, None])
    return found, engine


def test_every_removal_equals_brute_force(trained: tuple[Redundancy, Engine]) -> None:
    found, engine = trained
    windows = torch.from_numpy(engine.source.probe(12, 16))
    full = math.exp(loss_without(engine, set(), windows))
    deltas = [math.exp(loss_without(engine, {k}, windows)) - full for k in range(32)]
    assert found.ppl == pytest.approx(full, rel=1e-4)
    assert [r.delta_ppl for r in found.removals] == pytest.approx(deltas, abs=1e-4 * full)
    best = cheapest(found)
    assert best.index == int(np.argmin(deltas))
    assert best.delta_ppl == pytest.approx(min(deltas), abs=1e-4 * full)
    assert np.ptp(deltas) > 0.01 * full
    shares = np.array(deltas) / full
    assert found.cheap.mean == pytest.approx((shares < 0.01).mean())


def test_a_block_is_both_of_its_sub_layers(trained: tuple[Redundancy, Engine]) -> None:
    _, engine = trained
    assert removed_sites(6, "block") == [{0, 1}, {2, 3}, {4, 5}]
    assert removed_sites(4, "sub-layer") == [{0}, {1}, {2}, {3}]
    windows = torch.from_numpy(engine.source.probe(4, 16))
    found = removal_losses(engine, "block", 4)
    assert found.shape == (16, 1)
    for block in (0, 7, 15):
        expected = loss_without(engine, {2 * block, 2 * block + 1}, windows)
        assert found[block, 0] == pytest.approx(expected, rel=1e-4)


def test_the_model_is_whole_again_afterwards(trained: tuple[Redundancy, Engine]) -> None:
    _, engine = trained
    windows = torch.from_numpy(engine.source.probe(4, 16))
    removal_losses(engine, "sub-layer", 4)
    with torch.no_grad():
        whole = engine.model.losses(windows[None]).item()
    assert whole == pytest.approx(loss_without(engine, set(), windows), rel=1e-4)


def test_seeds_are_averaged_and_kept_apart() -> None:
    cell = tiny_cell("keel")
    (both,) = redundancies([cell], (0, 1), lr=LR, schedule=Schedule(steps=8), workers=0)
    (one,) = redundancies([cell], (1,), lr=LR, schedule=Schedule(steps=8), workers=0)
    for pair, single in zip(both.removals, one.removals, strict=True):
        assert pair.seed_deltas[1] == pytest.approx(single.delta_ppl, rel=1e-3, abs=1e-3)
        assert pair.delta_ppl == pytest.approx(np.mean(pair.seed_deltas))
    (row,) = summary_rows([both])
    assert row["cheapest"] == cheapest(both).index and row["unit"] == "sub-layer"
    assert both.to_dict()["removals"][0]["branch"] == "attention"


def test_training_that_breaks_is_said() -> None:
    cell = tiny_cell("resnet", depth=8, clip=0.0, **{"optim.name": "sgd"})
    schedule = {"steps": 32, "warmup": 0.0, "floor": 1.0}
    run = train_and_remove(
        cell, (0,), lr=1e12, schedule=schedule, unit="sub-layer", sequences=4
    )
    with pytest.raises(RunFailedError, match="became non-finite"):
        next(run)


def test_the_figure_has_a_panel_per_shape(trained: tuple[Redundancy, Engine]) -> None:
    found, _ = trained
    rows = layer_rows([found])
    assert len(rows) == 32 and rows[5]["branch"] == "ffn"
    wider = [row | {"width": 64, "arch": "keel", "delta_share": math.inf} for row in rows]
    figure = redundancy_figure([*rows, *wider])
    assert isinstance(figure, Figure) and len(figure.axes) == 2
    assert "nothing to draw" in refusal(lambda: redundancy_figure([]))
