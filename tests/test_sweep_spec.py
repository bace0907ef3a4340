"""Sweep files: strict keys, every problem at once, matrix, cells and overrides."""

from pathlib import Path
from typing import Any

import pytest
from helpers import refusal

from keelbench.sweep_spec import SweepSpec, build_sweep, load_sweep, make_cell


def load(tmp_path: Path, text: str, **overrides: Any) -> SweepSpec:
    path = tmp_path / "study one.yaml"
    path.write_text(text)
    return load_sweep(path, overrides)


def archs_and_depths(sweep: SweepSpec) -> list[tuple[str, int]]:
    return [(cell.model.arch, cell.model.depth) for cell in sweep.cells]


WHOLE = """
name: study
seeds: [0, 3, 5]
reference: keel
defaults: {width: 32, ramp.slope: 1e-4, peak: 0.1}
matrix:
  arch: [pre_ln, "mix_ln(post_fraction=0.5)"]
  depth: [8, 16]
cells:
  - {arch: keel, depth: 32, width: 64}
"""


def test_a_sweep_is_the_product_of_its_matrix_and_its_listed_cells(tmp_path: Path) -> None:
    sweep = load(tmp_path, WHOLE)
    assert (sweep.name, sweep.seeds, sweep.reference) == ("study", (0, 3, 5), "keel")
    assert archs_and_depths(sweep) == [
        ("pre_ln", 8),
        ("pre_ln", 16),
        ("mix_ln(post_fraction=0.5)", 8),
        ("mix_ln(post_fraction=0.5)", 16),
        ("keel", 32),
    ]
    assert [cell.model.width for cell in sweep.cells] == [32, 32, 32, 32, 64]
    assert {cell.ramp.slope for cell in sweep.cells} == {1e-4}, "1e-4 is text in YAML 1.1"


def test_cells_are_resolved_and_valid(tmp_path: Path) -> None:
    for cell in load(tmp_path, WHOLE).cells:
        assert cell == cell.validated()


def test_a_sweep_is_named_after_its_file_and_has_three_seeds(tmp_path: Path) -> None:
    sweep = load(tmp_path, "defaults: {arch: keel, depth: 8}")
    assert (sweep.name, sweep.seeds, sweep.reference) == ("study one", (0, 1, 2), "pre_ln")
    assert archs_and_depths(sweep) == [("keel", 8)]
    assert sweep.source.endswith("study one.yaml")


def test_a_matrix_axis_may_be_a_single_value(tmp_path: Path) -> None:
    sweep = load(tmp_path, "matrix: {arch: keel, depth: [8, 16]}")
    assert archs_and_depths(sweep) == [("keel", 8), ("keel", 16)]


def test_vary_changes_one_setting_at_a_time_beside_the_unchanged_cell(tmp_path: Path) -> None:
    text = "matrix: {arch: [keel, pre_ln]}\nvary: {batch: [4, 16], slope: 1.0e-3, depth: [64]}"
    sweep = load(tmp_path, text)
    found = [(c.model.arch, c.data.batch, c.ramp.slope) for c in sweep.cells]
    assert found == [
        (arch, batch, slope)
        for batch, slope in ((8, 1.6e-4), (4, 1.6e-4), (16, 1.6e-4), (8, 1e-3))
        for arch in ("keel", "pre_ln")
    ], "a change to what is there already counts once"


def test_vary_needs_no_matrix_and_its_mistakes_are_told(tmp_path: Path) -> None:
    sweep = load(tmp_path, "defaults: {arch: keel}\nvary: {depth: [8, 16]}")
    assert archs_and_depths(sweep) == [("keel", 64), ("keel", 8), ("keel", 16)]
    message = refusal(lambda: load(tmp_path, "vary: {dept: [8], batch: []}"))
    assert "vary: unknown setting 'dept' (did you mean 'depth'?)" in message
    assert "vary: data.batch is an empty list" in message


def test_spellings_of_one_cell_count_once(tmp_path: Path) -> None:
    text = "matrix: {arch: [keel, 'keel(first_block=v2)', ' keel()'], depth: 8}"
    assert archs_and_depths(load(tmp_path, text)) == [("keel", 8)]


def test_overrides_win_over_everything_in_the_file(tmp_path: Path) -> None:
    sweep = load(tmp_path, WHOLE, depth=4, **{"model.width": "16"})
    assert archs_and_depths(sweep) == [
        ("pre_ln", 4),
        ("mix_ln(post_fraction=0.5)", 4),
        ("keel", 4),
    ]
    assert {cell.model.width for cell in sweep.cells} == {16}


@pytest.mark.parametrize(
    ("value", "seeds"), [(1, (0,)), ("2", (0, 1)), ([7, 7, 3], (7, 3)), ((5,), (5,))]
)
def test_seeds_are_a_number_or_a_list(value: Any, seeds: tuple[int, ...]) -> None:
    assert build_sweep({"seeds": value}, {}).seeds == seeds


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True, [], [-1], ["a"], [True], None])
def test_other_seeds_are_refused(value: Any) -> None:
    message = refusal(lambda: build_sweep({"seeds": value}, {}))
    assert f"seeds is {value!r}: give a number >= 1 or a list" in message


@pytest.mark.parametrize("value", ["none", None])
def test_there_may_be_no_reference(value: str | None) -> None:
    assert build_sweep({"reference": value}, {}).reference is None


def test_every_problem_is_reported_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    text = """
sede: 3
seeds: -1
defaults: {widht: 32}
matrix: {arch: [kel, keel], dept: [8], slope: []}
cells:
  - {arch: keel, depth: 7, batch: 0}
  - {arch: pre_lm, depth: 5}
  - {arch: keel, depth: deep}
  - 12
"""
    message = refusal(lambda: load(tmp_path, text))
    for part in (
        "study one.yaml: unknown key 'sede' (did you mean 'seeds'?)",
        "seeds is -1",
        "defaults: unknown setting 'widht' (did you mean 'width'?)",
        "matrix: unknown setting 'dept' (did you mean 'depth'?)",
        "matrix: ramp.slope is an empty list",
        "cells[3] must be a mapping of settings, got 12",
        "model.depth is 7",
        "data.batch is 0",
        "unknown architecture 'pre_lm' (did you mean 'pre_ln'?)",
        "model.depth is 5",
        "model.depth is 'deep': it must be a whole number",
    ):
        assert part in message, message


def test_a_problem_of_several_cells_is_told_once(tmp_path: Path) -> None:
    text = "matrix: {arch: [keel, pre_ln, post_ln], depth: [7, 8], width: [65]}"
    lines = refusal(lambda: load(tmp_path, text)).splitlines()
    assert lines[0] == "2 problems:"
    assert [line.startswith("  - ") for line in lines[1:3]] == [True, True]
    assert "(arch=keel, depth=7, width=65) and 2 more: model.depth is 7" in lines[1]
    assert "(arch=keel, depth=7, width=65) and 5 more: model.width 65 is not" in lines[2]


def test_a_problem_names_its_cell(tmp_path: Path) -> None:
    message = refusal(lambda: load(tmp_path, "matrix: {arch: [kel], depth: [8]}"))
    assert "cell (arch=kel, depth=8): unknown architecture 'kel'" in message
    assert "known: post_ln" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "must be a mapping with some of name, seeds"),
        ("", "must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("matrix: 3", "matrix must be a mapping of settings, got 3"),
        ("cells: {arch: keel}", "cells must be a list of mappings"),
        ("defaults: [depth]", "defaults must be a mapping"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(lambda: load(tmp_path, text))
    assert said in message and "study one.yaml" in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    message = refusal(lambda: load_sweep(tmp_path / "none.yaml"))
    assert f"cannot read sweep {tmp_path}/none.yaml: No such file" in message
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\xfe")
    assert "is not valid YAML" in refusal(lambda: load_sweep(tmp_path / "latin.yaml"))


def test_an_override_of_nothing_is_refused(tmp_path: Path) -> None:
    message = refusal(lambda: load(tmp_path, WHOLE, slop=3))
    assert "overrides: unknown setting 'slop' (did you mean 'slope'?)" in message


def test_a_cell_lists_its_architecture_and_its_other_problems_together() -> None:
    message = refusal(lambda: make_cell({"arch": "kel", "depth": 7, "device": "tpu"}))
    for part in ("unknown architecture 'kel'", "model.depth is 7", "device is 'tpu'"):
        assert part in message
    alone = refusal(lambda: make_cell({"arch": "kel"}))
    assert "known: post_ln" in alone
