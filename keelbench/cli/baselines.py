"""``keelbench baseline`` and ``calibrate``: what the gate compares with."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keelbench.cli import app, note
from keelbench.cli.measure import Quiet, Seeds, Workers
from keelbench.errors import KeelbenchError

if TYPE_CHECKING:
    from keelbench.records import Record
    from keelbench.specs import CellSpec

CI_SWEEP = Path("sweeps/ci.yaml")

baseline_app = typer.Typer(no_args_is_help=True, help="Save, list, show and compare baselines.")
app.add_typer(baseline_app, name="baseline")

Sweep = Annotated[Path, typer.Option("--sweep", help="The gate's sweep.")]


@baseline_app.command("save")
def baseline_save(
    name: Annotated[str, typer.Argument(help="Name of the baseline.")],
    sweep: Sweep = CI_SWEEP,
    from_results: Annotated[
        Path | None, typer.Option("--from", help="Take these results instead of running.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write.")] = None,
    seeds: Seeds = None,
    workers: Workers = "auto",
    quiet: Quiet = False,
) -> None:
    """Store the lanes of a sweep as a baseline to commit."""
    from keelbench.cli.read import load_records
    from keelbench.gate import BASELINES_FOLDER, baseline_path, build_baseline, save

    if from_results is not None:
        records = load_records(from_results)
    else:
        spec = load_with(sweep, {}, seeds)
        records = list(runner(workers, quiet)(spec.cells, spec.seeds))
    baseline = build_baseline(name, records, sweep=sweep.stem)
    path = out or baseline_path(BASELINES_FOLDER, name, baseline.hardware)
    save(baseline, path)
    note(f"wrote {path}: {len(baseline.cells)} cells, hardware class {baseline.hardware}")


@baseline_app.command("list")
def baseline_list() -> None:
    """List the baselines below results/baselines."""
    from keelbench.gate import BASELINES_FOLDER, list_baselines

    found = list_baselines(BASELINES_FOLDER)
    if not found:
        note(f"no baselines in {BASELINES_FOLDER}; make one with keelbench baseline save NAME")
    for info in found:
        if info.problem:
            print(f"{info.path}  unreadable: {info.problem}")
        else:
            print(
                f"{info.path}  {info.cells} cells, {info.lanes} lanes, {info.hardware}, "
                f"detector {info.detector}, {info.created}"
            )


@baseline_app.command("show")
def baseline_show(path: Annotated[Path, typer.Argument(help="A baseline file.")]) -> None:
    """Print the lanes of a baseline."""
    from keelbench.gate import load

    baseline = load(path)
    print(f"{baseline.name}: sweep {baseline.sweep}, {baseline.hardware}, {baseline.created}")
    print(f"detector {baseline.detector}, torch {baseline.environment.get('torch')}")
    for cell in baseline.cells:
        for seed, lane in cell.lanes.items():
            value = "-" if lane.max_lr is None else f"{lane.max_lr:.4g}"
            print(f"  {cell.label}  seed {seed}  {lane.verdict}  Max LR {value}")


@baseline_app.command("diff")
def baseline_diff(
    old: Annotated[Path, typer.Argument()], new: Annotated[Path, typer.Argument()]
) -> None:
    """Say what changed from one baseline to another."""
    from keelbench.gate import diff, load

    heads, cells = diff(load(old), load(new))
    for line in heads:
        print(line)
    for cell in cells:
        ratio = f"  ratio {cell.ratio:.4f}" if cell.ratio is not None else ""
        print(f"{cell.label}: {cell.status}{ratio}")
        for detail in cell.details:
            print(f"  {detail}")


@app.command()
def calibrate(
    baseline: Annotated[Path, typer.Argument(help="Baseline file to write the margin into.")],
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Result folders of unchanged code; without, it runs repeats."),
    ] = None,
    minimum: Annotated[str, typer.Option(help="Smallest margin to accept.")] = "10%",
    workers: Workers = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure the noise between repeats of the same code and store the margin it needs.

    Without result folders it runs every lane of the baseline twice more, with initial
    weights nudged by a millionth: the same code, as another machine would round it.
    """
    from keelbench.cli.read import load_records
    from keelbench.gate import calibrate as measure
    from keelbench.gate import load, run_repeats, save

    agreed = load(baseline)
    if results:
        records = [record for folder in results for record in load_records(folder)]
    else:
        records = run_repeats(agreed, runner(workers, quiet))
    found = measure(
        records,
        baseline=agreed,
        seeds=len(agreed.seeds) or 3,
        minimum=percent(minimum) or 0.1,
    )
    save(agreed.calibrated(found), baseline)
    for cell in agreed.cells:
        if cell.hash in found:
            calibration = found[cell.hash]
            print(f"{cell.label}: margin {calibration.margin:.1%}, sd {calibration.sd:.4f}")
    note(f"wrote {baseline}")


def runner(workers: str, quiet: bool) -> Any:
    """A function that runs cells for seeds in a folder that is thrown away."""
    import tempfile

    from keelbench.cli.options import worker_count
    from keelbench.cli.progress import ProgressView
    from keelbench.store import Store
    from keelbench.sweep import make_launcher, run_cells

    count = worker_count(workers)

    def run(cells: "Sequence[CellSpec]", seeds: Sequence[int]) -> "list[Record]":
        _, at_once = make_launcher(cells, count)
        lanes = len(cells) * len(seeds)
        with (
            tempfile.TemporaryDirectory(prefix="keelbench-check-") as folder,
            ProgressView(lanes, at_once, is_quiet=quiet) as view,
        ):
            return run_cells(cells, seeds, Store(folder), count, on_event=view)

    return run


def load_with(sweep: Path, overrides: dict[str, Any], seeds: str | None) -> Any:
    from keelbench.cli.options import parse_seed_option
    from keelbench.sweep_spec import build_sweep, load_values

    values = load_values(sweep)
    if seeds is not None:
        values["seeds"] = parse_seed_option(seeds)
    return build_sweep(values, overrides, source=str(sweep))


def percent(text: str | None) -> float | None:
    """``10%`` or ``0.1``."""
    if text is None:
        return None
    try:
        value = float(text.rstrip("% ")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise KeelbenchError(f"margin is '{text}': give a share such as 10% or 0.1")
    return value
