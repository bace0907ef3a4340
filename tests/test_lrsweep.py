"""Training at fixed peak LRs: schedule, lanes, best LR and sensitivity. And its figures."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from helpers import refusal, tiny_cell
from matplotlib.figure import Figure

from keelbench.engine import Engine
from keelbench.errors import RunFailedError
from keelbench.launch import Task
from keelbench.lrsweep import (
    LrRun,
    LrSweep,
    curve_rows,
    default_lrs,
    lr_grids,
    lr_sweeps,
    mean_of,
    relation_rows,
    sensitivity,
    share_of,
    summary_rows,
)
from keelbench.parallel import run_tasks
from keelbench.ramp import Progress, run_ramp
from keelbench.report.plots.lrsweep import (
    lr_sweep_figure,
    relation_figure,
    training_curves_figure,
)
from keelbench.training import Schedule, held_out_losses, lane_groups, lr_grid, train

SHORT = Schedule(steps=12, warmup=0.25)


# The schedule


def test_the_lr_rises_linearly_and_falls_as_a_cosine() -> None:
    lrs = Schedule(steps=10, warmup=0.4, floor=0.1).lrs(2.0)
    assert lrs[:4].tolist() == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert lrs[-1] == pytest.approx(0.2)
    assert lrs[5] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi / 3)) / 2)
    assert (np.diff(lrs[3:]) < 0).all()


def test_without_warmup_and_with_nothing_else_the_schedule_has_all_steps() -> None:
    assert len(Schedule(steps=7, warmup=0.0).lrs(1.0)) == 7
    assert Schedule(steps=3, warmup=1.0).lrs(3.0).tolist() == [1.0, 2.0, 3.0]
    assert Schedule(steps=1, warmup=0.0).lrs(1.0).tolist() == [0.0]


@pytest.mark.parametrize(("field", "value"), [("steps", 0), ("warmup", 1.5), ("floor", -0.1)])
def test_a_wrong_schedule_is_refused(field: str, value: float) -> None:
    wrong = dataclasses.replace(Schedule(), **{field: value})
    assert f"{field} is {value}" in refusal(wrong.validated)


def test_a_grid_is_geometric_and_holds_its_ends() -> None:
    assert lr_grid(1e-3, 8e-3, 4) == pytest.approx([1e-3, 2e-3, 4e-3, 8e-3])
    assert lr_grid(1e-3, 1e-3, 1) == [1e-3]
    assert "LR grid" in refusal(lambda: lr_grid(0, 1, 3))
    assert "LR grid" in refusal(lambda: lr_grid(1, 0.5, 3))
    assert default_lrs(512) == pytest.approx([2 * lr for lr in default_lrs(1024)], rel=1e-5)


def test_lanes_are_split_evenly() -> None:
    assert [len(group) for group in lane_groups(18, 8)] == [6, 6, 6]
    assert lane_groups(3, 8) == [[0, 1, 2]]


# Training


def test_lanes_of_one_seed_and_many_lrs_are_as_if_trained_alone() -> None:
    cell = tiny_cell("keel")
    lrs = np.stack([SHORT.lrs(lr) for lr in (1e-3, 3e-2)], axis=1)
    both = Engine(cell, [4, 4], SHORT.steps)
    train(both, lrs)
    together = held_out_losses(both, 8)
    for lane in (0, 1):
        alone = Engine(cell, [4], SHORT.steps)
        train(alone, lrs[:, [lane]])
        assert held_out_losses(alone, 8)[0] == pytest.approx(together[lane], rel=1e-5)
    assert together[0] != pytest.approx(together[1], rel=1e-3)


def test_a_lane_that_is_no_longer_finite_is_dropped_and_the_others_go_on() -> None:
    cell = tiny_cell("resnet", depth=8, clip=0.0, **{"optim.name": "sgd"})
    engine = Engine(cell, [0, 0, 1, 2], 48)
    lrs = np.full((48, 4), 1e-3)
    lrs[:, 1] = 1e12
    lrs[20:, 0] = 1e12
    seen: list[Progress] = []
    trained = train(engine, lrs, seen.append)
    assert trained.alive == [2, 3] and engine.seeds == [1, 2]
    assert np.isfinite(trained.curves[:, [2, 3]]).all()
    assert np.isfinite(trained.curves[:16, 0]).all()
    assert not np.isfinite(trained.curves[-1, [0, 1]]).any()
    assert [progress.running for progress in seen] == [3, 2, 2]
    alone = Engine(cell, [1], 48)
    train(alone, lrs[:, [2]])
    assert alone.losses()[-1, 0] == pytest.approx(engine.losses()[-1, 0], rel=1e-5)


def test_held_out_losses_are_those_of_one_large_batch() -> None:
    cell = tiny_cell("pre_ln", probe_batch=40)
    engine = Engine(cell, [0, 1], 1)
    engine.advance(np.zeros((1, 2)))
    assert held_out_losses(engine, 40) == pytest.approx(engine.probes()[1][0], rel=1e-5)


# The summary


def run_of(seed: int, lr: float, loss: float | None) -> LrRun:
    return LrRun(seed=seed, lr=lr, loss=loss, init_loss=5.0, curve=(4.0, loss))


def sweep_of(
    losses: dict[int, list[float | None]], arch: str = "keel", **settings: Any
) -> LrSweep:
    lrs = (1e-3, 2e-3, 4e-3)
    return LrSweep(
        cell=tiny_cell(arch, **settings),
        schedule=SHORT,
        lrs=lrs,
        runs=tuple(
            run_of(seed, lr, loss)
            for seed, values in losses.items()
            for lr, loss in zip(lrs, values, strict=True)
        ),
    )


def test_sensitivity_caps_each_loss_at_that_of_init() -> None:
    """Wortsman et al. 2023: mean of min(loss, loss at init), minus the best loss."""
    runs = [run_of(0, 1e-3, 3.0), run_of(0, 2e-3, 2.0), run_of(0, 4e-3, 9.0)]
    assert sensitivity(runs) == pytest.approx((3 + 2 + 5) / 3 - 2)
    runs[2] = run_of(0, 4e-3, None)
    assert sensitivity(runs) == pytest.approx((3 + 2 + 5) / 3 - 2)
    assert sensitivity([run_of(0, 1e-3, 3.0)]) == 0


def test_the_best_lr_is_a_geometric_mean_over_seeds_known_to_half_a_step() -> None:
    sweep = sweep_of({0: [3, 2, 4], 1: [3, 2.5, 4], 2: [3, 2, 4]})
    best = sweep.best_lr
    assert best.mean == pytest.approx(2e-3) and best.n == 3
    assert best.low == pytest.approx(2e-3 / math.sqrt(2))
    assert best.high == pytest.approx(2e-3 * math.sqrt(2))
    other = sweep_of({0: [2, 3, 4], 1: [3, 4, 2]})
    assert other.best_lr.mean == pytest.approx(2e-3) and other.best_lr.low is None


def test_means_come_with_students_interval_from_three_seeds_on() -> None:
    found = mean_of([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((2, 2 - half, 2 + half))
    assert mean_of([1.0, 3.0]).low is None


def test_rows_tell_best_lr_loss_sensitivity_and_an_open_end() -> None:
    (row,) = summary_rows([sweep_of({0: [3, 2, 4], 1: [3, 2, 4], 2: [3, 2, 4]})])
    assert row["best_lr"] == pytest.approx(2e-3) and not row["is_edge"]
    assert row["best_normalized"] == pytest.approx(2e-3 * 16 / 1024)
    assert row["loss"] == 2 and row["loss_low"] == 2
    assert row["sensitivity"] == pytest.approx(1)
    assert summary_rows([sweep_of({0: [2, 3, 4]})])[0]["is_edge"]
    points = curve_rows([sweep_of({0: [3, 2, None], 1: [3, 2, 4]})])
    assert [point["loss"] for point in points] == [3, 2, None]
    assert points[2]["seed_losses"] == [None, 4] and points[2]["curve"] == [4.0, None]


# Whole sweeps


def test_a_sweep_trains_every_seed_at_every_lr() -> None:
    cells = [tiny_cell("keel"), tiny_cell("pre_ln")]
    seen: list[Any] = []
    sweeps = lr_sweeps(
        cells, (0, 1), lrs=[1e-2, 1e-3], schedule=SHORT, workers=0, on_event=seen.append
    )
    assert [sweep.cell.model.arch for sweep in sweeps] == ["keel", "pre_ln"]
    lanes = [(run.seed, run.lr) for run in sweeps[1].runs]
    assert lanes == [(0, 1e-3), (0, 1e-2), (1, 1e-3), (1, 1e-2)]
    assert sweeps[0].runs[1].loss != sweeps[1].runs[1].loss
    assert sweeps[0].runs[0].init_loss == sweeps[0].runs[1].init_loss
    assert len(sweeps[0].runs[0].curve) == SHORT.steps and seen
    assert sweeps[0].to_dict()["best_lr"] == sweeps[0].best_lr.mean


def test_cells_that_differ_in_their_peak_alone_are_a_grid() -> None:
    peaks = [tiny_cell("keel", peak=peak) for peak in (4e-3, 2e-3, 8e-3)]
    ((cell, grid),) = lr_grids(peaks)
    assert grid == [2e-3, 4e-3, 8e-3] and cell.model.arch == "keel"
    assert lr_grids(peaks, [1.0])[0][1] == [1.0]
    assert lr_grids(peaks[:1])[0][1] == default_lrs(16)
    assert len(lr_grids([*peaks, tiny_cell("pre_ln")])) == 2


def test_max_lr_stands_beside_the_best_lr_of_the_same_setting() -> None:
    (ramp,) = run_ramp(tiny_cell("keel", peak=8e-3), [0])
    records = [
        dataclasses.replace(ramp, seed=k, max_lr=lr) for k, lr in enumerate((4e-3, 9e-3))
    ]
    sweep = sweep_of({0: [3, 2, 4]}, peak=3e-2, probe_batch=5)
    (row,) = relation_rows([sweep], records)
    assert row["best_lr"] == pytest.approx(2e-3)
    assert row["max_lr"] == pytest.approx(6e-3)
    other = sweep_of({0: [3, 2, 4]}, depth=6)
    assert relation_rows([other], records) == []


def test_a_failed_task_stops_a_study_with_its_reason() -> None:
    task = Task(cell=tiny_cell(), seeds=(0,), target="math:no_such_function")
    with pytest.raises(RunFailedError, match="keel at depth 4, width 16: 'math' has no"):
        run_tasks([task], 0)


# Figures


def test_an_interval_of_shares_stays_between_0_and_1() -> None:
    found = share_of([0.1, 0.9, 0.2])
    assert found.low == 0 and found.high == 1 and found.mean == pytest.approx(0.4)
    assert share_of([0.1, 0.9]).low is None


def test_figures_draw_what_is_there() -> None:
    sweeps = [
        sweep_of({0: [3, 2, None], 1: [3, 2.2, 4], 2: [3, 2.1, 4]}),
        sweep_of({0: [3, 2.5, 4]}, arch="pre_ln"),
        sweep_of({0: [3, 2.5, 4]}, arch="highway(bias=-1)", depth=6),
    ]
    rows = curve_rows(sweeps)
    figure = lr_sweep_figure(rows)
    assert isinstance(figure, Figure) and len(figure.axes) == 2
    assert len(training_curves_figure(rows).axes) == 3
    point = {
        "arch": "keel",
        "depth": 4,
        "width": 16,
        "best_lr": 2e-3,
        "best_lr_low": 1e-3,
        "best_lr_high": 3e-3,
    }
    point |= {"max_lr": 9e-3, "max_lr_low": None, "max_lr_high": None}
    bound = point | {"arch": "pre_ln", "max_lr": None, "max_lr_low": 1e-2}
    assert isinstance(relation_figure([point, bound]), Figure)
    deeper = point | {"depth": 8}
    labels = [text.get_text() for text in relation_figure([point, deeper]).axes[0].texts]
    assert labels == ["4", "8"] and not relation_figure([point]).axes[0].texts
    assert "nothing to draw" in refusal(lambda: relation_figure([bound]))
    assert "nothing to draw" in refusal(lambda: lr_sweep_figure([]))
