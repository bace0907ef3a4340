"""``keelbench report``, ``show``, ``judge``: from what is stored or logged, without torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keelbench.cli import app, note
from keelbench.cli.measure import Format, Json, Reference
from keelbench.errors import KeelbenchError

if TYPE_CHECKING:
    from keelbench.records import Record


def load_records(folder: Path) -> "list[Record]":
    """Every record of a results folder.

    Raises:
        KeelbenchError: if there is none.
    """
    from keelbench.store import Store

    if not folder.is_dir():
        raise KeelbenchError(f"no such results folder: {folder}", known_results())
    records = Store(folder).records()
    if not records:
        raise KeelbenchError(f"{folder} holds no records", known_results())
    return records


def known_results() -> str:
    """A hint that lists the result folders at hand."""
    found = sorted(str(path.parent) for path in Path("results").glob("*/records"))
    return f"results at hand: {', '.join(found)}" if found else "run keelbench maxlr first"


@app.command()
def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Results folder (two with --compare).")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Where the page goes.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Put two result folders side by side.")
    ] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Only the table beside arXiv 2601.19895's.")
    ] = False,
    json: Json = None,
    output_format: Format = "terminal",
    reference: Reference = "pre_ln",
) -> None:
    """Render tables, figures and one HTML page from stored records."""
    from keelbench.cli.output import (
        check_format,
        print_paper_table,
        print_tables,
        write_files,
        write_json,
    )

    check_format(output_format)
    folders = results or []
    if compare:
        _compare(folders, html)
        return
    if len(folders) != 1:
        raise KeelbenchError(
            f"report takes one results folder, got {len(folders)}", known_results()
        )
    records = load_records(folders[0])
    _note_older(records, folders[0])
    if paper:
        print_paper_table(records, output_format)
        return
    chosen = None if reference == "none" else reference
    if json is not None:
        write_json(records, json, chosen)
    if json != "-":
        print_tables(records, output_format, chosen)
    written = write_files(records, folders[0], chosen)
    if html is not None and html != folders[0] / "report.html":
        from keelbench.cli.output import write_text
        from keelbench.report.html import render_html

        page = render_html(records, title=str(folders[0]), reference=chosen)
        write_text(page, str(html))
        written.append(str(html))
    note(f"wrote {', '.join(written)} to {folders[0]}")


def _note_older(records: "list[Record]", folder: Path) -> None:
    from keelbench.rejudge import is_older

    count = sum(is_older(record) for record in records)
    if count:
        note(
            f"{count} of {len(records)} lanes were judged by an older detector: "
            f"keelbench rejudge {folder} reads them again without training"
        )


def _compare(folders: list[Path], html: Path | None) -> None:
    from keelbench.cli.output import has_color, terminal_width, write_text
    from keelbench.report.html import render_comparison
    from keelbench.report.tables import render_comparison as render_comparison_table

    if len(folders) != 2:
        raise KeelbenchError(f"--compare takes two results folders, got {len(folders)}")
    first, second = (load_records(folder) for folder in folders)
    names = [folder.resolve().name for folder in folders]
    if names[0] == names[1]:
        names = ["first", "second"]
    print(
        render_comparison_table(
            first,
            second,
            "terminal",
            first_name=names[0],
            second_name=names[1],
            width=terminal_width(),
            color=has_color(),
            encoding=sys.stdout.encoding or "utf-8",
        ).rstrip("\n")
    )
    target = html or Path("comparison.html")
    page = render_comparison(first, second, *names)
    write_text(page, str(target))
    note(f"wrote {target}")


@app.command()
def show(
    what: Annotated[
        str | None, typer.Argument(help="A record's id, or a results folder.")
    ] = None,
    output_format: Format = "terminal",
) -> None:
    """List stored results and their cells; with an id, print one lane."""
    from keelbench.cli.output import check_format, print_tables

    check_format(output_format)
    if what is None:
        _list_results()
    elif Path(what).is_dir():
        print_tables(load_records(Path(what)), output_format, None)
    else:
        _show_lane(what, output_format)


def _list_results() -> None:
    from keelbench.store import Store

    folders = sorted(path.parent for path in Path("results").glob("*/records"))
    if not folders:
        note("no stored results below results/; run keelbench maxlr first")
        return
    for folder in folders:
        records = Store(folder).records()
        cells = list(dict.fromkeys((r.cell.model.arch, r.cell.model.depth) for r in records))
        names = ", ".join(f"{arch} L={depth}" for arch, depth in cells[:4])
        more = f", {len(cells) - 4} more" if len(cells) > 4 else ""
        print(f"{folder}  {len(records)} lanes  {names}{more}")


def _show_lane(record_id: str, output_format: str) -> None:
    from keelbench.cli.output import has_color, terminal_width
    from keelbench.report.lane import lane_page_json, render_lane
    from keelbench.report.results_json import to_text
    from keelbench.store import read_record

    found = sorted(Path("results").glob(f"*/records/{record_id}*.json"))
    if not found:
        raise KeelbenchError(
            f"no stored lane has an id that starts with '{record_id}'",
            "keelbench show RESULTS --format json lists ids",
        )
    if len(found) > 1:
        ids = ", ".join(path.stem for path in found[:6])
        raise KeelbenchError(f"'{record_id}' fits {len(found)} lanes: {ids}")
    record = read_record(found[0])
    if output_format == "json":
        print(to_text(lane_page_json(record)), end="")
        return
    encoding = sys.stdout.encoding or "utf-8"
    print(render_lane(record, width=terminal_width(), color=has_color(), encoding=encoding))


@app.command()
def judge(
    log: Annotated[Path, typer.Argument(help="CSV or JSONL, or a W&B / TensorBoard export.")],
    step: Annotated[str, typer.Option("--step", help="Column with the step.")] = "step",
    lr: Annotated[str, typer.Option("--lr", help="Column with the LR.")] = "lr",
    loss: Annotated[str, typer.Option("--loss", help="Column with the train loss.")] = "loss",
    probe: Annotated[
        str, typer.Option("--probe", help="Column with a loss on fixed held-out data.")
    ] = "probe",
    grad_norm: Annotated[
        str, typer.Option("--grad-norm", help="Column with the gradient norm.")
    ] = "grad_norm",
    slope: Annotated[
        float | None, typer.Option(help="LR per step, for logs without an LR column.")
    ] = None,
    unigram_entropy: Annotated[
        float | None, typer.Option("--unigram-entropy", help="Nats per token, if known.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", help="A healthy run's log to compare with.")
    ] = None,
    json: Json = None,
) -> None:
    """Say whether a training log diverged, by which rule, where, and its Max LR."""
    from keelbench.cli.judging import judge_log, print_judgement
    from keelbench.cli.output import write_text
    from keelbench.report.results_json import to_text

    columns = {"step": step, "lr": lr, "loss": loss, "probe": probe, "grad_norm": grad_norm}
    judgement, notes = judge_log(log, columns, slope, unigram_entropy, reference)
    for line in notes:
        note(f"note: {line}")
    if json is not None:
        write_text(to_text(judgement), json)
    if json != "-":
        print_judgement(judgement)
