"""What studies are asked for: shared options, and how their text is read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keelbench.errors import KeelbenchError

if TYPE_CHECKING:
    from keelbench.sweep_spec import SweepSpec
    from keelbench.training import Schedule

PAIR = "pre_ln,keel"

Arch = Annotated[str, typer.Option("--arch", help="Architectures: keel,pre_ln; or all.")]
Batch = Annotated[int | None, typer.Option(help="Sequences per step.")]
Seq = Annotated[int | None, typer.Option(help="Tokens per sequence (64).")]
Data = Annotated[
    str | None,
    typer.Option(help="kjv, markov or words; text:, words: or tokens:PATH; hf: or task:NAME."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder (results/<command>).")]
Steps = Annotated[int, typer.Option(help="Training steps.")]
Warmup = Annotated[float, typer.Option(help="Share of the steps that the LR rises.")]
Lrs = Annotated[
    str | None, typer.Option("--lrs", help="Peak LRs: 1e-3,3e-3 or LOW:HIGH:POINTS.")
]
SweepFile = Annotated[Path | None, typer.Argument(metavar="[SWEEP.yaml]", help="Cells.")]


def cells_of(
    name: str,
    path: Path | None,
    arch: str,
    depth: str | None,
    width: str | None,
    settings: dict[str, Any],
    seeds: str | None,
    device: str,
) -> "SweepSpec":
    """Cells and seeds from flags, or from a sweep file that flags win over."""
    from keelbench.cli import options

    chosen = options.axes(options.arch_list(arch or None), depth, width)
    found = options.sweep_from(path, chosen, settings, seeds, name, device=device)
    options.check_cells(found.cells)
    return found


def run_ramps(
    cells: list[Any], seeds: tuple[int, ...], folder: Path, workers: str, is_quiet: bool
) -> list[Any]:
    from keelbench.cli.progress import ProgressView
    from keelbench.store import Store
    from keelbench.sweep import make_launcher, pending_seeds, run_cells

    store, count = Store(folder), workers_of(workers)
    store.prepare()
    pending = sum(len(pending_seeds(cell, seeds, store)) for cell in cells)
    _, at_once = make_launcher(cells, count)
    with ProgressView(pending, at_once, is_quiet=is_quiet) as view:
        return run_cells(cells, seeds, store, count, on_event=view)


def stored(folder: Path) -> list[Any]:
    from keelbench.cli.read import load_records

    return load_records(folder)


def workers_of(text: str) -> int | None:
    from keelbench.cli.options import worker_count

    return worker_count(text)


def schedule_of(steps: int, warmup: float) -> "Schedule":
    from keelbench.training import Schedule

    return Schedule(steps=steps, warmup=warmup).validated()


def lrs_of(text: str | None) -> list[float] | None:
    """``1e-3,3e-3``, or ``1e-3:1e-1:6`` for a geometric grid."""
    from keelbench.training import lr_grid

    if text is None:
        return None
    wrong = KeelbenchError(
        f"--lrs is '{text}': give positive LRs, or LOW:HIGH:POINTS",
        "for example 1e-3,3e-3 or 1e-3:1e-1:6",
    )
    try:
        if ":" in text:
            low, high, points = text.split(":")
            return sorted(set(lr_grid(float(low), float(high), int(points))))
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise wrong from None
    if not all(0 < lr < float("inf") for lr in found):
        raise wrong
    return found
