"""What a machine can run at once: quotas of containers, memory, lanes."""

import math
from pathlib import Path

import pytest
from helpers import tiny_cell

from keelbench import capacity
from keelbench.capacity import (
    MAX_LANES,
    available_cores,
    free_memory,
    lanes_at_once,
    machine_memory,
    useful_cores,
    visible_gpus,
)
from keelbench.memory import SAFE_SHARE, estimate_memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", 8),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("6400000 100000", 8),
        ("", 8),
    ],
)
def test_a_containers_quota_limits_the_cores(
    text: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    monkeypatch.setattr(capacity, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert available_cores() == expected


@pytest.mark.parametrize(("quota", "expected"), [("250000", 3), ("-1", 8), ("", 8)])
def test_older_systems_tell_a_quota_in_two_files(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(capacity, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert available_cores() == expected


def test_where_there_is_no_quota_and_no_affinity_the_system_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "CGROUP", tmp_path / "nowhere")
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert available_cores() == 3


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        ({8: 7.5, 4: 4.0, 2: 2.0, 1: 1.0}, 8),  # eight cores
        ({8: 4.3, 4: 4.0, 2: 2.0, 1: 1.0}, 4),  # four, with two hyperthreads each
        ({8: 1.1, 4: 1.05, 2: 1.0, 1: 1.0}, 1),  # one core, eight threads
    ],
)
def test_a_process_for_each_core_that_does_more(
    gain: dict[int, float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    useful_cores.cache_clear()
    monkeypatch.setattr(capacity, "_rate", gain.__getitem__)
    assert useful_cores(8) == expected
    useful_cores.cache_clear()


def test_one_core_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    useful_cores.cache_clear()
    monkeypatch.setattr(capacity, "_rate", None)
    assert useful_cores(1) == 1


def test_more_threads_are_measured_as_more_work() -> None:
    assert capacity._rate(1) > 0 and capacity._rate(3) > 0


def test_free_memory_is_shared_by_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:    60 kB\n")
    monkeypatch.setattr(capacity, "MEMORY", tmp_path / "meminfo")
    assert free_memory("cpu", 3) == 20 * 1024
    monkeypatch.setattr(capacity, "MEMORY", tmp_path / "nowhere")
    assert free_memory("cpu", 2) == machine_memory() / 2
    (tmp_path / "odd").write_text("MemTotal: 100 kB\n")
    monkeypatch.setattr(capacity, "MEMORY", tmp_path / "odd")
    assert math.isinf(free_memory("cpu", 2))


def test_lanes_are_as_many_as_pay_and_fit() -> None:
    cell = tiny_cell()
    three = estimate_memory(cell, 128, 3) / SAFE_SHARE
    assert lanes_at_once(cell, 128, three * 1.01) == 3
    assert lanes_at_once(cell, 128, 0) == 1
    assert lanes_at_once(cell, 128, math.inf) == MAX_LANES["cpu"]
    assert lanes_at_once(cell, 128, 2**40) == MAX_LANES["cpu"]
    own = cell.replaced({"model.module": "somewhere:build"})
    assert lanes_at_once(own, 0, 0) == MAX_LANES["cpu"], "nobody knows what it takes"


def test_only_the_gpus_that_are_named_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    assert visible_gpus() == ["2", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
