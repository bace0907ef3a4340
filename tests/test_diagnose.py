"""Which sub-layer moved first: planted moves are found, noise and single spikes are not."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from helpers import tiny_cell
from numpy.typing import NDArray

from keelbench.diagnose import AFTER, diagnosed, first_moves, watch
from keelbench.engine import Engine
from keelbench.observe import Observed
from keelbench.ramp import run_ramp
from keelbench.records import Record, Verdict, VerdictKind

PROBES, SITES, EVERY = 40, 12, 4
ONSET = 30 * EVERY


def quiet(seed: int = 0) -> NDArray[np.float64]:
    """Ratios that only tremble, by 3 %."""
    generator = np.random.default_rng(seed)
    return 0.3 * np.exp(0.03 * generator.standard_normal((PROBES, SITES)))


def moves(ratios: NDArray[np.float64]) -> list[tuple[int, int]]:
    found = first_moves(EVERY * np.arange(len(ratios)), ratios, ONSET)
    return [(move.site, move.step) for move in found]


def test_noise_does_not_move() -> None:
    assert all(moves(quiet(seed)) == [] for seed in range(20))


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_the_first_site_to_move_comes_first(factor: float) -> None:
    ratios = quiet()
    ratios[27:, 5] *= factor
    ratios[29:, 2] *= 5
    ratios[29:, 9] *= 2
    assert moves(ratios) == [(5, 27 * EVERY), (2, 29 * EVERY), (9, 29 * EVERY)]
    (first, *_) = first_moves(EVERY * np.arange(PROBES), ratios, ONSET)
    assert first.factor == pytest.approx(factor, rel=0.15)
    assert first.branch == "ffn"


def test_a_spike_that_comes_back_is_no_move() -> None:
    ratios = quiet()
    ratios[26:28, 4] *= 10
    assert moves(ratios) == []


def test_what_moved_long_before_the_onset_is_not_looked_at() -> None:
    ratios = quiet()
    ratios[10:, 4] *= 10
    assert moves(ratios) == []


def test_a_calm_site_needs_more_than_a_tremble() -> None:
    ratios = np.full((PROBES, SITES), 0.3)
    ratios[28:, 3] *= 1.2
    assert moves(ratios) == []
    ratios[28:, 3] *= 1.2
    assert moves(ratios) == [(3, 28 * EVERY)]


def test_what_is_no_longer_finite_has_moved() -> None:
    ratios = quiet()
    ratios[28:, 7] = math.nan
    ((site, step),) = moves(ratios)
    assert (site, step) == (7, 28 * EVERY)


def test_a_slow_drift_is_no_move() -> None:
    ratios = quiet() * np.exp(0.01 * np.arange(PROBES))[:, None]
    assert moves(ratios) == []


# Records


@pytest.fixture(scope="module")
def broken() -> Record:
    """A record whose onset is set by hand, so that the test does not depend on a ramp."""
    cell = tiny_cell("pre_ln", depth=6, peak=8e-2)
    (record,) = run_ramp(cell, [2])
    verdict = Verdict(kind=VerdictKind.DIVERGED, onset_step=40, detected_step=60)
    return dataclasses.replace(record, verdict=verdict, diagnosis={"kept": 1})


def test_a_lane_is_watched_while_it_repeats_itself(broken: Record) -> None:
    steps, ratios = watch(broken, 40)
    assert steps.tolist() == list(range(40 + AFTER + 1))
    assert ratios.shape == (len(steps), 6)
    engine = Engine(broken.cell, [2], 1)
    watcher = Observed(engine.model.rule, is_probe_only=True)
    engine.model.rule = watcher
    engine.advance(np.zeros((1, 1)))
    found = [p.branch_square_SN.mean() / p.trunk_square_SN.mean() for p in watcher.passages]
    assert ratios[0] == pytest.approx([math.sqrt(ratio) for ratio in found], rel=1e-5)
    again = watch(dataclasses.replace(broken, seed=3), 40)[1]
    assert not np.allclose(ratios[0], again[0])


def test_a_late_onset_is_probed_as_often_as_the_ramp_was(broken: Record) -> None:
    cell = broken.cell.replaced({"probe_every": 2})
    steps, _ = watch(dataclasses.replace(broken, cell=cell), 64)
    assert steps.tolist() == list(range(0, 80, 2))


def test_watching_does_not_change_the_run(
    broken: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Engine] = []

    class Kept(Engine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            engines.append(self)

    monkeypatch.setattr("keelbench.diagnose.Engine", Kept)
    watch(broken, 40)
    (engine,) = engines
    assert engine.losses()[:, 0].tolist() == broken.trace.loss[: engine.steps].tolist()


def test_the_diagnosis_is_stored_beside_what_was_there(broken: Record) -> None:
    found = diagnosed(broken)
    assert found.diagnosis is not None and found.diagnosis["kept"] == 1
    first = found.diagnosis["first_to_move"]
    assert set(first) >= {"site", "branch", "step", "sites_moved", "moves", "probe_steps"}
    assert first["site"] is None or first["moves"][0]["site"] == first["site"]
    assert Record.from_dict(found.to_dict()).diagnosis == found.diagnosis
    assert found.max_lr == broken.max_lr and found.id == broken.id


def test_a_planted_collapse_is_traced_to_its_site(
    broken: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, ratios = watch(broken, 40)
    ratios = np.exp(np.log(ratios).mean(axis=0)) * np.ones_like(ratios)
    ratios[steps >= 36, 3] *= 4
    monkeypatch.setattr("keelbench.diagnose.watch", lambda record, onset: (steps, ratios))
    found = diagnosed(broken)
    assert found.diagnosis is not None
    first = found.diagnosis["first_to_move"]
    assert (first["site"], first["branch"], first["step"]) == (3, "ffn", 36)
    assert first["ratios"]["3"][-1] == pytest.approx(4 * first["ratios"]["3"][0], rel=1e-3)


def test_lanes_without_an_onset_come_back_as_they_are(broken: Record) -> None:
    survived = dataclasses.replace(broken, verdict=Verdict(kind=VerdictKind.SURVIVED))
    assert diagnosed(survived) is survived
    held = dataclasses.replace(broken, cell=broken.cell.replaced({"protocol": "hold"}))
    assert diagnosed(held) is held
    foreign = dataclasses.replace(broken, cell=broken.cell.replaced({"module": "a:b"}))
    assert diagnosed(foreign) is foreign
