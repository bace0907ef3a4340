"""What a check hands out: JSON, Markdown, JUnit, step summary, annotations, terminal."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from gate_sample import cell, lane, lanes, not_carried_out
from hypothesis import given
from hypothesis import strategies as st

from keelbench.errors import ExitCode
from keelbench.gate import (
    CellReport,
    CellVerdict,
    GateReport,
    build_baseline,
    compare_exact,
    decide,
    headline,
    plan,
    rows,
    to_annotations,
    to_json,
    to_junit,
    to_markdown,
    to_step_summary,
    to_terminal,
)
from keelbench.gate.outputs import MAX_ANNOTATIONS, MAX_SUMMARY_BYTES
from keelbench.records import VerdictKind

junitparser = pytest.importorskip("junitparser")

ROOT = Path(__file__).parents[1]

OLD = [0.030, 0.034, 0.027, 0.031, 0.029]


@pytest.fixture(scope="module")
def report() -> GateReport:
    """One cell of every statistical verdict."""
    ratios = {
        "keel": 0.6,
        "pre_ln": 1.0,
        "post_ln": 1.5,
        "mix_ln": [1.3, 0.7, 1.2, 0.8, 0.9],
        "deepnorm": [1.15, 0.95, 1.12, 1.0, 1.05],
    }
    archs = [*ratios, "hybridnorm", "keel(alpha=2)", "keel(alpha=3)"]
    baseline = build_baseline("ci", [r for arch in archs for r in lanes(cell(arch), OLD)])
    records = [
        r for arch, ratio in ratios.items() for r in lanes(cell(arch), np.multiply(OLD, ratio))
    ]
    records += [not_carried_out(cell("hybridnorm"), 0)]
    records += lanes(cell("keel(alpha=2)", clip=0.5), OLD)
    records += lanes(cell("keel(alpha=4)"), OLD)
    return decide(baseline, records, looks=plan(5, 5), more=False)


def test_the_sample_has_every_verdict(report: GateReport) -> None:
    assert {c.verdict for c in report.cells} == set(CellVerdict) - {CellVerdict.DIFFERS}


def test_rows_are_text_and_worst_first(report: GateReport) -> None:
    table = rows(report)
    assert [row["verdict"] for row in table] == [
        v.value for v in CellVerdict if v is not CellVerdict.DIFFERS
    ]
    assert table[0]["change"] == "-40 %" and table[0]["margin"] == "10 %"
    assert all(isinstance(text, str) and text for row in table for text in row.values())
    assert headline(report) == (
        "regressed: 1 of 9 cells (exit 1), against baseline 'ci' for cpu-x86_64"
    )


def test_json_has_the_verdict_the_code_and_every_lane(report: GateReport) -> None:
    values = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert values["schema"] == "keelbench.check/1"
    assert (values["verdict"], values["exit_code"]) == ("regressed", 1)
    assert sum(part["alpha"] for part in values["looks"]) == pytest.approx(0.01)
    keel = values["cells"][0]
    assert [pair["seed"] for pair in keel["lanes"]] == [0, 1, 2, 3, 4]
    first = keel["lanes"][0]
    assert first["baseline"]["max_lr"] == 0.030 and first["current"]["max_lr"] == 0.018
    assert keel["ratio"] == pytest.approx(0.6) and keel["ratio_high"] < 0.9
    assert keel["settings"]["model"]["arch"] == "keel"


def test_exact_json_says_so() -> None:
    baseline = build_baseline("ci", lanes(cell(), OLD))
    values = to_json(compare_exact(baseline, lanes(cell(), OLD)))
    assert (values["mode"], values["verdict"], values["exit_code"]) == ("exact", "pass", 0)


def test_markdown_is_a_table_with_the_way_out(report: GateReport) -> None:
    text = to_markdown(report, accept="keelbench baseline save ci")
    lines = text.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert len(table) == 2 + len(report.cells)
    assert "    keelbench baseline save ci" in lines
    good = dataclasses.replace(report, cells=report.cells[1:2])
    assert "keelbench baseline save" not in to_markdown(good, accept="keelbench baseline save")


def test_markdown_survives_hostile_names(report: GateReport) -> None:
    nasty = dataclasses.replace(report.cells[0], label="a|b<script>", reason="x\n| y |")
    text = to_markdown(dataclasses.replace(report, cells=(nasty,)))
    assert "<script>" not in text and "\n| y |" not in text and "a\\|b" in text


def test_junit_is_accepted_by_a_parser(report: GateReport) -> None:
    xml = junitparser.JUnitXml.fromstring(to_junit(report).encode())
    (suite,) = list(xml)
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (9, 1, 4, 1)
    cases = list(suite)
    assert len(cases) == len({case.name for case in cases}) == 9
    kinds = {
        case.name.split(" [")[0]: [type(result).__name__ for result in case.result]
        for case in cases
    }
    assert kinds["keel L16 w64"] == ["Failure"]
    assert kinds["pre_ln L16 w64"] == [] and kinds["post_ln L16 w64"] == []
    assert kinds["mix_ln L16 w64"] == ["Skipped"]
    assert kinds["hybridnorm L16 w64"] == ["Error"]
    failure = next(iter(cases[0].result))
    assert failure.type == "regressed" and "fell by 40 %" in failure.message
    assert "seed 0: 0.03 -> 0.018" in cases[0].system_out


def test_strict_junit_fails_what_is_inconclusive(report: GateReport) -> None:
    strict = dataclasses.replace(report, is_strict=True)
    (suite,) = list(junitparser.JUnitXml.fromstring(to_junit(strict).encode()))
    assert (suite.failures, suite.skipped) == (2, 0)


@given(st.text())
def test_junit_holds_any_text(text: str) -> None:
    baseline = build_baseline("ci", lanes(cell(), OLD))
    report = decide(baseline, lanes(cell(), np.multiply(OLD, 0.5)), looks=plan(5, 5))
    odd = dataclasses.replace(report.cells[0], reason=text, label=text)
    xml = to_junit(dataclasses.replace(report, cells=(odd,), baseline=text))
    (suite,) = list(junitparser.JUnitXml.fromstring(xml.encode()))
    assert (suite.tests, suite.failures) == (1, 1)


def test_annotations_are_errors_worst_first(report: GateReport) -> None:
    lines = to_annotations(report)
    assert len(lines) == 5, "what is inconclusive or good is no error"
    assert lines[0].startswith("::error title=keel L16 w64%3A regressed::Max LR fell by 40 %25")
    assert len(to_annotations(dataclasses.replace(report, is_strict=True))) == 6


def bad_cell(index: int, reason: str) -> CellReport:
    return CellReport(
        spec=cell(),
        label=f"cell {index}",
        verdict=CellVerdict.REGRESSED if index else CellVerdict.MISSING,
        reason=reason,
    )


@pytest.mark.parametrize(("count", "shown"), [(9, 9), (10, 10), (11, 10), (300, 10)])
def test_at_most_ten_annotations(report: GateReport, count: int, shown: int) -> None:
    cells = tuple(bad_cell(index, "50 %\r\nof, it: all") for index in range(count))
    lines = to_annotations(dataclasses.replace(report, cells=cells))
    assert len(lines) == shown <= MAX_ANNOTATIONS
    assert lines[0] == "::error title=cell 1%3A regressed::50 %25%0D%0Aof, it: all"
    if count > 10:
        assert f"and {count - 9} more cells" in lines[-1]


@given(st.text())
def test_an_annotation_is_one_line(text: str) -> None:
    report = GateReport(
        baseline="ci", sweep="", hardware="", detector="", cells=(bad_cell(1, text),)
    )
    (line,) = to_annotations(report)
    assert "\n" not in line and "\r" not in line
    head, _, data = line.partition("::error title=cell 1%3A regressed::")
    assert head == ""
    decoded = data.replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    assert decoded == text


def test_step_summaries_stay_under_a_mebibyte() -> None:
    assert to_step_summary("short\n") == "short\n"
    long = "µ line of text\n" * 100_000
    for already in (0, 1000, MAX_SUMMARY_BYTES - 200, MAX_SUMMARY_BYTES):
        cut = to_step_summary(long, already=already)
        assert already + len(cut.encode()) < MAX_SUMMARY_BYTES or not cut
    assert to_step_summary(long).endswith("The JSON report has everything.*\n")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_terminal_text(report: GateReport, width: int) -> None:
    text = to_terminal(report, width=width, accept="keelbench baseline save ci")
    assert "\x1b" not in text
    assert "regressed" in text and "fell by 40 %" in text.replace("\n", " ")
    assert "keelbench baseline save ci" in text
    assert "\x1b[" in to_terminal(report, width=width, color=True)


def test_terminal_text_of_a_pass_is_short() -> None:
    baseline = build_baseline("ci", lanes(cell(), OLD))
    report = decide(baseline, lanes(cell(), OLD))
    text = to_terminal(report, accept="keelbench baseline save ci")
    assert len(text.splitlines()) == 3 and "accept" not in text


def test_a_lane_without_value_is_shown_as_what_it_was() -> None:
    baseline = build_baseline("ci", lanes(cell(), OLD))
    never = [lane(cell(), seed, kind=VerdictKind.NEVER_LEARNED) for seed in range(5)]
    report = decide(baseline, never)
    assert "seed 0: 0.03 -&gt; never learned" in to_junit(report)
    assert to_json(report)["cells"][0]["lanes"][0]["kind"] == "lost"


def test_the_gate_needs_no_torch_and_no_pandas() -> None:
    code = (
        "import sys, keelbench.gate, keelbench.pytest_plugin\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'rich', 'typer'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_action_uses_the_inputs_that_it_declares() -> None:
    text = (ROOT / "action.yml").read_text()
    action = yaml.safe_load(text)
    assert action["runs"]["using"] == "composite"
    used = set(re.findall(r"inputs\.([a-z-]+)", text))
    assert used == set(action["inputs"])
    assert all("description" in value for value in action["inputs"].values())
    script = "".join(step.get("run", "") for step in action["runs"]["steps"])
    assert "${{" not in script, "inputs reach the shell as variables, not as code"


@pytest.mark.parametrize("name", ["action.yml", "docs/ci.md"])
def test_every_option_of_check_that_is_shown_exists(name: str) -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "keelbench", "check", "--help"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    ).stdout
    lines = (ROOT / name).read_text().splitlines()
    shown = {
        option
        for line in lines
        if "keelbench check" in line or "options" in line
        for option in re.findall(r"(?<![\w-])--[a-z-]+", line.partition("baseline save")[0])
    }
    assert len(shown) > 4
    assert not {option for option in shown if option not in help_text}


@pytest.mark.parametrize("name", ["0.02 to 0.45", "all 0.10"])
def test_the_error_rates_in_the_docs_are_those_of_the_simulation(name: str) -> None:
    line = (
        "import sys; sys.path.insert(0, 'benchmarks'); from gate_power import *; "
        f"print(row(3, '{name}', plan(3, 5), 20_000, 10))"
    )
    found = subprocess.run(
        [sys.executable, "-c", line], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert found.stdout in (ROOT / "docs/ci.md").read_text()


def test_every_verdict_and_exit_code_is_in_the_docs() -> None:
    text = (ROOT / "docs/ci.md").read_text()
    assert all(f"`{verdict}`" in text for verdict in CellVerdict)
    table = text.partition("## Exit codes")[2].partition("##")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d) \| [a-z]", table, re.MULTILINE)}
    assert codes == {int(code) for code in ExitCode if code < 10}
