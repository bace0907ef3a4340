"""End to end through the command line, as people use it. Run: pytest tests/test_cli.py"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keelbench.archs import ARCHS
from keelbench.cli import run
from keelbench.cli.options import sweep_from

TINY = ["--depth", "4", "--width", "16", "--batch", "2", "--seq", "16", "--peak", "0.3"]
TRACES = Path(__file__).parent / "traces"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def keelbench(*arguments, **options):
    """The command in a process of its own, as from a shell."""
    return subprocess.run(
        [sys.executable, "-m", "keelbench", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        **options,
    )


def lanes_of(folder):
    """Everything of a folder's records that must be the same from run to run."""
    lanes = {}
    for path in sorted(Path(folder).glob("records/*.json")):
        record = json.loads(path.read_text())
        lanes[record["id"]] = (record["max_lr"], record["verdict"], record["trace"]["loss"])
    return lanes


def assert_refused(capsys, arguments, *words):
    """Exit code 2, one message that holds these words, nothing on stdout, nothing run."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    for word in words:
        assert word in captured.err
    assert not Path("results").exists() or not list(Path("results").glob("*/records/*.json"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two architectures measured once, for all tests that only read."""
    folder = tmp_path_factory.mktemp("measured")
    done = keelbench(
        *("maxlr", "keel", "post_ln", *TINY, "--seeds", 3, "--workers", 0, "--out", "r"),
        *("--json", "out.json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder, done


def test_maxlr_prints_a_table_and_leaves_the_files(measured):
    folder, done = measured
    assert "Max LR" in done.stdout and "keel" in done.stdout and "slope" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    names = {path.name for path in (folder / "r").iterdir()}
    assert {"records", "summary.csv", "table.md", "report.html"} <= names
    assert {"maxlr.png", "curves.png"} <= names


def test_the_json_is_the_documented_schema(measured):
    folder, _ = measured
    results = json.loads((folder / "out.json").read_text())
    assert results["schema"] == "keelbench.results/1"
    assert {cell["arch"] for cell in results["cells"]} == {"keel", "post_ln"}
    for cell in results["cells"]:
        assert {"depth", "width", "slope", "batch", "seq", "data", "dtype"} <= set(cell)
        assert set(cell["max_lr"]) == {"mean", "low", "high", "n", "censored"}
        assert [lane["seed"] for lane in cell["lanes"]] == [0, 1, 2]
        for lane in cell["lanes"]:
            assert {"verdict", "rule", "onset_step", "detected_step", "max_lr"} <= set(lane)
            if lane["max_lr"] is not None:
                expected = cell["slope"] * lane["onset_step"]
                assert lane["max_lr"] == pytest.approx(expected, rel=1e-12)


def test_the_same_command_again_runs_nothing_and_shows_the_same(measured):
    folder, done = measured
    before = {p: p.stat().st_mtime_ns for p in (folder / "r" / "records").iterdir()}
    again = keelbench("maxlr", "keel", "post_ln", *TINY, "--seeds", 3, "--out", "r", cwd=folder)
    assert "nothing to do" in again.stderr
    assert again.stdout == done.stdout
    assert before == {p: p.stat().st_mtime_ns for p in (folder / "r" / "records").iterdir()}


def test_json_to_stdout_is_json_alone(measured):
    folder, _ = measured
    command = ["maxlr", "keel", *TINY, "--seeds", 3, "--out", "r", "--json", "-"]
    assert len(json.loads(keelbench(*command, cwd=folder).stdout)["cells"]) == 1


def test_fresh_repeats_the_run_bit_for_bit(measured):
    folder, _ = measured
    before = lanes_of(folder / "r")
    command = ["maxlr", "keel", *TINY, "--seeds", 3, "--workers", 2, "--fresh", "--out", "r"]
    done = keelbench(*command, cwd=folder)
    assert "3 of 3 lanes to run" in done.stderr
    assert lanes_of(folder / "r") == before


def test_report_and_show_start_without_torch(measured):
    folder, _ = measured
    script = (
        "import sys; from keelbench.cli import run; "
        "code = run(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    for command in (["report", "r", "--reference", "none"], ["show", "r"], ["archs"]):
        found = subprocess.run(
            [sys.executable, "-c", script, *command],
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=120,
        )
        assert found.returncode == 0, found.stderr
    assert "keel" in found.stdout


@pytest.mark.parametrize("skin", ["markdown", "csv", "latex", "json"])
def test_every_skin_prints(measured, capsys, monkeypatch, skin):
    folder, _ = measured
    monkeypatch.chdir(folder)
    assert run(["report", "r", "--format", skin]) == 0
    out = capsys.readouterr().out
    assert "keel" in out.lower()
    assert {"markdown": "|", "csv": ",", "latex": r"\toprule", "json": "schema"}[skin] in out


def test_show_finds_a_lane_by_the_start_of_its_id(measured, capsys, monkeypatch):
    folder, _ = measured
    monkeypatch.chdir(folder)
    (folder / "results").mkdir(exist_ok=True)
    link = folder / "results" / "r"
    if not link.exists():
        link.symlink_to(folder / "r")
    record_id = next(iter(lanes_of(folder / "r")))
    assert run(["show", record_id[:8]]) == 0
    assert record_id in capsys.readouterr().out
    assert run(["show"]) == 0
    assert "6 lanes" in capsys.readouterr().out
    assert run(["show", "nosuchid"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["maxlr", "keell"], ["keell", "did you mean 'keel'"]),
        (["maxlr", "keel(alfa=3)"], ["alfa", "alpha"]),
        (["maxlr", "mix_ln(post_fraction=2)"], ["post_fraction", "0 to 1"]),
        (["maxlr", "--depth", "7"], ["7", "even"]),
        (["maxlr", "--depth", "many"], ["many", "whole number"]),
        (["maxlr", "--width", "65", "--heads", "4"], ["65", "divisible"]),
        (["maxlr", "--seeds", "0"], ["seeds", "0"]),
        (["maxlr", "--slope", "-1"], ["slope", "positive"]),
        (["maxlr", "--slope", "1", "--peak", "0.5"], ["peak", "below"]),
        (["maxlr", "--device", "cuda"], ["cuda", "--device cpu"]),
        (["maxlr", "--dtype", "float16"], ["float16", "bfloat16"]),
        (["maxlr", "--data", "kjb"], ["kjb", "kjv"]),
        (["maxlr", "--data", "text:nowhere.txt"], ["nowhere.txt", "no such file"]),
        (["maxlr", "--workers", "some"], ["some", "auto"]),
        (["maxlr", "--model", "nofile.py:build"], ["nofile.py"]),
        (["maxlr", "--optimizer", "nofile.py:make"], ["nofile.py"]),
        (["maxlr", "--lanes", "0"], ["--lanes is '0'", "auto"]),
        (["maxlr", "--format", "latx"], ["latx", "latex"]),
        (["maxlr", "--optimizer", "adamww"], ["adamww", "adamw"]),
        (["compare", "nosuch.yaml"], ["nosuch.yaml"]),
        (["compare", "ramp.slop=2"], ["slop", "slope"]),
        (["compare", "--arch", "keel,nope", "depht=3"], ["depht", "depth"]),
        (["report", "nowhere"], ["nowhere"]),
        (["judge", "nowhere.csv"], ["nowhere.csv"]),
        (["check", "--margin", "lots"], ["lots", "10%"]),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(capsys, arguments, words):
    assert_refused(capsys, arguments, *words)


def test_all_problems_are_told_at_once(capsys):
    command = ["compare", "--arch", "keel,keell", "--depth", "7", "--width", "64"]
    assert_refused(capsys, command, "keell", "even", "problems")


def test_a_folder_that_cannot_be_written_is_told_before_the_run(capsys):
    Path("file").write_text("not a folder")
    assert run(["maxlr", *TINY, "--out", "file/results"]) in (2, 5)
    assert "cannot write" in capsys.readouterr().err


def test_paths_with_spaces_and_no_color_just_work(measured):
    folder, _ = measured
    target = folder / "a folder" / "with spaces"
    done = keelbench(
        *("report", "r", "--html", target / "page.html"),
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    assert (target / "page.html").read_text().startswith("<!doctype html>")
    assert "\x1b[" not in done.stdout


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"]
)
def test_interrupted_and_started_again_gives_the_uninterrupted_result(tmp_path, number, code):
    command = ["compare", "--arch", "keel,post_ln,pre_ln", *TINY[:4], "--seeds", "2"]
    command += ["batch=2", "seq=16", "peak=0.3", "--workers", "2", "--out", "r"]
    process = subprocess.Popen(
        [sys.executable, "-m", "keelbench", *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "r" / "records").glob("[!.]*.json")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    if process.returncode != 0:  # it may have been faster than the signal
        assert process.returncode == code
        assert "hint: go on with: keelbench compare" in stderr
    assert not list((tmp_path / "r" / "records").glob(".*.json.*"))
    assert keelbench(*command, cwd=tmp_path).returncode == 0
    command[-1] = "whole"
    assert keelbench(*command, cwd=tmp_path).returncode == 0
    assert lanes_of(tmp_path / "r") == lanes_of(tmp_path / "whole")


def test_dry_run_lists_cells_and_runs_nothing(capsys):
    assert run(["compare", "--dry-run", "--depth", "8,16", "--width", "32"]) == 0
    out = capsys.readouterr().out
    assert out.count("keel") == 2 and "params" in out and "MiB" in out
    assert not Path("results").exists()


def test_dry_run_shows_what_differs_and_plans_for_machines_with_a_gpu(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sweep = Path("sweep.yaml")
    sweep.write_text(
        "defaults: {arch: keel, depth: 8, device: cuda}\nvary: {batch: [2], dtype: [float32]}"
    )
    assert run(["compare", str(sweep), "--dry-run"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[3:5] == ["batch", "dtype"]
    found = [row.split()[3:5] for row in rows[:3]]
    assert found == [["8", "bfloat16"], ["2", "bfloat16"], ["8", "float32"]]
    assert "not on this machine: device is cuda" in rows[-2]
    assert_refused(capsys, ["compare", str(sweep)], "no CUDA device", "--device cpu")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["float64", "float64", "float32"]),
        ({"dtype": "bfloat16"}, ["bfloat16", "bfloat16"]),
    ],
)
def test_the_precision_of_a_file_stays_unless_a_flag_says_otherwise(flags, expected):
    sweep = Path("sweep.yaml")
    sweep.write_text(
        "defaults: {arch: keel, depth: 8, dtype: float64}\nvary: {batch: [2], dtype: [float32]}"
    )
    cells = sweep_from(sweep, {}, {}, None, "x", device="cpu", **flags).cells
    assert [cell.dtype for cell in cells] == expected


@pytest.mark.parametrize(
    ("archs", "expected"),
    [
        (["keel"], [("keel", 8), ("keel", 4)]),
        (["pre_ln", "keel"], [("pre_ln", 8), ("keel", 8), ("pre_ln", 4), ("keel", 4)]),
        (["post_ln"], [("post_ln", 4)]),
    ],
)
def test_an_axis_restricts_the_listed_cells_that_name_it(archs, expected):
    sweep = Path("sweep.yaml")
    sweep.write_text(
        "defaults: {depth: 8}\n"
        "cells: [{arch: pre_ln}, {model.arch: keel}, {depth: 8, batch: 4}]"
    )
    found = sweep_from(sweep, {"model.arch": archs}, {}, None, "x").cells
    pairs = [(cell.model.arch, cell.data.batch) for cell in found]
    assert sorted(pairs) == sorted(expected)


def test_a_value_that_no_listed_cell_has_is_refused(capsys):
    Path("sweep.yaml").write_text("cells: [{arch: pre_ln, depth: 8}, {arch: keel, depth: 16}]")
    command = ["compare", "sweep.yaml", "--dry-run"]
    assert_refused(capsys, [*command, "--depth", "64"], "no listed cell has depth 64", "8, 16")
    assert_refused(capsys, [*command, "--arch", "keel,prre_ln"], "has arch prre_ln", "keel")
    Path("sweep.yaml").write_text("cells: [{arch: [keel, pre_ln]}, {arch: post_ln}]")
    assert_refused(capsys, [*command, "--arch", "mix_ln"], "has arch mix_ln")
    Path("sweep.yaml").write_text("matrix: [1]")
    assert_refused(capsys, [*command, "--arch", "mix_ln"], "matrix must be a mapping")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vary: {batch: [4]}", [("pre_ln", 64, 4), ("pre_ln", 64, 8), ("pre_ln", 128, 8)]),
        ("matrix: {arch: [keel], batch: [4]}", [("pre_ln", 64, 4), ("pre_ln", 128, 8)]),
    ],
)
def test_an_axis_reaches_the_matrix_beside_listed_cells(text, expected):
    sweep = Path("sweep.yaml")
    cells = "cells: [{arch: keel, depth: 128}, {arch: pre_ln, depth: 128}]"
    sweep.write_text(f"{text}\n{cells}")
    found = sweep_from(sweep, {"model.arch": ["pre_ln"]}, {}, None, "x").cells
    assert sorted((c.model.arch, c.model.depth, c.data.batch) for c in found) == expected


def test_an_axis_knows_an_architecture_however_it_is_spelt():
    sweep = Path("sweep.yaml")
    sweep.write_text("cells: [{arch: 'keel(alpha=16, first_block=v1)', depth: '8'}]")
    axes = {"model.arch": ["keel(first_block=v1,alpha=16)"], "model.depth": [8]}
    (cell,) = sweep_from(sweep, axes, {}, None, "x").cells
    assert cell.model.arch == "keel(alpha=16, first_block=v1)" and cell.model.depth == 8


def test_judge_reads_a_log_and_gives_one_lane_object(capsys):
    log = TRACES / "deepnorm_L64_w64_seed0.csv"
    assert run(["judge", str(log), "--unigram-entropy", "3.07", "--json", "-"]) == 0
    lane = json.loads(capsys.readouterr().out)
    assert lane["verdict"] == "diverged"
    assert 72 <= lane["onset_step"] <= 98
    assert run(["judge", str(log), "--unigram-entropy", "3.07"]) == 0
    assert "irrecoverable instability" in capsys.readouterr().out


def test_the_list_of_architectures_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    assert run(["archs"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for name in ARCHS.names():
        assert f"\n{name} " in f"\n{out}"


def test_describe_builds_nothing_and_tells_everything(capsys):
    assert run(["describe", "keel", "--depth", "512", "--width", "1024"]) == 0
    out = capsys.readouterr().out
    for word in (
        "512 sub-layers, 256 blocks",
        "α",
        "parameters",
        "FLOPs",
        "MiB",
        "N(0, 0.02²)",
    ):
        assert word in out


def test_refine_shows_both_slopes(capsys):
    command = ["maxlr", "post_ln", *TINY, "--seeds", "1", "--workers", "0", "--refine"]
    assert run([*command, "--slope", "1e-3", "--json", "-", "--quiet"]) == 0
    slopes = [cell["slope"] for cell in json.loads(capsys.readouterr().out)["cells"]]
    assert sorted(slopes) == [1.25e-4, 1e-3]


def test_a_baseline_is_passed_by_the_same_code_and_failed_by_other_settings(capsys):
    Path("gate.yaml").write_text(
        "seeds: 3\ndefaults: {depth: 4, width: 16, batch: 2, seq: 16, peak: 0.3}\n"
        "matrix: {arch: [post_ln]}\n"
    )
    save = ["baseline", "save", "gate", "--sweep", "gate.yaml", "--out", "base.json"]
    assert run([*save, "--workers", "0", "--quiet"]) == 0
    check = ["check", "--sweep", "gate.yaml", "--baseline", "base.json", "--workers", "0", "-q"]
    assert run([*check, "--junit", "j.xml", "--markdown", "m.md", "--figure", "f"]) == 0
    assert "pass" in capsys.readouterr().out
    assert Path("j.xml").exists() and Path("m.md").exists() and Path("f.png").exists()
    assert run([*check, "--exact"]) == 0
    assert run([*check, "init_std=0.5"]) == 3
    assert "init_std" in capsys.readouterr().out
    assert run(["check", "--sweep", "gate.yaml", "--baseline", "none.json"]) == 3
