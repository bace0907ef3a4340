"""What a measuring command leaves: a table or JSON on stdout, files in the results folder."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keelbench.cli import note
from keelbench.errors import KeelbenchError
from keelbench.registry import did_you_mean

if TYPE_CHECKING:
    from keelbench.records import Record

FORMATS = ("terminal", "markdown", "csv", "json", "latex")


def check_format(name: str) -> None:
    """Refuse an unknown ``--format`` before anything runs."""
    if name not in FORMATS:
        near = did_you_mean(name, FORMATS)
        raise KeelbenchError(f"--format is '{name}'{near}: allowed are {', '.join(FORMATS)}")


def terminal_width() -> int:
    """Columns of stdout; 80 when piped."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return 80
    return shutil.get_terminal_size((80, 24)).columns


def has_color() -> bool:
    """True if stdout is a terminal and NO_COLOR is unset (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def print_tables(
    records: Sequence["Record"], skin: str, reference: str | None, *, lanes: bool = True
) -> None:
    """The main table on stdout, in the terminal followed by each seed's verdict."""
    from keelbench.report.tables import render, render_lanes

    print(render(records, skin, reference=reference, **_style()).rstrip("\n"))
    if skin == "terminal" and lanes:
        print()
        print(render_lanes(records, skin, **_style()).rstrip("\n"))


def print_paper_table(records: Sequence["Record"], skin: str) -> None:
    """Our numbers beside the paper's Table 1."""
    from keelbench.report.tables import render_paper

    print(render_paper(records, skin, **_style()).rstrip("\n"))


def _style() -> dict[str, Any]:
    """How stdout wants its tables."""
    return {
        "width": terminal_width(),
        "color": has_color(),
        "encoding": sys.stdout.encoding or "utf-8",
    }


def write_json(records: Sequence["Record"], target: str, reference: str | None) -> None:
    """JSON of the results to a path, or to stdout for ``-``."""
    from keelbench.report.results_json import results_json, to_text

    write_text(to_text(results_json(records, reference=reference)), target)


def write_text(text: str, target: str) -> None:
    """Text to a path, or to stdout for ``-``."""
    if target == "-":
        print(text, end="")
        return
    from keelbench.store import write_atomically

    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise KeelbenchError(f"cannot write {path}: {error.strerror}") from error


def publish(
    records: Sequence["Record"],
    folder: Path,
    *,
    reference: str,
    json: str | None,
    skin: str,
    command: str | None = None,
) -> None:
    """Print the table (or the JSON) and write summary, table, figures and page."""
    chosen = None if reference == "none" else reference
    try:
        if json is not None:
            write_json(records, json, chosen)
        if json != "-":
            print_tables(records, skin, chosen)
            sys.stdout.flush()
    finally:  # also when nobody reads to the end, as in `keelbench compare | head`
        written = write_files(records, folder, chosen, command=command)
    note(f"wrote {', '.join(written)} to {folder}")


def write_files(
    records: Sequence["Record"],
    folder: Path,
    reference: str | None,
    *,
    command: str | None = None,
) -> list[str]:
    """summary.csv, table.md, figures and report.html; returns their names."""
    from keelbench.report.html import render_html
    from keelbench.report.plots import figures, save
    from keelbench.report.tables import render

    write_text(render(records, "csv", reference=reference), str(folder / "summary.csv"))
    write_text(render(records, "markdown", reference=reference), str(folder / "table.md"))
    names = ["summary.csv", "table.md"]
    for name, figure in figures(records).items():
        save(figure, folder / name)
        names.append(f"{name}.png")
    page = render_html(records, title=str(folder), command=command, reference=reference)
    write_text(page, str(folder / "report.html"))
    return [*names, "report.html"]
