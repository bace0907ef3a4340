"""The fixture ``stability_gate``, in a pytest of its own, with the runs replaced."""

from pathlib import Path

import pytest
from gate_sample import cell, lanes

from keelbench.gate import build_baseline, save

pytest_plugins = ["pytester"]

OLD = [0.030, 0.034, 0.027, 0.031, 0.029]

CONFTEST = """
import numpy as np
import pytest
from gate_sample import lanes
import keelbench.pytest_plugin as plugin

RATIO = {ratio}

def run_cells(cells, seeds, store):
    old = np.array({old}) * np.array(RATIO)
    return [r for cell in cells for r in lanes(cell.resolved(), old) if r.seed in seeds]

@pytest.fixture(autouse=True)
def dealt(monkeypatch):
    monkeypatch.setattr(plugin, "_run_cells", lambda: run_cells)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a committed baseline of two cells."""
    pytester.syspathinsert(Path(__file__).parent)
    records = [*lanes(cell("keel"), OLD), *lanes(cell("pre_ln"), OLD)]
    save(build_baseline("ci", records), pytester.path / "results/baselines/ci.json")
    return pytester


def outcome(project: pytest.Pytester, call: str, ratio: object = 1.0, *args: str) -> str:
    """Run one test that makes this call; its outcome and what it printed."""
    project.makeconftest(CONFTEST.format(ratio=ratio, old=OLD))
    project.makepyfile(f"def test_it(stability_gate):\n    report = {call}\n    assert report")
    result = project.runpytest_inprocess("-p", "no:cacheprovider", "-rsf", *args)
    counts = result.parseoutcomes()
    return f"{' '.join(sorted(counts))}: {result.stdout.str()}"


def test_a_pass(project: pytest.Pytester) -> None:
    assert outcome(project, "stability_gate('keel', depth=16)").startswith("passed")


def test_a_regression_fails_with_the_numbers(project: pytest.Pytester) -> None:
    text = outcome(project, "stability_gate('keel', depth=16)", 0.5)
    assert text.startswith("failed") and "fell by 50 %" in text


def test_a_wider_margin_lets_it_pass(project: pytest.Pytester) -> None:
    text = outcome(project, "stability_gate('keel', depth=16, margin=0.6)", 0.5)
    assert text.startswith("passed")


def test_undecided_is_skipped_or_fails_if_strict(project: pytest.Pytester) -> None:
    ratio = [1.4, 0.6, 1.2, 0.8, 0.9]
    text = outcome(project, "stability_gate('keel', depth=16)", ratio)
    assert text.startswith("skipped") and "cannot decide with 5 seeds" in text
    assert outcome(project, "stability_gate('keel', depth=16, strict=True)", ratio).startswith(
        "failed"
    )


def test_a_setting_that_differs_must_be_allowed(project: pytest.Pytester) -> None:
    call = "stability_gate('keel', depth=16, dtype='bfloat16'{})"
    text = outcome(project, call.format(""))
    assert text.startswith("failed") and "dtype: float32 -> bfloat16" in text
    assert outcome(project, call.format(", allow=['dtype']")).startswith("passed")


def test_a_cell_that_the_baseline_lacks(project: pytest.Pytester) -> None:
    text = outcome(project, "stability_gate('keel', depth=18)")
    assert text.startswith("failed") and "has no cells of keel at depth 18" in text
    assert "pre_ln L16 w64" in text


def test_cells_that_differ_in_a_setting_must_be_told_apart(project: pytest.Pytester) -> None:
    records = [*lanes(cell("keel"), OLD), *lanes(cell("keel", clip=0.5), OLD)]
    save(build_baseline("ci", records), project.path / "results/baselines/ci.json")
    text = outcome(project, "stability_gate('keel', depth=16)")
    assert text.startswith("failed") and "has 2 cells of keel" in text
    assert outcome(project, "stability_gate('keel', depth=16, clip=0.5)").startswith("passed")


def test_where_the_baseline_is(project: pytest.Pytester) -> None:
    here = project.path / "results/baselines/ci.json"
    there = project.mkdir("elsewhere") / "other.json"
    here.rename(there)
    call = "stability_gate('keel', depth=16)"
    assert "which baseline?" in outcome(project, call)
    assert outcome(project, call, 1.0, "--keelbench-baseline", str(there)).startswith("passed")
    explicit = f"stability_gate('keel', depth=16, baseline={str(there)!r})"
    assert outcome(project, explicit).startswith("passed")
    project.makeini("[pytest]\nkeelbench_baseline = elsewhere/other.json")
    assert outcome(project, call).startswith("passed")
