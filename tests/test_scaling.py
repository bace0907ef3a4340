"""Widths for a budget, cells for a depth scaling, and the rows and figure of both."""

from pathlib import Path
from typing import Any

import pytest
from helpers import refusal, tiny_cell
from matplotlib.figure import Figure

from keelbench.lrsweep import LrRun, LrSweep
from keelbench.report.plots.scaling import scaling_figure
from keelbench.scaling import (
    WIDTH_STEP,
    budget_cells,
    depth_cells,
    parameters_of,
    scaling_rows,
    solve_width,
)
from keelbench.specs import ModelSpec
from keelbench.sweep_spec import load_sweep
from keelbench.training import Schedule

VOCAB = 128
SWEEPS = Path(__file__).parent.parent / "sweeps"


@pytest.mark.parametrize(("depth", "width"), [(8, 128), (32, 64), (128, 32)])
def test_the_width_is_the_one_whose_parameters_are_nearest(depth: int, width: int) -> None:
    found = solve_width(ModelSpec(arch="keel", depth=depth), 800_000, VOCAB)
    assert found.width == width
    count = parameters_of(found, VOCAB)
    assert count == pytest.approx(800_000, rel=0.03)
    for other in (width - WIDTH_STEP, width + WIDTH_STEP):
        shape = ModelSpec(arch="keel", depth=depth, width=other)
        if not shape.problems():
            assert abs(parameters_of(shape, VOCAB) - 800_000) > abs(count - 800_000)


def test_a_budget_that_no_width_meets_is_refused() -> None:
    model = ModelSpec(arch="keel", depth=256)
    said = refusal(lambda: solve_width(model, 800_000, VOCAB))
    assert "no width at depth 256 comes within 10% of 800,000" in said
    assert "the nearest, 16, has" in said


def test_cells_of_a_depth_scaling_share_their_width() -> None:
    cells = depth_cells(tiny_cell(), ["keel", "pre_ln"], [4, 8])
    shapes = [(cell.model.arch, cell.model.depth, cell.model.width) for cell in cells]
    assert shapes == [("keel", 4, 16), ("keel", 8, 16), ("pre_ln", 4, 16), ("pre_ln", 8, 16)]


def test_cells_of_one_budget_have_slopes_that_follow_their_widths() -> None:
    base = tiny_cell(heads=2)
    cells = [cell.validated() for cell in budget_cells(base, ["keel"], [8, 32], 800_000, VOCAB)]
    assert [cell.model.width for cell in cells] == [128, 64]
    assert [cell.model.heads for cell in cells] == [8, 4]
    assert cells[0].ramp.slope == pytest.approx(cells[1].ramp.slope / 2)  # type: ignore[operator]


def test_the_sweep_file_holds_the_widths_that_are_solved_for() -> None:
    sweep = load_sweep(SWEEPS / "deep-vs-wide.yaml")
    for cell in sweep.cells:
        solved = solve_width(cell.model, 800_000, VOCAB)
        assert solved.width == cell.model.width, cell.model
    assert {cell.model.arch for cell in sweep.cells} == {"pre_ln", "keel"}


@pytest.mark.parametrize("name", ["optimal-lr", "optimal-lr-gpu"])
def test_sweeps_over_peaks_are_grids(name: str) -> None:
    from keelbench.lrsweep import lr_grids

    sweep = load_sweep(SWEEPS / f"{name}.yaml")
    grids = lr_grids(sweep.cells)
    assert len(grids) < len(sweep.cells)
    assert all(len(grid) >= 4 for _, grid in grids)


def sweep_of(arch: str, depth: int, width: int, loss: float) -> LrSweep:
    runs = tuple(
        LrRun(seed=seed, lr=lr, loss=loss + lr, init_loss=5.0, curve=(loss,))
        for seed in (0, 1, 2)
        for lr in (1e-3, 2e-3)
    )
    return LrSweep(
        cell=tiny_cell(arch, depth=depth, width=width, heads=2),
        schedule=Schedule(steps=3),
        lrs=(1e-3, 2e-3),
        runs=runs,
    )


def test_rows_hold_shape_parameters_loss_and_limit() -> None:
    (row,) = scaling_rows([sweep_of("keel", 4, 16, 2.0)], [], VOCAB)
    model = tiny_cell("keel", heads=2).model
    assert row["parameters"] == parameters_of(model, VOCAB)
    assert row["loss"] == pytest.approx(2.001) and row["best_lr"] == pytest.approx(1e-3)
    assert row["max_lr"] is None and row["normalized"] is None


def test_the_figure_shows_loss_and_limit_against_depth() -> None:
    sweeps = [sweep_of(arch, depth, 16, 2.0) for arch in ("keel", "pre_ln") for depth in (4, 8)]
    rows: list[dict[str, Any]] = scaling_rows(sweeps, [], VOCAB)
    assert len(scaling_figure(rows).axes) == 2
    known = [row | {"max_lr": 1e-2, "normalized": 1e-3} for row in rows]
    assert isinstance(scaling_figure(known), Figure)
    wide = [row | {"max_lr_low": 1e-4, "max_lr_high": 1.0} for row in known]
    low, high = scaling_figure(wide).axes[1].get_ylim()
    assert low < 1e-4 and high > 1.0, "an interval is cut off"
    deep = [*known[:1], known[1] | {"width": 8}]
    labels = [text.get_text() for text in scaling_figure(deep).axes[0].get_xticklabels()]
    assert labels == ["4\n× 16", "8\n× 8"]
    assert "nothing to draw" in refusal(lambda: scaling_figure([]))
