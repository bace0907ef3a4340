"""The study commands end to end: results on stdout, files in the folder, all else on stderr."""

import json
from pathlib import Path
from typing import Any

import pytest

from keelbench.cli import run
from keelbench.cli.study_input import lrs_of
from keelbench.cli.study_output import table

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
    header, row, blank, *caption = captured.out.splitlines()
    assert header.split()[:2] == ["arch", "L"] and row.startswith("keel") and not blank
    assert " ".join(caption) == (
        "width 16 · 6 steps · batch 2 × 16 tokens · data kjv · float32 on cpu · seeds 0-1 · "
        "no interval below 3 seeds"
    )
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


def row_of(arch: str, width: int, **values: Any) -> dict[str, Any]:
    return {"arch": arch, "depth": 8, "width": width, **values}


COLUMNS = {"arch": "arch", "depth": "L", "width": "width", "best_lr": "best LR", "loss": "loss"}


def test_what_rows_share_is_left_to_the_caption() -> None:
    rows = [row_of("keel", 16, best_lr=2e-2, loss=2.5), row_of("pre_ln", 16, best_lr=1, loss=3)]
    assert table(rows, COLUMNS).splitlines() == [
        "arch    L  best LR  loss",
        "keel    8     2e-2   2.5",
        "pre_ln  8        1     3",
    ]
    rows[1]["width"] = 32
    assert table(rows, COLUMNS).splitlines()[0].split()[:3] == ["arch", "L", "width"]


def test_a_number_has_the_digits_that_its_interval_allows() -> None:
    values = {"best_lr": 0.02185, "best_lr_low": 0.0058, "best_lr_high": 0.0819}
    values |= {"loss": 2.9127, "loss_low": 2.7163, "loss_high": 3.1091}
    (_, line) = table([row_of("keel", 16, **values)], COLUMNS).splitlines()
    assert line == "keel  8  2.2e-2 [0.6, 8.2]  2.91 [2.72, 3.11]"
    bound = row_of("keel", 16, best_lr=None, best_lr_low=0.5, best_lr_high=None, loss=2e5)
    assert table([bound], COLUMNS).splitlines()[1].split() == ["keel", "8", ">=", "5e-1", "2e5"]


def test_a_table_that_is_too_wide_has_its_intervals_below_their_values() -> None:
    values = {"best_lr": 0.02, "loss": 2.9127, "loss_low": 2.7163, "loss_high": 3.1091}
    lines = table([row_of("hyper_connections", 16, **values)], COLUMNS, 44).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["hyper_connections", "8", "2e-2", "2.91"],
        ["[2.72,", "3.11]"],
    ]
    assert max(map(len, lines)) <= 44


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_keep_to_80_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["3" if word == "2" else word for word in COMMANDS[command]]
    assert run([command, *arguments]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_shape_that_a_budget_asks_for_must_fit_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    huge = ["--depth", "8", "--parameters", "5000000000", "--arch", "keel"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keelbench.capacity.machine_memory", lambda: 2.0**34)
        assert run(["scaling", *huge]) == 2
    assert "needs about" in capsys.readouterr().err


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
        (["gradients", "--at", "5000"], "step 5000 is not on the ramp of post_ln"),
        (["redundancy", "--lr", "0"], "lr is 0: it must be positive"),
        (["redundancy", "--lr", "nan"], "lr is nan"),
        (["scaling", "--parameters", "0"], "parameters is 0: it must be at least 1"),
        (["scaling", "--parameters", "-5"], "parameters is -5"),
        (["tasks", "--task", ""], "known are induction, hops"),
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


def test_an_lr_grid_names_each_lr_once() -> None:
    assert lrs_of("1e-3:1e-3:4") == [1e-3] and lrs_of("2e-3,1e-3,2e-3") == [1e-3, 2e-3]
