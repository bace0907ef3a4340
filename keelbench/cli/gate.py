"""``keelbench check``, ``baseline`` and ``calibrate``: the CI gate."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keelbench.cli import app, note
from keelbench.cli.measure import Json, Quiet, Seeds, Workers
from keelbench.errors import KeelbenchError

if TYPE_CHECKING:
    from keelbench.gate import Baseline, GateReport
    from keelbench.records import Record
    from keelbench.specs import CellSpec

CI_SWEEP = Path("sweeps/ci.yaml")

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"

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
        spec = _load(sweep, {}, seeds)
        records = list(_runner(workers, quiet)(spec.cells, spec.seeds))
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
def check(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of cells.")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="Baseline file.")] = None,
    sweep: Sweep = CI_SWEEP,
    results: Annotated[
        Path | None, typer.Option("--results", help="Judge these results instead of running.")
    ] = None,
    margin: Annotated[
        str | None, typer.Option(help="Largest drop to tolerate, e.g. 10%.")
    ] = None,
    min_seeds: Annotated[int, typer.Option(help="Seeds of the first look.")] = 3,
    max_seeds: Annotated[int, typer.Option(help="Seeds of the last look.")] = 5,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="Setting that may differ; repeatable.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Inconclusive is exit 4.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Losses must be equal bit by bit.")
    ] = False,
    json: Json = None,
    junit: Annotated[Path | None, typer.Option(help="JUnit XML file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Markdown file.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Figure, without suffix.")] = None,
    workers: Workers = "auto",
    quiet: Quiet = False,
) -> None:
    """Hold a sweep to its baseline: exit 1 if a Max LR dropped by more than the margin."""
    from keelbench.cli.interrupt import resumable
    from keelbench.gate import load

    values = _overrides(overrides or [])
    limit = _percent(margin)
    agreed = load(baseline) if baseline is not None else _own_baseline(sweep)
    looks = _looks(min_seeds, max_seeds)
    with resumable(shlex.join(["keelbench", "check"])):
        if results is not None:
            report, records = _judge_results(
                agreed, results, looks, limit, allow or [], strict, exact
            )
        else:
            cells = _load(sweep, values, None).cells
            _refuse_incompatible(agreed, cells, allow or [])
            report, records = _run_gate(
                agreed, cells, looks, limit, allow or [], strict, exact, workers, quiet
            )
    _publish(report, agreed, records, sweep, json, junit, markdown, figure)
    raise typer.Exit(int(report.exit_code))


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
        records = run_repeats(agreed, _runner(workers, quiet))
    found = measure(
        records,
        baseline=agreed,
        seeds=len(agreed.seeds) or 3,
        minimum=_percent(minimum) or 0.1,
    )
    save(agreed.calibrated(found), baseline)
    for cell in agreed.cells:
        if cell.hash in found:
            calibration = found[cell.hash]
            print(f"{cell.label}: margin {calibration.margin:.1%}, sd {calibration.sd:.4f}")
    note(f"wrote {baseline}")


def _run_gate(
    agreed: "Baseline",
    cells: "Sequence[CellSpec]",
    looks: Any,
    margin: float | None,
    allow: list[str],
    strict: bool,
    exact: bool,
    workers: str,
    quiet: bool,
) -> "tuple[GateReport, list[Record]]":
    from keelbench.gate import run_check, run_exact

    kept: list[Record] = []
    runner = _runner(workers, quiet)

    def run(specs: "Sequence[CellSpec]", seeds: Sequence[int]) -> "Sequence[Record]":
        records = list(runner(specs, seeds))
        kept.extend(records)
        return records

    if exact:
        return run_exact(agreed, cells, run, seeds=looks[0].seeds, allow=allow), kept
    report = run_check(
        agreed, cells, run, looks=looks, margin=margin, allow=allow, strict=strict
    )
    return report, kept


def _judge_results(
    agreed: "Baseline",
    folder: Path,
    looks: Any,
    margin: float | None,
    allow: list[str],
    strict: bool,
    exact: bool,
) -> "tuple[GateReport, list[Record]]":
    from keelbench.cli.read import load_records
    from keelbench.gate import compare_exact, decide

    records = load_records(folder)
    if exact:
        return compare_exact(agreed, records, allow=allow, strict=strict), records
    report = decide(
        agreed, records, looks=looks, margin=margin, allow=allow, strict=strict, more=False
    )
    return report, records


def _publish(
    report: "GateReport",
    agreed: "Baseline",
    records: "list[Record]",
    sweep: Path,
    json: str | None,
    junit: Path | None,
    markdown: Path | None,
    figure: Path | None,
) -> None:
    from keelbench.cli.output import has_color, terminal_width, write_text
    from keelbench.gate import to_annotations, to_json, to_junit, to_markdown, to_terminal
    from keelbench.report.results_json import to_text

    accept = f"keelbench baseline save {agreed.name} --sweep {sweep}"
    if json is not None:
        write_text(to_text(to_json(report)), json)
    if json != "-":
        width = terminal_width()
        print(to_terminal(report, width=width, color=has_color(), accept=accept), end="")
    if junit is not None:
        write_text(to_junit(report), str(junit))
    if markdown is not None:
        write_text(to_markdown(report, accept=accept), str(markdown))
    if figure is not None:
        _save_figure(agreed, records, figure)
    _append_summary(to_markdown(report, accept=accept))
    if os.environ.get("GITHUB_ACTIONS") and report.exit_code:
        for line in to_annotations(report):
            note(line)


def _save_figure(agreed: "Baseline", records: "list[Record]", path: Path) -> None:
    from keelbench.report.plots import comparison_figure, save

    cells = {cell.hash for cell in agreed.cells}
    current = [record for record in records if record.cell.hash in cells]
    if current:
        save(comparison_figure(_as_records(agreed), current), path)


def _as_records(agreed: "Baseline") -> "list[Record]":
    """A baseline's lanes as records without traces: all that a figure of Max LR needs."""
    import numpy as np

    from keelbench.records import Environment, Record, Trace, Verdict

    return [
        Record(
            cell=cell.spec,
            seed=lane.seed,
            detector=agreed.detector,
            verdict=Verdict(kind=lane.verdict, rule=lane.rule, onset_step=lane.onset_step),
            max_lr=lane.max_lr,
            trace=Trace(
                lr=np.asarray([lane.lower_bound or 0.0]), loss=np.zeros(1, dtype=np.float64)
            ),
            seconds=0.0,
            environment=Environment(),
        )
        for cell in agreed.cells
        for lane in cell.lanes.values()
    ]


def _append_summary(markdown: str) -> None:
    from keelbench.gate import to_step_summary

    target = os.environ.get(SUMMARY_VARIABLE)
    if not target:
        return
    path = Path(target)
    already = path.stat().st_size if path.exists() else 0
    with path.open("a", encoding="utf-8") as file:
        file.write(to_step_summary(markdown, already=already))


def _runner(workers: str, quiet: bool) -> Any:
    """A function that runs cells for seeds in a folder that is thrown away."""
    import tempfile

    from keelbench.cli.measure import worker_count
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


def _load(sweep: Path, overrides: dict[str, Any], seeds: str | None) -> Any:
    from keelbench.cli.measure import parse_seed_option
    from keelbench.sweep_spec import build_sweep, load_values

    values = load_values(sweep)
    if seeds is not None:
        values["seeds"] = parse_seed_option(seeds)
    return build_sweep(values, overrides, source=str(sweep))


def _own_baseline(sweep: Path) -> "Baseline":
    """The baseline of this sweep for this machine's hardware class."""
    from keelbench.gate import find_baseline

    cells = _load(sweep, {}, None).cells
    return find_baseline(sweep.stem, _hardware(cells[0].device))[1]


def _refuse_incompatible(
    agreed: "Baseline", cells: "Sequence[CellSpec]", allow: list[str]
) -> None:
    """Another detector or hardware class is told before anything runs, not after."""
    from keelbench.divergence import DETECTOR_VERSION
    from keelbench.gate.matching import allowed_fields, check_compatible

    check_compatible(
        agreed,
        detector=DETECTOR_VERSION,
        hardware=_hardware(cells[0].device),
        allowed=allowed_fields(allow),
    )


def _hardware(device: str) -> str:
    import platform

    from keelbench.gate import hardware_class
    from keelbench.records import Environment

    name = ""
    if device == "cuda":
        import torch

        name = torch.cuda.get_device_name()
    here = f"{platform.system()}-{platform.machine()}"
    return hardware_class(Environment(platform=here, device_name=name), device)


def _overrides(arguments: list[str]) -> dict[str, Any]:
    values = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise KeelbenchError(f"'{argument}' is not KEY=VALUE", "for example dtype=bfloat16")
        values[key] = value
    return values


def _looks(min_seeds: int, max_seeds: int) -> Any:
    from keelbench.gate import plan

    return plan(min_seeds, max(min_seeds, max_seeds))


def _percent(text: str | None) -> float | None:
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
