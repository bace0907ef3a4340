"""What a study leaves: a table or JSON on stdout, files in its folder, progress on stderr."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from keelbench.cli import note
from keelbench.errors import ExitCode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from keelbench.launch import Event

SCHEMA = "keelbench.study/1"

PLAIN_SECONDS = 10.0
"""Seconds between two progress lines of one task."""

Row = dict[str, Any]


def publish(
    study: str,
    rows: Sequence[Row],
    details: Any,
    columns: Mapping[str, str],
    figures: Mapping[str, Callable[[], "Figure"]],
    *,
    folder: Path,
    json: str | None,
) -> None:
    """Print the table (or the JSON) and write JSON, CSV and figures.

    Args:
        study: name of the command.
        rows: of the table.
        details: everything that was measured, JSON-ready.
        columns: field to header, in order; fields with ``_low`` and ``_high`` beside them are
            shown with their interval.
        figures: file name to a function that draws.
        folder: where files go.
        json: path for the JSON, or - for stdout.
    """
    from keelbench.cli.output import write_text

    text = as_json({"schema": SCHEMA, "study": study, "rows": list(rows), "details": details})
    if json is not None:
        write_text(text, json)
    if json != "-":
        print(table(rows, columns))
    write_text(text, str(folder / f"{study}.json"))
    write_text(as_csv(rows), str(folder / f"{study}.csv"))
    names = [f"{study}.json", f"{study}.csv"]
    for name, draw in figures.items():
        from keelbench.report.plots import save

        save(draw(), folder / name)
        names.append(f"{name}.png")
    note(f"wrote {', '.join(names)} to {folder}")


def as_json(values: Any) -> str:
    """JSON text; what is not finite is null."""
    import json

    return json.dumps(_plain(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def as_csv(rows: Sequence[Row]) -> str:
    import csv
    import io

    names = list(rows[0]) if rows else []
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Aligned text: names to the left, numbers to the right."""
    cells = [[_text(row, name) for name in columns] for row in rows]
    lines = [list(columns.values()), *cells]
    widths = [max(len(line[k]) for line in lines) for k in range(len(columns))]
    is_name = [all(isinstance(row[name], str) for row in rows) for name in columns]
    return "\n".join(
        "  ".join(
            f"{text:<{width}}" if left else f"{text:>{width}}"
            for text, width, left in zip(line, widths, is_name, strict=True)
        ).rstrip()
        for line in lines
    )


def _text(row: Row, name: str) -> str:
    digits = 5 if name.endswith("decay") else 4
    value = _number(row[name], digits)
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None:
        return value
    return f"{value} [{_number(low, digits)}, {_number(high, digits)}]"


def _number(value: Any, digits: int) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    return f"{value:.{digits}g}"


class StudyProgress:
    """Plain lines on stderr: what started, where it is, what ended."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self.printed: dict[int, float] = {}

    def __call__(self, event: "Event") -> None:
        from keelbench.launch import Progressed, Started, TaskEnded

        if self.is_quiet:
            return
        if isinstance(event, Started):
            note(f"{_label(event.task)}: started")
        elif isinstance(event, Progressed):
            now = time.monotonic()
            if now - self.printed.setdefault(event.task.id, now) >= PLAIN_SECONDS:
                self.printed[event.task.id] = now
                progress = event.progress
                note(f"{_label(event.task)}: step {progress.step} loss {progress.loss:.3f}")
        elif isinstance(event, TaskEnded):
            note(f"{_label(event.task)}: done")


def _label(task: Any) -> str:
    from keelbench.cli.progress import label

    lanes = len(task.seeds)
    return f"{label(task.cell)}, {lanes} {'lane' if lanes == 1 else 'lanes'}"


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C ends a study with exit code 130: unlike ramps, it keeps nothing half done."""
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted: nothing was written")
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
