"""``keelbench maxlr`` and ``keelbench compare``: run what is missing, show what came out."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from keelbench.cli import app, note
from keelbench.cli.options import (
    arch_list,
    axes,
    check_cells,
    lane_count,
    split_arguments,
    sweep_from,
    worker_count,
)
from keelbench.errors import ExitCode

Depths = Annotated[
    str | None, typer.Option("--depth", help="Sub-layers, e.g. 64 or 64,512; blocks are half.")
]
Width = Annotated[str | None, typer.Option("--width", help="Model width, e.g. 64 or 32,64.")]
Seeds = Annotated[
    str | None, typer.Option("--seeds", help="How many seeds (3), or a list (0,5,7).")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for records, tables, plots.")]
Json = Annotated[
    str | None, typer.Option("--json", help="Write JSON to PATH, or - for stdout.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run again what is stored already.")]
Workers = Annotated[
    str, typer.Option("--workers", help="Processes at once: auto, a number, 0 for in-process.")
]
Lanes = Annotated[
    str, typer.Option("--lanes", help="Seeds trained together at most: auto or a number.")
]
Format = Annotated[
    str, typer.Option("--format", help="terminal, markdown, csv, json or latex.")
]
Reference = Annotated[
    str, typer.Option("--reference", help="Architecture that ratios refer to, or none.")
]


@app.command()
def maxlr(
    archs: Annotated[
        list[str] | None, typer.Argument(metavar="[ARCH]...", help="Default: keel.")
    ] = None,
    depth: Depths = None,
    width: Width = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step (8).")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence (64).")] = None,
    seeds: Seeds = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="kjv, markov or words; text:, words: or tokens:PATH; hf: or task:NAME."
        ),
    ] = None,
    slope: Annotated[
        float | None, typer.Option(help="LR per step (1e-5 x 1024 / width).")
    ] = None,
    peak: Annotated[float | None, typer.Option(help="Last LR (5e-2 x 1024 / width).")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, sgd, muon or pkg.module:factory.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Your own model: pkg.module:build or file.py:build.")
    ] = None,
    protocol: Annotated[
        str | None, typer.Option(help="ramp, or hold: the LR that is sustained.")
    ] = None,
    refine: Annotated[
        bool, typer.Option("--refine", help="A second, slower ramp where one step is coarse.")
    ] = False,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Record which sub-layer moved first.")
    ] = False,
    qk_norm: Annotated[bool, typer.Option("--qk-norm", help="RMSNorm on q and k.")] = False,
    norm: Annotated[str | None, typer.Option(help="rmsnorm, layernorm or dyt.")] = None,
    init_std: Annotated[float | None, typer.Option(help="Std of matrices.")] = None,
    lr_scaling: Annotated[str | None, typer.Option(help="none or mup.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on CPU, bfloat16 on CUDA), float32, bfloat16.")
    ] = "auto",
    workers: Workers = "auto",
    lanes: Lanes = "auto",
    out: Out = None,
    json: Json = None,
    output_format: Format = "terminal",
    quiet: Quiet = False,
    fresh: Fresh = False,
) -> None:
    """Measure the Max LR of one or more architectures.

    The learning rate rises from 0 until each run breaks. The same command again shows the
    stored result.
    """
    settings = {
        "heads": heads,
        "batch": batch,
        "seq": seq,
        "source": data,
        "slope": slope,
        "peak": peak,
        "optim.name": optimizer,
        "module": model,
        "protocol": protocol,
        "qk_norm": qk_norm or None,
        "norm": norm,
        "init_std": init_std,
        "lr_scaling": lr_scaling,
    }
    _measure(
        None,
        axes(archs or (["keel"] if model is None else None), depth, width),
        settings,
        seeds,
        device=device,
        dtype=dtype,
        name="maxlr",
        reference="none",
        workers=workers,
        lanes=lanes,
        out=out,
        json=json,
        output_format=output_format,
        is_quiet=quiet,
        is_fresh=fresh,
        is_refined=refine,
        is_diagnosed=diagnose,
    )


@app.command()
def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SWEEP.yaml] [KEY=VALUE]...", help="A sweep, and settings."),
    ] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", help="Architectures: keel,pre_ln; or all.")
    ] = None,
    depth: Depths = None,
    width: Width = None,
    seeds: Seeds = None,
    reference: Reference = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and stop; touches no device.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="With --dry-run: time a few steps per cell.")
    ] = False,
    workers: Workers = "auto",
    lanes: Lanes = "auto",
    out: Out = None,
    json: Json = None,
    output_format: Format = "terminal",
    quiet: Quiet = False,
    fresh: Fresh = False,
) -> None:
    """Compare architectures over depths and seeds: tables, plots and a report.

    Without arguments: the six of the paper at depth 64 with 3 seeds. KEY=VALUE sets any
    field of every cell, such as ramp.slope=2e-5 or batch=16. --arch, --depth and --width take
    the place of a file's matrix, and pick from the cells that it lists.
    """
    sweep_path, overrides = split_arguments(arguments or [])
    _measure(
        sweep_path,
        axes(arch_list(arch), depth, width),
        overrides,
        seeds,
        device=device,
        dtype=dtype,
        name=sweep_path.stem if sweep_path else "compare",
        reference=reference,
        workers=workers,
        lanes=lanes,
        out=out,
        json=json,
        output_format=output_format,
        is_quiet=quiet,
        is_fresh=fresh,
        dry_run=("estimate" if estimate else "list") if dry_run or estimate else None,
    )


def _measure(
    sweep_path: Path | None,
    axes: dict[str, Any],
    settings: dict[str, Any],
    seeds: str | None,
    *,
    device: str,
    dtype: str,
    name: str,
    reference: str,
    workers: str,
    lanes: str,
    out: Path | None,
    json: str | None,
    output_format: str,
    is_quiet: bool,
    is_fresh: bool,
    is_refined: bool = False,
    is_diagnosed: bool = False,
    dry_run: str | None = None,
) -> None:
    from keelbench.cli.interrupt import resumable
    from keelbench.cli.output import check_format, publish
    from keelbench.store import Store

    check_format(output_format)
    sweep = sweep_from(sweep_path, axes, settings, seeds, name, device=device, dtype=dtype)
    folder = out or Path("results") / sweep.name
    if dry_run:
        from keelbench.cli.dry_run import print_plan

        print_plan(sweep, Store(folder), is_timed=dry_run == "estimate")
        return
    with resumable(_command()):
        records = _run(sweep, Store(folder), workers, lanes, is_quiet, is_fresh)
        if is_refined:
            sweep = _refined(sweep, records)
            records += _run(sweep, Store(folder), workers, lanes, is_quiet, is_fresh)
        if is_diagnosed:
            records = _diagnosed(records, Store(folder), is_quiet)
    chosen = reference or sweep.reference or "none"
    publish(
        records, folder, reference=chosen, json=json, skin=output_format, command=_command()
    )
    if any(record.verdict.kind == "failed" for record in records):
        raise typer.Exit(int(ExitCode.FAILED))


def _diagnosed(records: list[Any], store: Any, is_quiet: bool) -> list[Any]:
    """Run each broken lane again up to its onset, watching every sub-layer."""
    from keelbench.cli.progress import label
    from keelbench.diagnose import diagnosed

    kept = []
    for record in records:
        if record.verdict.kind == "diverged" and not record.diagnosis:
            if not is_quiet:
                note(f"{label(record.cell)}: diagnosing seed {record.seed}")
            record = diagnosed(record)
            store.save(record)
        kept.append(record)
    return kept


def _refined(sweep: Any, records: list[Any]) -> Any:
    """The sweep of the second ramps, for the cells that the first read coarsely."""
    from dataclasses import replace

    from keelbench.refine import refined_cell

    cells = (refined_cell(cell, records) for cell in sweep.cells)
    return replace(sweep, cells=tuple(cell for cell in cells if cell is not None))


def _run(
    sweep: Any,
    store: Any,
    workers: str,
    lanes: str,
    is_quiet: bool,
    is_fresh: bool,
) -> list[Any]:
    from keelbench.cli.progress import ProgressView
    from keelbench.sweep import make_launcher, pending_seeds, run_cells

    store.prepare()
    check_cells(sweep.cells)
    count, together = worker_count(workers), lane_count(lanes)
    pending = sum(
        len(sweep.seeds if is_fresh else pending_seeds(cell, sweep.seeds, store))
        for cell in sweep.cells
    )
    total = len(sweep.cells) * len(sweep.seeds)
    if not is_quiet:
        stored = f", {total - pending} stored already" if pending < total else ""
        todo = f"{pending} of {total} lanes to run" if pending else "nothing to do"
        note(f"{todo}{stored}; results in {store.folder}")
        if not is_fresh:
            _note_rejudgeable(sweep, store)
    _, at_once = make_launcher(sweep.cells, count)
    with ProgressView(pending, at_once, is_quiet=is_quiet) as view:
        return run_cells(
            sweep.cells,
            sweep.seeds,
            store,
            count,
            on_event=view,
            is_fresh=is_fresh,
            lanes=together,
        )


def _note_rejudgeable(sweep: Any, store: Any) -> None:
    from keelbench.rejudge import rejudgeable

    count = rejudgeable(sweep.cells, sweep.seeds, store)
    if count:
        lanes = "1 of them was" if count == 1 else f"{count} of them were"
        note(
            f"{lanes} measured under an older detector: stop here, and keelbench rejudge "
            f"{store.folder} reads them again without training"
        )


def _command() -> str:
    return shlex.join(["keelbench", *sys.argv[1:]])
