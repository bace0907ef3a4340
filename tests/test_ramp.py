"""The ramp: what is applied is what is recorded, lanes are independent, ends are told apart."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample
import torch
from helpers import SIX, by_seed, numbers, tiny_cell
from torch.nn.functional import cross_entropy

from keelbench.data import open_source
from keelbench.engine import Engine
from keelbench.ramp import CHUNK, Progress, ramp_lrs, run_ramp
from keelbench.records import Record, Rule, VerdictKind
from keelbench.registry import load_object
from keelbench.search import run_lanes
from keelbench.specs import CellSpec

PROBES = """
import math
import torch

applied = []
made = []

class Recording(torch.optim.SGD):
    def step(self, closure=None):
        lrs = {float(group["lr"]) for group in self.param_groups}
        applied.append((self.lane, lrs))
        super().step(closure)
        self.steps_done += 1
        if self.lane == self.poisoned and self.steps_done == 10:
            for group in self.param_groups:
                for param in group["params"]:
                    param.fill_(math.nan)

def lane_optimizer(groups, poisoned):
    optimizer = Recording(groups, lr=0.0)
    optimizer.lane, optimizer.steps_done, optimizer.poisoned = len(made), 0, poisoned
    made.append(optimizer)
    return [optimizer]

def recording(groups, spec):
    return lane_optimizer(groups, poisoned=None)

def poisoning(groups, spec):
    return lane_optimizer(groups, poisoned=1)
"""
"""Optimizers of one's own: plain SGD that notes its LR; one spoils lane 1 after ten steps."""


@pytest.fixture
def probes(tmp_path: Path) -> Path:
    file = tmp_path / "probes.py"
    file.write_text(PROBES)
    return file


def ramp(cell: CellSpec, seeds: Sequence[int] = (0,)) -> dict[int, Record]:
    return by_seed(run_ramp(cell, seeds))


# The learning rate


@pytest.mark.parametrize("settings", [{}, {"slope": 7e-4, "peak": 1.4e-2}])
def test_the_lr_recorded_is_the_lr_applied_from_first_to_last_step(
    probes: Path, settings: dict[str, float]
) -> None:
    cell = tiny_cell(**{"optim.name": f"{probes}:recording"}, **settings)
    record = ramp(cell)[0]
    applied = [lrs for _, lrs in load_object(f"{probes}:applied")]
    assert [{lr} for lr in record.trace.lr.tolist()] == applied
    assert record.trace.lr[0] == cell.ramp.slope
    assert record.trace.lr[-1] == pytest.approx(cell.ramp.peak, rel=1e-12)
    assert record.trace.steps == cell.ramp.steps == 20


def test_an_update_is_lr_times_gradient_of_the_loss_recorded(probes: Path) -> None:
    settings = {"optim.name": f"{probes}:recording", "clip": 0.0, "dtype": "float64"}
    cell = tiny_cell(**settings)
    engine = Engine(cell, [4], capacity=3)
    source = open_source(cell.data)
    for step in range(3):
        before = engine.model.flat_SP.detach().clone()
        windows = torch.from_numpy(source.batch(4, step, cell.data.batch, cell.data.seq))
        logits = engine.model.logits(windows[None, :, :-1])[0]
        loss = cross_entropy(logits, windows[:, 1:].flatten())
        (gradient,) = torch.autograd.grad(loss, engine.model.flat_SP)
        engine.advance(np.array([[0.1 * (step + 1)]]))
        expected = before - 0.1 * (step + 1) * gradient
        assert torch.allclose(engine.model.flat_SP, expected, rtol=0, atol=1e-14)
        assert engine.losses()[step, 0] == pytest.approx(loss.item(), rel=1e-12)
        norm = torch.linalg.vector_norm(gradient).item()
        assert engine.grad_norms()[step, 0] == pytest.approx(norm, rel=1e-12)


def test_a_multiplier_scales_what_is_applied_but_not_the_ramp(probes: Path) -> None:
    cell = tiny_cell(lr_multiplier=0.5, **{"optim.name": f"{probes}:recording"})
    record = ramp(cell)[0]
    applied = [lrs for _, lrs in load_object(f"{probes}:applied")]
    assert [{0.5 * lr} for lr in record.trace.lr.tolist()] == applied


def test_chunks_of_the_ramp_join_without_gap_or_overlap() -> None:
    cell = tiny_cell(peak=0.1)
    chunks = [ramp_lrs(cell, start, min(start + CHUNK, 100)) for start in range(0, 100, CHUNK)]
    assert np.array_equal(np.concatenate(chunks), 1e-3 * np.arange(1, 101))


# What is measured


def test_a_trace_starts_at_the_untrained_model_and_probes_the_held_out_batch() -> None:
    cell = tiny_cell(probe_every=3)
    record = ramp(cell, [2])[2]
    trace, source = record.trace, open_source(cell.data)
    assert trace.probe is not None and trace.probe_step is not None
    assert trace.probe_step.tolist() == [0, 3, 6, 9, 12, 15, 18]
    probe = source.probe(cell.data.probe_batch, cell.data.seq)
    fresh = Engine(cell, [2], 1)
    assert trace.probe[0] == fresh.model.losses(torch.from_numpy(probe)[None]).item()
    batch = source.batch(2, 0, cell.data.batch, cell.data.seq)
    assert trace.loss[0] == fresh.model.losses(torch.from_numpy(batch)[None]).item()
    assert trace.unigram_entropy == source.unigram_loss(probe)


def test_probing_does_not_disturb_training() -> None:
    often, seldom = ramp(tiny_cell(probe_every=1))[0], ramp(tiny_cell(probe_every=7))[0]
    assert often.trace.loss.tolist() == seldom.trace.loss.tolist()
    assert often.trace.probe is not None and seldom.trace.probe is not None
    assert often.trace.probe[::7].tolist() == seldom.trace.probe.tolist()


# Independent lanes, to the last bit


@pytest.mark.parametrize("arch", SIX)
def test_a_lanes_numbers_do_not_depend_on_its_neighbours(arch: str) -> None:
    cell = tiny_cell(arch, peak=8e-3)
    together = ramp(cell, (0, 1, 2))
    shuffled = ramp(cell, (2, 0))
    for seed in (0, 2):
        alone = numbers(ramp(cell, (seed,))[seed].trace)
        assert alone == numbers(together[seed].trace) == numbers(shuffled[seed].trace)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_the_same_ramp_twice_gives_the_same_bits(optimizer: str) -> None:
    cell = tiny_cell(peak=1e-2, **{"optim.name": optimizer})
    first, second = (ramp(cell, (0, 1)) for _ in range(2))
    for seed in (0, 1):
        assert numbers(first[seed].trace) == numbers(second[seed].trace)
    assert numbers(first[0].trace) != numbers(first[1].trace)


def test_dropping_lanes_in_mid_run_does_not_move_the_others() -> None:
    cell = tiny_cell(depth=8, width=32)
    lrs = np.full((12, 3), 1e-2) * np.array([1.0, 2.0, 3.0])
    whole, dropped = (Engine(cell, [0, 1, 2], 12) for _ in range(2))
    whole.advance(lrs)
    dropped.advance(lrs[:6])
    dropped.keep([0, 2])
    assert dropped.lanes == 2 and dropped.seeds == [0, 2]
    dropped.advance(lrs[6:][:, [0, 2]])
    assert np.array_equal(dropped.losses(), whole.losses()[:, [0, 2]])
    assert np.array_equal(dropped.grad_norms(), whole.grad_norms()[:, [0, 2]])
    steps, probes = dropped.probes()
    assert steps.tolist() == [0, 4, 8]
    assert np.array_equal(probes, whole.probes()[1][:, [0, 2]])
    assert torch.equal(dropped.model.flat_SP, whole.model.flat_SP[[0, 2]])


# How lanes end


def test_a_ramp_that_ends_on_an_excursion_claims_only_the_lr_before_it() -> None:
    record = sample.record(kind=VerdictKind.SURVIVED)
    assert record.lower_bound == record.trace.lr[-1]
    left = dataclasses.replace(record.verdict, open_step=100)
    record = dataclasses.replace(record, verdict=left)
    assert record.lower_bound == record.trace.lr[99]
    assert Record.from_dict(record.to_dict()).lower_bound == record.lower_bound


def test_a_ramp_that_ends_healthy_is_survived_and_has_only_a_lower_bound() -> None:
    record = ramp(tiny_cell())[0]
    assert record.verdict.kind is VerdictKind.SURVIVED
    assert record.max_lr is None
    assert record.lower_bound == pytest.approx(2e-2)


def test_a_frozen_model_never_learned_and_has_no_max_lr() -> None:
    for record in ramp(tiny_cell(lr_multiplier=0.0), (0, 1)).values():
        assert record.verdict.kind is VerdictKind.NEVER_LEARNED
        assert record.max_lr is None and record.normalized_max_lr is None
        assert record.lower_bound is None
        assert record.trace.probe is not None
        assert len(set(record.trace.probe.tolist())) == 1


def test_a_loss_that_is_not_finite_at_the_first_step_is_failed() -> None:
    for record in ramp(tiny_cell(init_std=1e38), (0, 1)).values():
        assert not np.isfinite(record.trace.loss[0])
        assert record.verdict.kind is VerdictKind.FAILED
        assert record.verdict.reason
        assert record.max_lr is None and record.lower_bound is None
        assert record.trace.steps == CHUNK, "it costs no more than one chunk"


def test_a_lane_that_breaks_ends_alone_and_early(probes: Path) -> None:
    """Lane 1 is spoiled after its tenth step, so step 10 is the first that is not finite."""
    spoiled = tiny_cell(peak=4e-2, **{"optim.name": f"{probes}:poisoning"})
    records = list(run_ramp(spoiled, (5, 6, 7)))
    assert [record.seed for record in records] == [6, 5, 7], "yielded as they end"
    broken = records[0]
    assert broken.verdict.kind is VerdictKind.DIVERGED
    assert broken.verdict.rule is Rule.NON_FINITE
    assert (broken.verdict.onset_step, broken.verdict.detected_step) == (10, 10)
    assert broken.max_lr == broken.trace.lr[9] == pytest.approx(10 * 1e-3)
    assert broken.trace.steps == CHUNK
    sound = tiny_cell(peak=4e-2, **{"optim.name": f"{probes}:recording"})
    for record in records[1:]:
        assert record.trace.steps == 40 and np.isfinite(record.trace.loss).all()
        reference = ramp(sound, (record.seed,))[record.seed]
        assert numbers(record.trace) == numbers(reference.trace)


def test_a_steep_ramp_really_diverges_and_stops_before_its_peak() -> None:
    cell = tiny_cell("pre_ln", slope=2e-2, peak=10.0)
    record = ramp(cell)[0]
    assert record.verdict.kind is VerdictKind.DIVERGED
    onset, detected = record.verdict.onset_step, record.verdict.detected_step
    assert onset is not None and detected is not None and 0 < onset <= detected
    assert detected < record.trace.steps <= detected + CHUNK + cell.data.probe_every
    assert record.trace.steps < cell.ramp.steps
    assert record.max_lr == record.trace.lr[onset - 1]


# Progress and surroundings


def test_progress_is_told_after_every_chunk() -> None:
    told: list[Progress] = []
    cell = tiny_cell(peak=4e-2)
    (one, two) = run_ramp(cell, (0, 1), on_progress=told.append)
    assert [p.step for p in told] == [16, 32, 40]
    assert [p.lr for p in told] == [pytest.approx(s * 1e-3) for s in (16, 32, 40)]
    assert [p.running for p in told] == [2, 2, 0]
    assert {p.lanes for p in told} == {2}
    assert told[0].loss == pytest.approx((one.trace.loss[15] + two.trace.loss[15]) / 2)
    seconds = [p.seconds for p in told]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_a_record_tells_where_and_when_it_was_made() -> None:
    cell = tiny_cell()
    record = ramp(cell)[0]
    assert record.cell == cell
    assert record.environment.torch == torch.__version__
    assert record.environment.threads == torch.get_num_threads()
    assert record.environment.detector == record.detector
    assert record.environment.device_name and record.environment.platform
    assert record.created.endswith("+00:00")
    assert record.seconds > 0


def test_threads_are_set_for_the_run_and_put_back() -> None:
    before = torch.get_num_threads()
    cell = tiny_cell(threads=before + 1)
    (record,) = run_lanes(cell, (0,))
    assert record.environment.threads == before + 1
    assert torch.get_num_threads() == before


def test_the_global_random_state_is_neither_used_nor_touched() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    state, legacy = torch.get_rng_state(), np.random.get_state()[1]
    first = ramp(tiny_cell())[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)
    torch.manual_seed(2)
    assert numbers(ramp(tiny_cell())[0].trace) == numbers(first.trace)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "float64"}])
def test_other_precisions_train_as_well(settings: dict[str, Any]) -> None:
    record, single = ramp(tiny_cell(**settings))[0], ramp(tiny_cell())[0]
    assert record.trace.loss[0] == pytest.approx(single.trace.loss[0], rel=1e-2)
    assert record.trace.loss[0] != single.trace.loss[0]
    assert record.trace.loss[-1] < record.trace.loss[0] - 0.5
