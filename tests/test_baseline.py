import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from gate_sample import ARCHS, DETECTOR, ENVIRONMENT, agreed, cell, deal, lane, lanes
from gate_sample import not_carried_out as crashed
from hypothesis import given
from hypothesis import strategies as st

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.gate import (
    Baseline,
    Calibration,
    baseline_path,
    build_baseline,
    diff,
    find_baseline,
    hardware_class,
    list_baselines,
    load,
    save,
)
from keelbench.gate.lanes import Lane
from keelbench.records import VerdictKind

VALUES = {"keel": np.array([0.030, 0.034, 0.027]), "pre_ln": np.array([0.05, 0.06, 0.055])}


@pytest.fixture
def baseline() -> Baseline:
    return agreed(VALUES)


def refusal(path: Path) -> KeelbenchError:
    with pytest.raises(KeelbenchError) as caught:
        load(path)
    assert caught.value.exit_code == ExitCode.NO_BASELINE
    assert caught.value.hint
    return caught.value


def test_a_baseline_survives_the_disk_bit_for_bit(tmp_path: Path) -> None:
    spec = cell("keel")
    odd = [4.85, 1 / 3, float("nan"), float("inf"), 1e-300]
    records = [
        lane(spec, 0, 0.03, losses=odd),
        lane(spec, 1, kind=VerdictKind.SURVIVED),
        lane(spec, 2, kind=VerdictKind.NEVER_LEARNED),
        lane(spec, 3),
        crashed(spec, 4),
    ]
    built = build_baseline("ci", records, sweep="sweeps/ci.yaml")
    key = built.cells[0].hash
    built = built.calibrated({key: Calibration(sd=0.04, df=5, margin=0.12)})
    read = load(save(built, tmp_path / "deep" / "ci.json"))
    assert read.to_dict() == built.to_dict()
    assert read.cells[0].lanes[0].losses.tobytes() == np.array(odd).tobytes()
    assert read.cells[0].calibration == built.cells[0].calibration
    assert read.cells[0].lanes[1].is_censored
    assert not read.cells[0].lanes[4].was_carried_out
    outcomes = [read.cells[0].lanes[seed].outcome for seed in range(5)]
    assert outcomes == ["0.03", ">= 0.8", "never learned", "diverged at once", "failed"]


def test_the_file_is_readable_and_says_everything(baseline: Baseline, tmp_path: Path) -> None:
    text = save(baseline, tmp_path / "ci.json").read_text()
    values = json.loads(text)
    assert values["schema"] == "keelbench.baseline/1"
    assert values["hardware"] == "cpu-x86_64" and values["detector"] == DETECTOR
    assert values["environment"]["torch"] == ENVIRONMENT.torch
    first = values["cells"][0]
    assert first["label"] == "keel L16 w64"
    assert first["settings"]["model"]["init_std"] == pytest.approx(0.08)
    assert [one["seed"] for one in first["lanes"]] == [0, 1, 2]
    assert max(map(len, text.splitlines())) < 200


@given(st.lists(st.floats(width=64), max_size=20))
def test_losses_survive_text(losses: list[float]) -> None:
    made = Lane.from_record(lane(cell(), 0, 0.03, losses=[5.0, *losses]))
    read = Lane.from_dict(json.loads(json.dumps(made.to_dict())))
    assert read.losses.tobytes() == made.losses.tobytes()
    assert hashlib.sha256(read.losses.tobytes()).hexdigest() == made.sha256


def test_checksum_tells_the_last_bit(baseline: Baseline) -> None:
    spec = cell("keel")
    a = Lane.from_record(lane(spec, 0, 0.03, losses=[4.0, 3.0]))
    b = Lane.from_record(lane(spec, 0, 0.03, losses=[4.0, np.nextafter(3.0, 4.0)]))
    assert a.sha256 != b.sha256
    assert a.sha256 == Lane.from_record(lane(spec, 0, 0.03, losses=[4.0, 3.0])).sha256


def test_large_baselines_keep_only_checksums() -> None:
    small = build_baseline("ci", lanes(cell(), [0.03] * 3), max_losses=12)
    large = build_baseline("ci", lanes(cell(), [0.03] * 3), max_losses=11)
    assert small.cells[0].lanes[0].losses is not None
    assert large.cells[0].lanes[0].losses is None
    assert large.cells[0].lanes[0].sha256 == small.cells[0].lanes[0].sha256


def test_the_later_record_of_a_lane_counts() -> None:
    spec = cell()
    old = dataclasses.replace(lane(spec, 0, 0.01), created="2026-01-01T00:00:00Z")
    found = build_baseline("ci", [lane(spec, 0, 0.02), old])
    assert found.cells[0].lanes[0].max_lr == 0.02


def test_a_missing_baseline(tmp_path: Path) -> None:
    error = refusal(tmp_path / "none.json")
    assert "there is no baseline at" in error.message


def test_an_unreadable_baseline(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    assert "cannot read baseline" in refusal(tmp_path / "folder.json").message


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_baseline(baseline: Baseline, tmp_path: Path, share: float) -> None:
    path = save(baseline, tmp_path / "ci.json")
    text = path.read_text()
    path.write_text(text[: int(share * len(text))])
    assert "truncated" in refusal(path).message


def test_a_baseline_that_is_binary(tmp_path: Path) -> None:
    (tmp_path / "ci.json").write_bytes(b"\xff\xfe\x00")
    assert "truncated or not JSON" in refusal(tmp_path / "ci.json").message


def edited(baseline: Baseline, tmp_path: Path, change: dict[str, object]) -> Path:
    path = tmp_path / "ci.json"
    path.write_text(json.dumps({**baseline.to_dict(), **change}))
    return path


def test_a_baseline_of_a_newer_schema(baseline: Baseline, tmp_path: Path) -> None:
    error = refusal(edited(baseline, tmp_path, {"schema": "keelbench.baseline/2"}))
    assert "keelbench.baseline/2" in error.message and "upgrade" in (error.hint or "")


@pytest.mark.parametrize("content", ['{"schema": "keelbench.record/1"}', "[]", "3", "{}"])
def test_a_file_that_is_no_baseline(tmp_path: Path, content: str) -> None:
    (tmp_path / "ci.json").write_text(content)
    assert "is not a baseline" in refusal(tmp_path / "ci.json").message


def test_an_incomplete_baseline(baseline: Baseline, tmp_path: Path) -> None:
    values = baseline.to_dict()
    del values["cells"][0]["lanes"][0]["max_lr"]
    assert "incomplete" in refusal(edited(baseline, tmp_path, values)).message


@pytest.mark.parametrize("number", [0, -0.1, "0.03"])
def test_a_baseline_edited_by_hand(baseline: Baseline, tmp_path: Path, number: object) -> None:
    values = baseline.to_dict()
    values["cells"][0]["lanes"][0]["max_lr"] = number
    assert "must be a positive number" in refusal(edited(baseline, tmp_path, values)).message


def test_a_baseline_without_cells(baseline: Baseline, tmp_path: Path) -> None:
    assert "no cells" in refusal(edited(baseline, tmp_path, {"cells": []})).message


def test_writing_where_one_must_not(baseline: Baseline, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeelbenchError, match="cannot write") as caught:
        save(baseline, tmp_path / "file" / "ci.json")
    assert caught.value.exit_code == ExitCode.USAGE


def test_building_from_nothing() -> None:
    with pytest.raises(KeelbenchError, match="no results to make baseline 'ci'") as caught:
        build_baseline("ci", [])
    assert caught.value.exit_code == ExitCode.FAILED
    with pytest.raises(KeelbenchError, match="out of memory"):
        build_baseline("ci", [crashed(cell(), 0)])


def test_building_from_a_cell_that_never_ran() -> None:
    records = [*lanes(cell("keel"), [0.03]), crashed(cell("pre_ln"), 0)]
    with pytest.raises(KeelbenchError, match="every lane of pre_ln L16 w64 failed") as caught:
        build_baseline("ci", records)
    assert caught.value.exit_code == ExitCode.FAILED


def test_building_from_records_that_do_not_belong_together() -> None:
    first, second = lanes(cell(), [0.03, 0.04])
    other = dataclasses.replace(second, detector="8")
    with pytest.raises(KeelbenchError, match="2 detector versions: 7, 8"):
        build_baseline("ci", [first, other])
    arm = dataclasses.replace(ENVIRONMENT, platform="Linux-aarch64")
    with pytest.raises(KeelbenchError, match="2 hardware classes: cpu-aarch64, cpu-x86_64"):
        build_baseline("ci", [first, dataclasses.replace(second, environment=arm)])


@pytest.mark.parametrize(
    ("platform", "device", "expected"),
    [
        ("Linux-6.1.0-x86_64-with-glibc2.36", "cpu", "cpu-x86_64"),
        ("Windows-AMD64", "cpu", "cpu-x86_64"),
        ("Darwin-arm64", "cpu", "cpu-aarch64"),
        ("", "cpu", "cpu-unknown"),
        ("Linux-x86_64", "cuda", "cuda-nvidia-h100-80gb-hbm3"),
    ],
)
def test_hardware_classes(platform: str, device: str, expected: str) -> None:
    place = dataclasses.replace(
        ENVIRONMENT, platform=platform, device_name="NVIDIA H100 80GB HBM3"
    )
    assert hardware_class(place, device) == expected


def test_one_class_for_all_vector_extensions() -> None:
    old = dataclasses.replace(ENVIRONMENT, extra={"cpu_capability": "AVX2"})
    new = dataclasses.replace(ENVIRONMENT, extra={"cpu_capability": "AVX512"})
    assert hardware_class(old) == hardware_class(new)


def test_finding_and_listing(baseline: Baseline, tmp_path: Path) -> None:
    path = save(baseline, baseline_path(tmp_path, "ci", baseline.hardware))
    (tmp_path / "broken.json").write_text("{")
    assert path.name == "ci--cpu-x86_64.json"
    assert find_baseline("ci", "cpu-x86_64", tmp_path)[0] == path
    broken, good = list_baselines(tmp_path)
    assert broken.problem and "truncated" in broken.problem
    assert (good.name, good.cells, good.lanes, good.problem) == ("ci", 2, 6, None)
    assert list_baselines(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("name", "hardware", "message"),
    [
        ("nightly", "cpu-x86_64", "there is no baseline 'nightly' .* there is ci"),
        ("ci", "cuda-h100", "'ci' has no numbers for cuda-h100, only for cpu-x86_64"),
    ],
)
def test_finding_none(
    baseline: Baseline, tmp_path: Path, name: str, hardware: str, message: str
) -> None:
    save(baseline, baseline_path(tmp_path, "ci", baseline.hardware))
    with pytest.raises(KeelbenchError, match=message) as caught:
        find_baseline(name, hardware, tmp_path)
    assert caught.value.exit_code == ExitCode.NO_BASELINE


def test_diff_of_equal_baselines(baseline: Baseline) -> None:
    heads, cells = diff(baseline, dataclasses.replace(baseline, created="later"))
    assert heads == []
    assert [one.status for one in cells] == ["same", "same"]
    assert all(one.ratio is None and not one.details for one in cells)


def test_diff_names_what_changed(baseline: Baseline) -> None:
    values = {"keel": VALUES["keel"] * 0.8, "post_ln": np.array([0.01])}
    newer = dataclasses.replace(agreed(values), detector="8")
    heads, cells = diff(baseline, newer)
    assert heads == ["detector: 7 -> 8"]
    found = {one.label: one for one in cells}
    keel = found["keel L16 w64"]
    assert keel.status == "changed" and keel.ratio == pytest.approx(0.8)
    assert keel.details[0] == "seed 0: 0.03 -> 0.024"
    assert found["post_ln L16 w64"].status == "added"
    assert found["pre_ln L16 w64"].status == "removed"


def test_diff_names_settings(baseline: Baseline) -> None:
    other = build_baseline("ci", lanes(cell("keel", dtype="bfloat16"), [0.03] * 3))
    _, cells = diff(baseline, other)
    added = next(one for one in cells if one.status == "added")
    assert added.details == ("dtype: float32 -> bfloat16",)


def test_seeds_are_those_that_every_cell_has() -> None:
    records = [*lanes(cell("keel"), [0.03] * 5), *lanes(cell("pre_ln"), [0.05] * 3)]
    found = build_baseline("ci", records)
    assert found.seeds == (0, 1, 2)
    assert found.only([found.cells[0].hash]).seeds == (0, 1, 2, 3, 4)


def test_six_architectures_fit_one_file(tmp_path: Path) -> None:
    values = deal(np.random.default_rng(0))
    assert [one.spec.model.arch for one in agreed(values).cells] == list(ARCHS)
