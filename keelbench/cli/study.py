"""``keelbench gradients`` and ``lrsweep``; the other studies are in ``study_models``."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from keelbench.cli import app, note, study_models
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
    schedule_of,
    stored,
    workers_of,
)
from keelbench.errors import KeelbenchError

GRADIENT_COLUMNS = {
    "arch": "arch",
    "depth": "L",
    "width": "width",
    "step": "step",
    "first_to_last": "first/last",
    "decay": "decay",
    "shortcut_decay": "shortcut",
    "predicted_decay": "predicted",
    "bound_decay": "bound",
}

LR_COLUMNS = {
    "arch": "arch",
    "depth": "L",
    "width": "width",
    "steps": "steps",
    "best_lr": "best LR",
    "loss": "loss/nats",
    "sensitivity": "sensitivity/nats",
}


@app.command()
def gradients(
    arch: Arch = "post_ln,deepnorm,hybridnorm,mix_ln,pre_ln,keel",
    depth: Depths = "64",
    width: Width = None,
    at: Annotated[str, typer.Option(help="init, or a STEP of the ramp.")] = "init",
    batch: Batch = 4,
    seq: Seq = None,
    data: Data = None,
    seeds: Seeds = "1",
    device: Device = "auto",
    workers: Workers = "auto",
    out: Out = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Why it breaks: gradients, activations and updates of every sub-layer against depth.

    decay is the factor that the gradient takes per sub-layer on its way to the input;
    shortcut is the same through shortcuts alone, predicted its closed form from the measured
    branch variance, bound the paper's bound.
    """
    from keelbench.cli.study_output import StudyProgress, publish, stoppable
    from keelbench.gradients import gradient_profiles, summary_rows

    if at != "init" and not at.isdecimal():
        raise KeelbenchError(f"--at is '{at}': give init or a step >= 0")
    settings = {"batch": batch, "probe_batch": batch, "seq": seq, "source": data}
    sweep = cells_of("gradients", None, arch, depth, width, settings, seeds, device)
    with stoppable():
        profiles = gradient_profiles(
            sweep.cells,
            sweep.seeds,
            at=0 if at == "init" else int(at),
            workers=workers_of(workers),
            on_event=StudyProgress(is_quiet=quiet),
        )
    details = [profile.to_dict() for profile in profiles]

    def figure() -> Any:
        from keelbench.report.plots.gradients import gradient_figure

        return gradient_figure(details)

    publish(
        "gradients",
        summary_rows(profiles),
        details,
        GRADIENT_COLUMNS,
        {"gradients": figure},
        sweep=sweep,
        folder=out or Path("results/gradients"),
        json=json,
    )


@app.command()
def lrsweep(
    sweep_file: SweepFile = None,
    arch: Arch = "",
    depth: Depths = None,
    width: Width = None,
    lrs: Lrs = None,
    steps: Steps = 200,
    warmup: Warmup = 0.1,
    batch: Batch = None,
    seq: Seq = None,
    data: Data = None,
    seeds: Seeds = None,
    max_lr: Annotated[
        Path | None, typer.Option("--max-lr", help="Results with the Max LR of these cells.")
    ] = None,
    device: Device = "auto",
    workers: Workers = "auto",
    out: Out = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """At which LR it trains best: warm-up and cosine at fixed peaks, as lanes of one batch.

    Without a sweep file: pre_ln and keel, depth 32, width 32, 3 seeds, six LRs from 1e-4 to
    1e-2 x 1024 / width. Sensitivity is the mean over the grid of min(loss, loss at init)
    minus the best loss. In a sweep file, several ramp.peak are the grid. With --max-lr, the
    best LR is drawn against the Max LR of stored results.
    """
    from keelbench.cli.study_output import StudyProgress, publish, stoppable
    from keelbench.lrsweep import curve_rows, lr_sweeps, relation_rows, summary_rows

    default = (PAIR, "32", "32") if sweep_file is None else (arch, depth, width)
    sweep = cells_of(
        "lrsweep",
        sweep_file,
        arch or default[0],
        depth or default[1],
        width or default[2],
        {"batch": batch, "seq": seq, "source": data},
        seeds,
        device,
    )
    records = stored(max_lr) if max_lr else []
    with stoppable():
        sweeps = lr_sweeps(
            sweep.cells,
            sweep.seeds,
            lrs=lrs_of(lrs),
            schedule=schedule_of(steps, warmup),
            workers=workers_of(workers),
            on_event=StudyProgress(is_quiet=quiet),
        )
    points, relation = curve_rows(sweeps), relation_rows(sweeps, records)
    rows = summary_rows(sweeps)
    for row in rows:
        if row["is_edge"]:
            note(f"{row['arch']} L={row['depth']}: the best LR is an end of the grid")

    figures = _lr_figures(points, relation)
    if max_lr and "max_and_best_lr" not in figures:
        note(f"no cell of {max_lr} has a Max LR under the same settings: no scatter")
    publish(
        "lrsweep",
        rows,
        {"sweeps": [found.to_dict() for found in sweeps], "relation": relation},
        LR_COLUMNS,
        figures,
        sweep=sweep,
        folder=out or Path("results/lrsweep"),
        json=json,
    )


def _lr_figures(
    points: list[dict[str, Any]], relation: list[dict[str, Any]]
) -> dict[str, Callable[[], Any]]:
    """What an LR sweep draws; training curves of the first shape alone."""

    def losses() -> Any:
        from keelbench.report.plots.lrsweep import lr_sweep_figure

        return lr_sweep_figure(points)

    def curves() -> Any:
        from keelbench.report.plots.lrsweep import training_curves_figure

        return training_curves_figure([p for p in points if _shape(p) == _shape(points[0])])

    def scatter() -> Any:
        from keelbench.report.plots.lrsweep import relation_figure

        return relation_figure(relation)

    figures = {"loss_lr": losses, "training": curves}
    if any(row["max_lr"] is not None for row in relation):
        figures["max_and_best_lr"] = scatter
    return figures


def _shape(row: dict[str, Any]) -> tuple[int, int]:
    return row["depth"], row["width"]


__all__ = ["study_models"]
