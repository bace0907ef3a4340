"""Records on disk: whole or not at all, exact numbers, clear errors."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import refusal

from keelbench import store as store_module
from keelbench.errors import ExitCode, KeelbenchError
from keelbench.records import (
    RECORD_SCHEMA,
    Environment,
    Record,
    Rule,
    Trace,
    Verdict,
    VerdictKind,
    max_lr_of,
    record_id,
)
from keelbench.specs import CellSpec
from keelbench.store import Store, read_record, write_atomically

AWKWARD = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf, 0.0]


def record(seed: int = 0, **cell: Any) -> Record:
    steps = len(AWKWARD)
    return Record(
        cell=CellSpec().replaced(cell).resolved(),
        seed=seed,
        detector="1",
        verdict=Verdict(
            kind=VerdictKind.DIVERGED,
            rule=Rule.NON_FINITE,
            onset_step=4,
            detected_step=6,
            reason="loss is not finite",
        ),
        max_lr=1 / 3,
        trace=Trace(
            lr=np.arange(1, steps + 1) * 1.6e-4,
            loss=np.array(AWKWARD),
            grad_norm=np.array(AWKWARD[::-1]),
            probe_step=np.arange(0, steps, 4),
            probe=np.array([math.nan, 2.5]),
            unigram_entropy=3.0695,
        ),
        seconds=1.5,
        environment=Environment(torch="2.13.0", extra={"compiled": False}),
        created="2026-01-01T00:00:00+00:00",
        diagnosis={"trials": [1, 2]},
    )


def assert_same(one: Record, other: Record) -> None:
    for field in dataclasses.fields(Record):
        if field.name != "trace":
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    for field in dataclasses.fields(Trace):
        ours, theirs = getattr(one.trace, field.name), getattr(other.trace, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes() or np.array_equal(
                ours, theirs, equal_nan=True
            )
        else:
            assert ours == theirs


# Round trip


def test_a_record_comes_back_bit_by_bit_with_nan_and_infinity(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved = record()
    path = store.save(saved)
    assert path == tmp_path / "records" / f"{saved.id}.json"
    loaded = store.load(saved.id)
    assert loaded is not None
    assert_same(loaded, saved)
    assert loaded.id == saved.id


def test_the_file_is_strict_json_and_carries_its_schema(tmp_path: Path) -> None:
    path = Store(tmp_path).save(record())

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    values = json.loads(path.read_text(), parse_constant=no_constants)
    assert values["schema"] == RECORD_SCHEMA
    assert values["trace"]["loss"][4:7] == ["nan", "inf", "-inf"]
    assert values["cell"]["ramp"]["slope"] == pytest.approx(1.6e-4), "defaults are spelled out"


def test_a_trace_without_optional_columns_comes_back(tmp_path: Path) -> None:
    bare = dataclasses.replace(
        record(), trace=Trace(lr=np.array([1e-3]), loss=np.array([4.0])), diagnosis=None
    )
    store = Store(tmp_path)
    store.save(bare)
    loaded = store.load(bare.id)
    assert loaded is not None
    assert_same(loaded, bare)


def test_an_id_tells_cell_seed_and_detector_apart_and_nothing_else() -> None:
    cell = CellSpec()
    ids = {
        record_id(cell, 0, "1"),
        record_id(cell, 1, "1"),
        record_id(cell, 0, "2"),
        record_id(cell.replaced({"depth": 32}), 0, "1"),
    }
    assert len(ids) == 4
    assert record_id(cell.resolved(), 0, "1") == record_id(cell, 0, "1")
    assert dataclasses.replace(record(), seconds=99.0).id == record().id


def test_records_are_listed_in_order_whatever_the_names_of_their_files(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    assert store.records() == []
    for settings in ({"depth": 32}, {"depth": 8}, {"arch": "deepnorm"}):
        for seed in (1, 0):
            store.save(record(seed, **settings))
    listed = [(r.cell.model.arch, r.cell.model.depth, r.seed) for r in store.records()]
    assert listed == sorted(listed)
    assert len(listed) == 6


def test_a_record_can_be_replaced_and_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(record())
    store.save(dataclasses.replace(record(), seconds=9.0))
    (only,) = store.records()
    assert only.seconds == 9.0
    store.remove(only.id)
    store.remove(only.id)
    assert store.load(only.id) is None


def test_max_lr_is_the_lr_of_the_step_before_the_onset() -> None:
    trace = record().trace
    diverged = Verdict(kind=VerdictKind.DIVERGED, onset_step=3)
    assert max_lr_of(trace, diverged) == trace.lr[2]
    assert max_lr_of(trace, dataclasses.replace(diverged, onset_step=0)) is None
    for kind in (VerdictKind.SURVIVED, VerdictKind.NEVER_LEARNED, VerdictKind.FAILED):
        assert max_lr_of(trace, Verdict(kind=kind)) is None


def test_a_survivor_gives_a_lower_bound_and_no_max_lr() -> None:
    survived = dataclasses.replace(
        record(), verdict=Verdict(kind=VerdictKind.SURVIVED), max_lr=None
    )
    assert survived.is_censored and survived.lower_bound == survived.trace.lr[-1]
    assert survived.normalized_max_lr is None
    assert not record().is_censored and record().lower_bound is None
    assert record(width=128).normalized_max_lr == pytest.approx(1 / 3 * 128 / 1024)


# Atomicity


def test_nothing_but_whole_records_is_left_behind(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.prepare()
    for seed in range(3):
        store.save(record(seed))
    names = sorted(path.name for path in store.records_folder.iterdir())
    assert names == sorted(f"{record(seed).id}.json" for seed in range(3))


def test_a_write_that_breaks_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]
    with pytest.raises(KeelbenchError) as caught:
        Store(tmp_path).save(record())
    assert caught.value.exit_code == ExitCode.FAILED
    assert "No space left on device" in caught.value.message
    assert "finished lanes are kept" in (caught.value.hint or "")


WRITER = """
import sys
from keelbench.store import Store
store = Store(sys.argv[1])
records = store.records()
for turn in range(10):
    store.prepare()
    for record in records:
        store.save(record)
    assert len(store.records()) == len(records) == 3
"""


def test_four_processes_may_write_the_same_records_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        store.save(record(seed))
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    for writer in writers:
        _, complaint = writer.communicate(timeout=60)
        assert writer.returncode == 0, complaint.decode()
    for seed, found in enumerate(sorted(store.records(), key=lambda r: r.seed)):
        assert_same(found, record(seed))
    assert len(list(store.records_folder.iterdir())) == 3, "no temporary file is left"


# What can be wrong on disk


def damaged(content: str, tmp_path: Path) -> str:
    path = tmp_path / "bad.json"
    path.write_text(content)
    message = refusal(lambda: read_record(path))
    assert str(path) in message
    return message


def test_a_damaged_record_is_refused_with_the_way_out(tmp_path: Path) -> None:
    whole = json.dumps(record().to_dict())
    without_trace = {k: v for k, v in record().to_dict().items() if k != "trace"}
    wrong_kind = record().to_dict() | {"verdict": {"kind": "exploded", "rule": None}}
    for content in (
        whole[: len(whole) // 2],
        "",
        "[]",
        "null",
        json.dumps(without_trace),
        json.dumps(wrong_kind),
    ):
        message = damaged(content, tmp_path)
        assert f"is not a whole {RECORD_SCHEMA} record" in message
        assert "delete the file and run the same command again" in message


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    newer = record().to_dict() | {"schema": "keelbench.record/99"}
    message = damaged(json.dumps(newer), tmp_path)
    assert "keelbench.record/99" in message and RECORD_SCHEMA in message
    assert "upgrade keelbench" in message


def test_an_older_schema_is_lifted_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lifted(to: str, **changes: Any) -> Any:
        return lambda values: values | changes | {"schema": to}

    monkeypatch.setitem(store_module.MIGRATIONS, "test/1", lifted("test/2", seconds=1.0))
    monkeypatch.setitem(store_module.MIGRATIONS, "test/2", lifted(RECORD_SCHEMA, seed=7))
    path = tmp_path / "old.json"
    path.write_text(json.dumps(record().to_dict() | {"schema": "test/1"}))
    found = read_record(path)
    assert (found.seconds, found.seed) == (1.0, 7)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, open_folder: Path, unprivileged: None
) -> None:
    blocking = open_folder / "file"
    blocking.write_text("not a folder")
    message = refusal(Store(blocking).prepare)
    assert f"cannot write {blocking / 'records'}" in message and "--out" in message
    closed = open_folder / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    assert "Permission denied" in refusal(Store(closed / "results").prepare)


def test_a_folder_may_have_spaces_and_any_letters(tmp_path: Path) -> None:
    store = Store(tmp_path / "my résultats ☂")
    store.prepare()
    store.save(record())
    assert len(store.records()) == 1
