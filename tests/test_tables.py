"""Tables: one builder, five skins, the same numbers as in the JSON."""

import csv
import dataclasses
import io
import json
import os
import re
from pathlib import Path

import pytest
import sample

from keelbench.archs import ARCHS, PAPER_ARCHS
from keelbench.records import Record
from keelbench.report.curve import sparkcurve
from keelbench.report.lane import lane_page_json, render_lane
from keelbench.report.names import TITLES, title_of
from keelbench.report.numbers import decimal, lr_text, scientific, seconds_text, short
from keelbench.report.results_json import results_json
from keelbench.report.summary import rows_of, summarise
from keelbench.report.tables import Skin, render, render_comparison, render_lanes
from keelbench.report.tables.latex import escaped

GOLDEN = Path(__file__).parent / "golden" / "report"

TEXTS = {
    "terminal_80.txt": lambda: render(sample.study(), width=80),
    "terminal_120.txt": lambda: render(sample.study(), width=120),
    "terminal_mixed.txt": lambda: render(sample.mixed(), width=80),
    "terminal_ascii.txt": lambda: render(sample.mixed(), width=60, encoding="ascii"),
    "terminal_settings.txt": lambda: render(sample.awkward()["two widths"], width=80),
    "lanes.txt": lambda: render_lanes(sample.mixed(), width=80),
    "table.md": lambda: render(sample.study(), "markdown"),
    "mixed.md": lambda: render(sample.mixed(), "markdown"),
    "table.tex": lambda: render(sample.study(), "latex"),
    "mixed.tex": lambda: render(sample.mixed(), "latex"),
    "table.csv": lambda: without_hashes(render(sample.mixed(), "csv")),
    "lanes.csv": lambda: without_hashes(render_lanes(sample.mixed(), "csv")),
    "table.json": lambda: without_hashes(render(two_lanes(), "json")),
    "comparison.txt": lambda: render_comparison(sample.mixed(), two_lanes()),
    "lane.txt": lambda: without_settings(render_lane(sample.real()[4])),
    "curve_ascii.txt": lambda: sparkcurve(sample.real()[4].trace, encoding="ascii"),
}


def two_lanes() -> list[Record]:
    return sample.awkward()["two lanes"]


def without_hashes(text: str) -> str:
    """Hashes and settings change with every field that a cell gains; the format does not."""
    text = re.sub(r'"settings": \{.*?\n      \}', '"settings": {}', text, flags=re.DOTALL)
    return re.sub(r"\b[0-9a-f]{12}\b", "<hash>", text)


def without_settings(text: str) -> str:
    return re.sub(
        r"\nmodel  .*?\nenvironment", "\nenvironment", without_hashes(text), flags=re.S
    )


@pytest.mark.parametrize("name", TEXTS)
def test_golden_text(name: str) -> None:
    path, text = GOLDEN / name, TEXTS[name]()
    if os.environ.get("KEELBENCH_GOLDEN") == "update":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"the text of {name} has changed. If that is meant, look at the new text and store it: "
        "KEELBENCH_GOLDEN=update pytest tests/test_tables.py"
    )


NUMBER = r"(\d+(?:\.\d+)?)(?: \\times 10\^\{(-?\d+)\}|e(-?\d+))?"
ESTIMATE = re.compile(NUMBER + r"(?:\\? \[([\d.]+),(?:\\,)? ([\d.]+)\])?")


def estimates(line: str, column: int, separator: str) -> list[tuple[float, float]]:
    """Values in a cell of a table, each with half a unit of its last digit."""
    text = re.split(separator, line)[column]
    match = ESTIMATE.search(text.replace("**", ""))
    assert match is not None, text
    mantissa, tex_power, power, low, high = match.groups()
    scale = 10.0 ** int(tex_power or power or 0)
    places = len(mantissa.partition(".")[2])
    found = [value for value in (mantissa, low, high) if value is not None]
    return [(float(value) * scale, 0.5000001 * scale / 10**places) for value in found]


@pytest.mark.parametrize(
    ("skin", "column", "separator"),
    [("terminal", 3, r" {2,}"), ("markdown", 4, r"\|"), ("latex", 3, r" & ")],
)
def test_tables_and_json_agree_number_by_number(skin: str, column: int, separator: str) -> None:
    records = sample.study()
    text = render(records, skin, width=120)
    lines = [line for line in text.splitlines() if re.search(r"\d \(\d", line)]
    cells = results_json(records)["cells"]
    for line, cell in zip(lines, cells, strict=True):
        for name, shift, count in (("max_lr", 0, 3), ("normalized_max_lr", 1, 1)):
            written = estimates(line, column + shift, separator)
            assert len(written) == count
            exact = [cell[name][key] for key in ("mean", "low", "high")]
            for (value, half_unit), true in zip(written, exact, strict=False):
                assert abs(value - true) <= half_unit, (skin, line, true)


def test_csv_and_json_agree_exactly() -> None:
    records = sample.mixed()
    lines = list(csv.DictReader(io.StringIO(render(records, "csv"))))
    for line, cell in zip(lines, results_json(records)["cells"], strict=True):
        for key, name in (("mean", "max_lr"), ("low", "max_lr_low"), ("high", "max_lr_high")):
            true = cell["max_lr"][key]
            assert line[name] == ("" if true is None else repr(true))
        assert int(line["n"]) == cell["max_lr"]["n"]


def test_json_skin_is_the_schema_of_results() -> None:
    records = sample.mixed()
    assert json.loads(render(records, "json")) == results_json(records)


@pytest.mark.parametrize("name", sample.awkward())
@pytest.mark.parametrize("skin", Skin)
def test_awkward_input_in_every_skin(name: str, skin: Skin) -> None:
    records = sample.awkward()[name]
    for text in (render(records, skin), render_lanes(records, skin)):
        assert text.strip() and "nan" not in text.lower().replace("nanosec", "")
        if skin is Skin.TERMINAL:
            assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_a_table_fits_its_terminal(width: int) -> None:
    text = render(sample.mixed(), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "Max LR" in text, "the number itself is always shown"


def test_wide_terminals_show_more() -> None:
    narrow, wide = (render(sample.study(), width=width) for width in (80, 130))
    assert "verdicts" in narrow and "normalized" in narrow
    assert "ratio to Pre-LN" not in narrow
    assert "ratio to Pre-LN" in wide and "time" in wide


def many_settings() -> list[Record]:
    """Two architectures at a base setting, and with each of four settings changed."""
    changes: list[dict[str, object]] = [
        {},
        {"width": 32},
        {"model__init_std": 0.02},
        {"optim__lr_scaling": "mup"},
        {"ramp__slope": 3.2e-4},
    ]
    return [
        sample.record(arch, 64, seed, **change)  # type: ignore[arg-type]
        for change in changes
        for arch in ("keel(first_block=none)", "pre_ln")
        for seed in range(3)
    ]


def test_settings_that_need_too_many_columns_stand_above_their_rows() -> None:
    lines = render(many_settings(), width=80).splitlines()
    heads = [line for line in lines if line.startswith("width ")]
    assert len(set(heads[:-1])) == len(heads) - 1 == 5, "one for each setting, and the caption"
    assert "width 64, init_std 0.02, lr_scaling none, slope 1.6e-4" in heads
    assert max(map(len, lines)) <= 80
    for line in lines:
        name = line.split()[:1]
        assert not name or name[0] not in ("keel(", "first_", "keel(fir"), "a name is cut"
    wide = render(many_settings(), width=160).splitlines()
    assert "init_std" in wide[1] and not any(line.startswith("width 64, ") for line in wide)


def test_every_row_stands_below_its_own_setting() -> None:
    setting, found = "", {}
    for line in render_lanes(many_settings(), width=60).splitlines():
        if line.startswith("width ") and "·" not in line:
            setting = line
        if line.startswith("pre_ln"):
            found.setdefault(setting, []).append(line)
    assert len(found) == 5 and all(len(rows) == 3 for rows in found.values())


def test_the_sublayer_that_moved_first_is_shown_where_it_was_looked_for() -> None:
    plain, looked, none = (sample.record("keel", 64, seed) for seed in range(3))
    assert "moved first" not in render_lanes([plain], width=80)
    found = {"site": 5, "branch": "ffn", "step": 50}
    looked = dataclasses.replace(looked, diagnosis={"first_to_move": found})
    none = dataclasses.replace(none, diagnosis={"first_to_move": {"site": None}})
    text = render_lanes([plain, looked, none], width=80)
    assert "moved first" in text.splitlines()[0] and max(map(len, text.splitlines())) <= 80
    cells = [line.split("e-2")[-1].split()[:3] for line in text.splitlines()[3:6]]
    assert [" ".join(cell) for cell in cells][1] == "5 ffn, step"


def test_best_is_marked_without_colour_and_bold_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, styled = (render(sample.study(), color=color) for color in (False, True))
    assert "pre_ln *" in plain and "\033" not in plain
    assert "\033[1m" in styled
    monkeypatch.setenv("NO_COLOR", "1")
    assert render(sample.study(), color=True) == plain
    assert render_lane(sample.record(), color=True) == render_lane(sample.record())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "no-such-encoding"])
def test_terminals_without_utf8_get_plain_text(encoding: str) -> None:
    known = "ascii" if encoding.startswith("no") else encoding
    texts = [
        render(sample.mixed(), encoding=encoding),
        render_lanes(sample.mixed(), encoding=encoding),
        sparkcurve(sample.record().trace, encoding=encoding),
        render_lane(sample.record(), encoding=encoding),
    ]
    for text in texts:
        text.encode(known)
        assert "?" not in text


def test_caption_carries_what_the_number_depends_on() -> None:
    text = " ".join(render(sample.study()).split())
    for part in (
        "slope 1.6e-4",
        "batch 8 × 64",
        "data kjv",
        "float32",
        "width 64",
        "detector 1",
        "seeds 0-2",
    ):
        assert part in text


def test_a_bound_is_explained_and_a_missing_interval_is_said() -> None:
    assert ">= some lanes reached the peak" in render(sample.mixed())
    assert "no interval is claimed" in " ".join(render(two_lanes()).split())
    assert "no interval is claimed" not in render(sample.study())


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.01e-2, 0.96e-2, 1.07e-2), "1.01e-2 [0.96, 1.07]"),
        ((3e-3, 2e-4, 4.5e-2), "3.0e-3 [0.2, 45.0]"),
        ((5.44e-2, None, None, 1.6e-4), "5.44e-2"),
        ((3.2e-3, None, None, 1.6e-4), "3.2e-3"),
        ((9.996e-3, None, None, 1e-5), "1.000e-2"),
        ((9.97e-2, 9e-2, 1.1e-1), "1.00e-1 [0.90, 1.10]"),
        ((2.0, 1.5, 2.7), "2.0 [1.5, 2.7]"),
    ],
)
def test_digits_follow_the_interval(values: tuple[float, ...], text: str) -> None:
    number = scientific(*values)
    assert f"{number.plain} {number.interval}".strip() == text


def test_other_numbers() -> None:
    assert decimal(1.3212, 1.1, 1.58).plain == "1.32"
    assert decimal(1.08, 1.002, 1.16).interval == "[1.002, 1.160]", "1 is outside"
    assert decimal(1.08, 1.0, 1.16).interval == "[1.00, 1.16]"
    assert decimal(1.0, 0.99999999, 1.0).plain == "1.0000"
    assert [short(value) for value in (1.6e-4, 0.05, 8.0, 12000.0, 0.0)] == [
        "1.6e-4",
        "0.05",
        "8",
        "1.2e4",
        "0",
    ]
    assert [lr_text(value) for value in (0.05, 1e-3, 1.5e-4, 1.0)] == [
        "5e-2",
        "1e-3",
        "1.5e-4",
        "1",
    ]
    assert [seconds_text(value) for value in (95.0, 700.0, 9000.0)] == [
        "95 s",
        "12 min",
        "2.5 h",
    ]


@pytest.mark.parametrize("arch", PAPER_ARCHS)
def test_titles_are_those_of_the_rules(arch: str) -> None:
    assert TITLES[arch] == ARCHS.get(arch).title


def test_titles_of_other_rules() -> None:
    assert title_of("keel(alpha=16)") == "Keel (alpha=16)"
    assert title_of("path/to/rules.py:Sandwich") == "Sandwich"


def test_latex_is_escaped_and_balanced() -> None:
    assert escaped("a_b & 5 % of $x_1$ {c} #1") == r"a\_b \& 5 \% of $x_1$ \{c\} \#1"
    assert escaped("a $5 bill") == r"a \$5 bill"
    records = [sample.record("my_rules:Sand_wich", data__source="text:/a_b/50%.txt")]
    text = render(records, "latex")
    assert r"Sand\_wich" in text and r"text:/a\_b/50\%.txt" in text
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")


def test_markdown_survives_odd_names() -> None:
    text = render([sample.record("a|b.py:Rule", data__source="text:x|y_*.txt")], "markdown")
    header, rule = text.splitlines()[:2]
    assert header.count("|") == rule.count("|")
    assert r"x\|y\_\*.txt" in text


def test_a_lane_on_a_page_of_its_own() -> None:
    lane = sample.real()[0]
    text = render_lane(lane, width=72)
    assert max(map(len, text.splitlines())) <= 72
    assert lane.id in text and "onset at step" in text and "weight_decay 0.01" in text
    values = lane_page_json(lane)
    assert values["onset_step"] == lane.verdict.onset_step
    assert values["settings"]["optim"]["weight_decay"] == 0.01


@pytest.mark.parametrize("name", sample.awkward())
def test_a_curve_of_any_trace_fits(name: str) -> None:
    for lane in sample.awkward()[name]:
        for width, height in ((72, 12), (30, 3), (4, 1)):
            text = sparkcurve(lane.trace, width, height, onset_step=lane.verdict.onset_step)
            assert len(text.splitlines()) <= height + 3


def test_a_curve_marks_the_onset_where_it_is() -> None:
    lane = sample.record()
    assert lane.verdict.onset_step is not None
    lines = sparkcurve(lane.trace, onset_step=lane.verdict.onset_step).splitlines()
    assert f"step {lane.verdict.onset_step}, Max LR {lr_text(lane.max_lr or 0)}" in lines[-1]
    assert lines[0][lines[-1].index("▲")] == "┊"


def test_summary_columns_are_all_in_the_csv() -> None:
    (header,) = list(csv.reader(io.StringIO(render(two_lanes(), "csv"))))[:1]
    assert header == list(rows_of(summarise(two_lanes()))[0])
