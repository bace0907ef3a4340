"""The study commands end to end: results on stdout, files in the folder, all else on stderr."""

import json
from pathlib import Path
from typing import Any

import pytest

from keelbench.cli import run

TINY = ["--depth", "4", "--width", "16", "--batch", "2", "--seq", "16", "--workers", "0", "-q"]
TRAIN = [*TINY, "--steps", "6", "--seeds", "2"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


COMMANDS: dict[str, list[str]] = {
    "gradients": [*TINY, "--arch", "keel,siamese", "--at", "3"],
    "lrsweep": [*TRAIN, "--lrs", "1e-3:1e-1:3", "--arch", "keel"],
    "redundancy": [*TRAIN, "--arch", "keel", "--unit", "block"],
    "scaling": [*TRAIN, "--arch", "keel", "--lrs", "1e-2", "--no-ramp"],
    "tasks": [*TRAIN, "--arch", "keel", "--lrs", "1e-2", "--task", "hops(symbols=3),brackets"],
}

FIGURES = {
    "gradients": ["gradients"],
    "lrsweep": ["loss_lr", "training"],
    "redundancy": ["redundancy"],
    "scaling": ["scaling"],
    "tasks": ["tasks"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_study_prints_json_and_writes_its_files(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, *COMMANDS[command], "--json", "-"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["schema"] == "keelbench.study/1" and found["study"] == command
    assert found["rows"] and found["details"]
    assert {row["width"] for row in found["rows"]} == {16}
    folder = Path("results") / command
    assert json.loads((folder / f"{command}.json").read_text()) == found
    assert (folder / f"{command}.csv").read_text().count("\n") == len(found["rows"]) + 1
    for name in FIGURES[command]:
        assert (folder / f"{name}.png").stat().st_size > 1000
        assert (folder / f"{name}.svg").exists()
    assert "started" not in captured.err


def test_a_study_prints_a_table_and_its_progress_goes_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [word for word in COMMANDS["lrsweep"] if word != "-q"]
    assert run(["lrsweep", *arguments, "--out", "here"]) == 0
    captured = capsys.readouterr()
    header, *rows = captured.out.splitlines()
    assert header.split()[:3] == ["arch", "L", "width"] and len(rows) == 1
    assert rows[0].startswith("keel")
    assert "keel L=4 width 16, 6 lanes: started" in captured.err
    assert Path("here/lrsweep.json").exists()


def test_a_budget_is_solved_for_and_ramps_are_stored(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wide = ["--depth", "2,8", "--batch", "1", "--seq", "8", "--workers", "0", "-q"]
    train = ["--steps", "2", "--seeds", "1", "--lrs", "1e-2"]
    arguments = [*wide, "--parameters", "61000", *train]
    Path("s.yaml").write_text("name: s\ndefaults: {arch: keel, peak: 1.6e-3, slope: 1.6e-4}\n")
    assert run(["scaling", "s.yaml", *arguments, "--no-ramp", "--json", "-"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert [row["depth"] for row in rows] == [2, 8]
    assert rows[0]["width"] > rows[1]["width"]
    assert all(abs(row["parameters"] / 61_000 - 1) < 0.1 for row in rows)
    fixed = ["--depth", "4", "--width", "16", *wide[2:], *train]
    assert run(["scaling", "s.yaml", *fixed]) == 0
    assert len(list(Path("results/s/records").glob("*.json"))) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gradients", "--at", "end"], "--at is 'end'"),
        (["gradients", "--arch", "kel"], "did you mean 'keel'?"),
        (["gradients", "--depth", "5"], "must be even"),
        (["redundancy", "--unit", "layer"], "--unit is 'layer'"),
        (["lrsweep", "--lrs", "fast"], "--lrs is 'fast'"),
        (["lrsweep", "--lrs", "1e-3,-1"], "--lrs is '1e-3,-1'"),
        (["lrsweep", "--lrs", "1:2"], "--lrs is '1:2'"),
        (["lrsweep", "--steps", "0"], "steps is 0"),
        (["lrsweep", "none.yaml"], "cannot read sweep none.yaml"),
        (["tasks", "--task", "hop"], "did you mean 'hops'?"),
        (["scaling", "--parameters", "10", "--depth", "8"], "no width at depth 8"),
        (["lrsweep", "--workers", "many"], "--workers is 'many'"),
    ],
)
def test_a_mistake_is_said_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""
    assert not Path("results").exists()


def test_an_interrupted_study_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keelbench.gradients.gradient_profiles", stop)
    assert run(["gradients", *TINY]) == 130
    assert "interrupted" in capsys.readouterr().err
