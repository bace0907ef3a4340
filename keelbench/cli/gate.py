"""``keelbench check``: the CI gate."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keelbench.cli import app, note
from keelbench.cli.baselines import CI_SWEEP, Sweep, load_with, percent, runner
from keelbench.cli.measure import Json, Quiet, Workers
from keelbench.errors import KeelbenchError

if TYPE_CHECKING:
    from keelbench.gate import Baseline, GateReport
    from keelbench.records import Record
    from keelbench.specs import CellSpec

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


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
    limit = percent(margin)
    agreed = load(baseline) if baseline is not None else _own_baseline(sweep)
    looks = _looks(min_seeds, max_seeds)
    with resumable(shlex.join(["keelbench", "check"])):
        if results is not None:
            report, records = _judge_results(
                agreed, results, looks, limit, allow or [], strict, exact
            )
        else:
            cells = load_with(sweep, values, None).cells
            _refuse_incompatible(agreed, cells, allow or [])
            report, records = _run_gate(
                agreed, cells, looks, limit, allow or [], strict, exact, workers, quiet
            )
    _publish(report, agreed, records, sweep, json, junit, markdown, figure)
    raise typer.Exit(int(report.exit_code))


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
    run_cells = runner(workers, quiet)

    def run(specs: "Sequence[CellSpec]", seeds: Sequence[int]) -> "Sequence[Record]":
        records = list(run_cells(specs, seeds))
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


def _own_baseline(sweep: Path) -> "Baseline":
    """The baseline of this sweep for this machine's hardware class."""
    from keelbench.gate import find_baseline

    cells = load_with(sweep, {}, None).cells
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
