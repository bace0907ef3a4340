"""Stored lanes read again by a newer detector. Run: pytest tests/test_rejudge.py"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import sample

import keelbench.store
from keelbench.cli import run
from keelbench.divergence import DETECTOR_VERSION, judge
from keelbench.records import Record, Rule, Trace, VerdictKind, max_lr_of
from keelbench.rejudge import Reading, rejudge, rejudgeable, rejudged
from keelbench.store import Store


def older(record: Record, detector: str = "1") -> Record:
    """A record as an older detector would have left it."""
    return dataclasses.replace(record, detector=detector)


def judged(trace: Trace, seed: int = 0) -> Record:
    """A record with the verdict that its trace deserves, of a ramp that ends with it."""
    verdict = judge(trace)
    assert verdict is not None
    peak = float(trace.lr[-1])
    cell = sample.cell("pre_ln", ramp__peak=peak, ramp__slope=float(trace.lr[0]))
    return dataclasses.replace(
        sample.record("pre_ln", seed=seed),
        cell=cell,
        detector=DETECTOR_VERSION,
        verdict=verdict,
        trace=trace,
        max_lr=max_lr_of(trace, verdict),
    )


BROKEN = judged(sample.trace(400, 200))
HEALTHY = judged(sample.trace(400, None), seed=1)


def shortened(record: Record, steps: int) -> Record:
    """The same lane, its ramp ended by an older detector's verdict after some steps."""
    lane = record.trace
    assert lane.probe_step is not None and lane.probe is not None and lane.grad_norm is not None
    seen = lane.probe_step < steps
    short = dataclasses.replace(
        lane,
        lr=lane.lr[:steps],
        loss=lane.loss[:steps],
        grad_norm=lane.grad_norm[:steps],
        probe_step=lane.probe_step[seen],
        probe=lane.probe[seen],
    )
    return dataclasses.replace(record, trace=short)


@pytest.mark.parametrize("record", [BROKEN, HEALTHY])
def test_the_same_trace_gives_the_same_number(record: Record) -> None:
    reading, new = rejudged(older(record))
    assert reading is Reading.SAME
    assert new.detector == DETECTOR_VERSION and new.id == record.id
    assert new.verdict == record.verdict and new.max_lr == record.max_lr


def test_another_number_is_said_to_have_moved() -> None:
    verdict = dataclasses.replace(BROKEN.verdict, onset_step=120)
    wrong = dataclasses.replace(
        BROKEN, detector="1", verdict=verdict, max_lr=max_lr_of(BROKEN.trace, verdict)
    )
    reading, new = rejudged(wrong)
    assert reading is Reading.MOVED and new.max_lr == BROKEN.max_lr


def test_an_earlier_detection_of_the_same_onset_is_the_same_number() -> None:
    verdict = dataclasses.replace(BROKEN.verdict, detected_step=390, reason="otherwise said")
    reading, new = rejudged(dataclasses.replace(BROKEN, detector="1", verdict=verdict))
    assert reading is Reading.SAME and new.verdict == BROKEN.verdict


def test_a_trace_that_ends_too_soon_has_to_run_again() -> None:
    early = older(shortened(BROKEN, 220))
    reading, same = rejudged(early)
    assert reading is Reading.TOO_SHORT and same is early


def test_what_is_not_one_ramp_has_to_run_again() -> None:
    held = dataclasses.replace(
        older(BROKEN), cell=BROKEN.cell.replaced({"ramp.protocol": "hold"})
    )
    failed = sample.record(kind=VerdictKind.FAILED)
    for record in (held, failed):
        reading, same = rejudged(record)
        assert reading is Reading.NOT_ONE_RAMP and same is record


@pytest.mark.parametrize("detector", [DETECTOR_VERSION, "99", "mine"])
def test_what_this_or_another_newer_detector_judged_is_left_alone(detector: str) -> None:
    record = dataclasses.replace(BROKEN, detector=detector)
    reading, same = rejudged(record)
    assert reading is Reading.CURRENT and same is record


def test_the_environment_names_the_detector_of_the_verdict() -> None:
    _, new = rejudged(older(BROKEN))
    assert new.environment.detector == DETECTOR_VERSION


def test_a_diagnosis_of_another_onset_is_dropped() -> None:
    diagnosis = {"first_to_move": ["3.attention"]}
    stays = dataclasses.replace(older(BROKEN), diagnosis=diagnosis)
    assert rejudged(stays)[1].diagnosis == diagnosis
    verdict = dataclasses.replace(BROKEN.verdict, onset_step=120)
    assert rejudged(dataclasses.replace(stays, verdict=verdict))[1].diagnosis is None


def test_new_records_take_the_place_of_old_ones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    short = dataclasses.replace(shortened(BROKEN, 220), seed=2)
    old = [older(BROKEN), older(HEALTHY), older(short, "0")]
    for record in old:
        store.save(record)
    readings = [reading for reading, _, _ in rejudge(store, old, is_dry=True)]
    assert readings == [Reading.SAME, Reading.SAME, Reading.TOO_SHORT]
    assert {record.detector for record in store.records()} == {"0", "1"}
    list(rejudge(store, old))
    assert {record.id for record in store.records()} == {BROKEN.id, HEALTHY.id, old[2].id}
    assert store.load(BROKEN.id) is not None
    assert [reading for reading, _, _ in rejudge(store, store.records())].count(
        Reading.CURRENT
    ) == 2


@pytest.mark.parametrize("old", [older(BROKEN), older(shortened(BROKEN, 220))])
def test_a_lane_measured_again_meanwhile_stays_as_measured(old: Record, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(dataclasses.replace(BROKEN, seconds=1234.5))
    store.save(old)
    assert [reading for reading, _, _ in rejudge(store, [old])] == [Reading.SUPERSEDED]
    assert [record.seconds for record in store.records()] == [1234.5]


def test_a_sweep_knows_how_many_of_its_lanes_need_no_training(tmp_path: Path) -> None:
    store, cell = Store(tmp_path), BROKEN.cell
    assert rejudgeable([cell], [0, 1], store) == 0
    store.save(older(BROKEN))
    store.save(older(dataclasses.replace(shortened(BROKEN, 220), seed=1)))
    assert rejudgeable([cell], [0, 1], store) == 1
    store.save(BROKEN)
    assert rejudgeable([cell], [0, 1], store) == 0


def test_a_damaged_older_record_disturbs_nobody(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(older(BROKEN)).write_text("{")
    assert rejudgeable([BROKEN.cell], [0], store) == 0


def test_a_record_that_another_process_replaces_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    gone = store.save(older(BROKEN))
    store.save(HEALTHY)
    read = keelbench.store.read_record

    def late(path: Path) -> Record:
        gone.unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(keelbench.store, "read_record", late)
    assert [record.id for record in store.records()] == [HEALTHY.id]


class TestCommand:
    def test_says_what_moved_and_what_did_not(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = Store(tmp_path / "results" / "old")
        (tmp_path / "results" / "other").mkdir(parents=True)
        verdict = dataclasses.replace(HEALTHY.verdict, kind=VerdictKind.NEVER_LEARNED)
        moves = dataclasses.replace(HEALTHY, detector="1", verdict=verdict)
        ends = older(dataclasses.replace(shortened(BROKEN, 220), seed=2))
        for record in (older(BROKEN), moves, ends):
            store.save(record)
        assert run(["rejudge", str(tmp_path / "results" / "other"), str(store.folder)]) == 0
        printed = capsys.readouterr()
        lines = printed.out.splitlines()
        peak = f"{float(HEALTHY.trace.lr[-1]):.4g}"
        assert lines == [
            f"{moves.id} pre_ln, depth 64, width 64, seed 1: never learned -> Max LR >= {peak}",
            f"{ends.id} pre_ln, depth 64, width 64, seed 2: too short, has to run again",
            f"{store.folder}: 1 moved, 1 same, 1 too short (detector {DETECTOR_VERSION})",
        ]
        assert f"keelbench report {store.folder}" in printed.err
        assert "other holds no records" in printed.err

    def test_stores_nothing_when_dry(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Store(tmp_path).save(older(BROKEN))
        assert run(["rejudge", "--dry-run", str(tmp_path)]) == 0
        assert "1 same" in capsys.readouterr().out
        assert [record.detector for record in Store(tmp_path).records()] == ["1"]

    def test_wants_results_folders_and_changes_none_before_all_are_read(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Store(tmp_path).save(older(BROKEN))
        for arguments in ([], ["nowhere"], [str(tmp_path), "nowhere"]):
            assert run(["rejudge", *arguments]) == 2
            assert "results" in capsys.readouterr().err
        assert [record.detector for record in Store(tmp_path).records()] == ["1"]

    def test_is_pointed_to_by_report(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Store(tmp_path).save(older(BROKEN))
        Store(tmp_path).save(HEALTHY)
        assert run(["report", str(tmp_path)]) == 0
        assert "1 of 2 lanes were judged by an older detector" in capsys.readouterr().err

    def test_is_pointed_to_where_it_saves_a_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ["--depth", "4", "--width", "16", "--batch", "2", "--seq", "16"]
        options += ["--peak", "0.05", "--seeds", "1", "--out", str(tmp_path / "r")]
        command = ["maxlr", "pre_ln", *options, "--workers", "0", "--json", "-"]
        assert run(command) == 0
        store = Store(tmp_path / "r")
        (record,) = store.records()
        store.remove(record.id)
        store.save(older(record))
        capsys.readouterr()
        assert run(["rejudge", str(store.folder)]) == 0
        assert run(command) == 0
        assert "nothing to do" in capsys.readouterr().err
        store.save(older(record))
        store.remove(record.id)
        assert run(command) == 0
        noted = capsys.readouterr().err
        assert "1 of them was measured under an older detector" in noted
        assert "keelbench rejudge" in noted


def test_every_rule_survives_the_way_through_the_store(tmp_path: Path) -> None:
    stuck = judged(sample.trace(400, None, floor=sample.UNIGRAM - 0.02))
    assert stuck.verdict.rule is Rule.STAGNATION
    Store(tmp_path).save(older(stuck))
    ((reading, _, new),) = rejudge(Store(tmp_path), Store(tmp_path).records())
    assert reading is Reading.SAME
    assert np.array_equal(new.trace.loss, stuck.trace.loss)
