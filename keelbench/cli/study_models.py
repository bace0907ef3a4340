"""``keelbench redundancy``, ``scaling`` and ``tasks``: what trained models are worth."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keelbench.cli import app, note
from keelbench.cli.measure import Depths, Json, Quiet, Seeds, Width, Workers
from keelbench.cli.study_input import (
    PAIR,
    Arch,
    Batch,
    Data,
    Device,
    Lrs,
    Out,
    Seq,
    Steps,
    SweepFile,
    Warmup,
    cells_of,
    lrs_of,
    run_ramps,
    schedule_of,
    workers_of,
)
from keelbench.errors import KeelbenchError

if TYPE_CHECKING:
    from keelbench.sweep_spec import SweepSpec

REDUNDANCY_COLUMNS = {
    "arch": "arch",
    "depth": "L",
    "width": "width",
    "steps": "steps",
    "lr": "LR",
    "ppl": "PPL",
    "cheap_share": "cheap",
    "cheapest": "cheapest",
    "cheapest_delta": "ΔPPL",
    "dearest": "dearest",
    "dearest_delta": "ΔPPL",
}

SCALING_COLUMNS = {
    "arch": "arch",
    "depth": "L",
    "width": "width",
    "steps": "steps",
    "parameters": "parameters",
    "loss": "loss/nats",
    "best_lr": "best LR",
    "max_lr": "Max LR",
    "normalized": "normalized",
}

TASK_COLUMNS = {
    "task": "task",
    "arch": "arch",
    "depth": "L",
    "width": "width",
    "steps": "steps",
    "loss": "loss/nats",
    "answer_loss": "answers/nats",
    "accuracy": "accuracy",
    "chance": "chance",
}


@app.command()
def redundancy(
    arch: Arch = PAIR,
    depth: Depths = "32",
    width: Width = "32",
    unit: Annotated[str, typer.Option(help="What is removed: sub-layer or block.")] = (
        "sub-layer"
    ),
    lr: Annotated[float | None, typer.Option(help="Peak LR (5e-4 x 1024 / width).")] = None,
    steps: Steps = 300,
    warmup: Warmup = 0.1,
    batch: Batch = None,
    seq: Seq = None,
    data: Data = None,
    seeds: Seeds = None,
    device: Device = "auto",
    workers: Workers = "auto",
    out: Out = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Which layers matter: train, leave each out, and look at the held-out perplexity.

    cheap is the share of layers whose removal costs less than 1 %.
    """
    from keelbench.cli.study_output import StudyProgress, publish, stoppable
    from keelbench.redundancy import layer_rows, redundancies, summary_rows

    if unit not in ("sub-layer", "block"):
        raise KeelbenchError(f"--unit is '{unit}': allowed are sub-layer, block")
    settings = {"batch": batch, "seq": seq, "source": data}
    sweep = cells_of("redundancy", None, arch, depth, width, settings, seeds, device)
    with stoppable():
        found = redundancies(
            sweep.cells,
            sweep.seeds,
            lr=lr,
            schedule=schedule_of(steps, warmup),
            unit=unit,  # type: ignore[arg-type]
            workers=workers_of(workers),
            on_event=StudyProgress(is_quiet=quiet),
        )

    def figure() -> Any:
        from keelbench.report.plots.redundancy import redundancy_figure

        return redundancy_figure(layer_rows(found))

    publish(
        "redundancy",
        summary_rows(found),
        [result.to_dict() for result in found],
        REDUNDANCY_COLUMNS,
        {"redundancy": figure},
        sweep=sweep,
        folder=out or Path("results/redundancy"),
        json=json,
    )


@app.command()
def scaling(
    sweep_file: SweepFile = None,
    arch: Arch = "",
    depth: Depths = None,
    width: Width = None,
    parameters: Annotated[
        int | None, typer.Option(help="Budget: solve each depth's width for it.")
    ] = None,
    lrs: Lrs = None,
    steps: Steps = 200,
    warmup: Warmup = 0.1,
    batch: Batch = None,
    seq: Seq = None,
    data: Data = None,
    seeds: Seeds = None,
    ramp: Annotated[bool, typer.Option("--ramp/--no-ramp", help="Measure Max LR too.")] = True,
    device: Device = "auto",
    workers: Workers = "auto",
    out: Out = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Loss and Max LR against depth: at one width, or deep against wide at one budget.

    Without a sweep file: pre_ln and keel, depths 8, 16, 32, width 32, 3 seeds. The loss is
    that of the best LR of a grid. Ramps are stored, and not run again.
    """
    from keelbench.cli.study_output import StudyProgress, publish, stoppable
    from keelbench.data import open_source
    from keelbench.lrsweep import lr_sweeps
    from keelbench.scaling import scaling_rows

    if sweep_file is None:
        arch, depth, width = arch or PAIR, depth or "8,16,32", width or "32"
    settings = {"batch": batch, "seq": seq, "source": data}
    sweep = cells_of("scaling", sweep_file, arch, depth, width, settings, seeds, device)
    folder = out or Path("results") / sweep.name
    vocab = open_source(sweep.cells[0].data).vocab
    if parameters is not None:
        sweep = _within_budget(sweep, parameters, vocab)
    view = StudyProgress(is_quiet=quiet)
    with stoppable():
        records = (
            run_ramps(list(sweep.cells), sweep.seeds, folder, workers, quiet) if ramp else []
        )
        sweeps = lr_sweeps(
            sweep.cells,
            sweep.seeds,
            lrs=lrs_of(lrs),
            schedule=schedule_of(steps, warmup),
            workers=workers_of(workers),
            on_event=view,
        )
    rows = scaling_rows(sweeps, records, vocab)

    def figure() -> Any:
        from keelbench.report.plots.scaling import scaling_figure

        return scaling_figure(rows)

    publish(
        "scaling",
        rows,
        [found.to_dict() for found in sweeps],
        SCALING_COLUMNS,
        {"scaling": figure},
        sweep=sweep,
        folder=folder,
        json=json,
    )


def _within_budget(sweep: "SweepSpec", parameters: int, vocab: int) -> "SweepSpec":
    """The sweep's architectures and depths, each as wide as the budget allows."""
    from keelbench.cli.options import check_cells
    from keelbench.scaling import budget_cells

    archs = list(dict.fromkeys(cell.model.arch for cell in sweep.cells))
    depths = sorted({cell.model.depth for cell in sweep.cells})
    cells = budget_cells(sweep.cells[0], archs, depths, parameters, vocab)
    check_cells(cells)
    return replace(sweep, cells=tuple(cells))


@app.command()
def tasks(
    task: Annotated[str, typer.Option(help="Tasks: induction,hops(hops=3); or all.")] = "all",
    arch: Arch = PAIR,
    depth: Depths = "8",
    width: Width = "32",
    lrs: Lrs = None,
    steps: Steps = 800,
    warmup: Warmup = 0.1,
    batch: Batch = None,
    seq: Seq = None,
    seeds: Seeds = None,
    device: Device = "auto",
    workers: Workers = "auto",
    out: Out = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Accuracy beside loss on small tasks with known answers: loss is not quality.

    Each seed's LR is chosen by held-out loss alone.
    """
    from keelbench.cli.study_output import StudyProgress, publish, stoppable
    from keelbench.task_scores import disagreements, summary_rows, task_scores

    parts = [
        cells_of(
            "tasks",
            None,
            arch,
            depth,
            width,
            {"batch": batch, "seq": seq, "source": f"task:{name}"},
            seeds,
            device,
        )
        for name in _task_names(task)
    ]
    sweep = replace(parts[0], cells=tuple(cell for part in parts for cell in part.cells))
    with stoppable():
        scores = task_scores(
            sweep.cells,
            sweep.seeds,
            lrs=lrs_of(lrs),
            schedule=schedule_of(steps, warmup),
            workers=workers_of(workers),
            on_event=StudyProgress(is_quiet=quiet),
        )
    rows = summary_rows(scores)
    for one, two in disagreements(rows):
        note(
            f"{one['task']}: {_name(one)} has the lower loss and the lower accuracy than "
            f"{_name(two)}"
        )

    def figure() -> Any:
        from keelbench.report.plots.tasks import task_figure

        return task_figure(rows)

    publish(
        "tasks",
        rows,
        [score.to_dict() for score in scores],
        TASK_COLUMNS,
        {"tasks": figure},
        sweep=sweep,
        folder=out or Path("results/tasks"),
        json=json,
    )


def _task_names(text: str) -> list[str]:
    """The tasks of ``--task``, each known and with parameters in order."""
    from keelbench.cli.options import arch_list
    from keelbench.tasks import TASKS, make_task

    names = TASKS.names() if text == "all" else arch_list(text) or []
    if not names:
        raise KeelbenchError(
            f"--task is '{text}': known are {', '.join(TASKS.names())}, or all"
        )
    for name in names:
        make_task(name)
    return names


def _name(row: dict[str, Any]) -> str:
    return f"{row['arch']} L={row['depth']}"
