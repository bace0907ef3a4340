"""What a study leaves: a table or JSON on stdout, files in its folder, progress on stderr."""

import contextlib
import math
import textwrap
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
    from keelbench.sweep_spec import SweepSpec

SCHEMA = "keelbench.study/1"

PLAIN_SECONDS = 10.0
"""Seconds between two progress lines of one task."""

SETTINGS = {"width": "width {}", "step": "step {}", "steps": "{} steps", "lr": "peak LR {}"}
"""Columns that move below the table if all rows agree, and how they are said there."""

RATES = ("lr", "best_lr", "max_lr", "normalized")
"""Fields that are learning rates: written with an exponent."""

Row = dict[str, Any]


def publish(
    study: str,
    rows: Sequence[Row],
    details: Any,
    columns: Mapping[str, str],
    figures: Mapping[str, Callable[[], "Figure"]],
    *,
    sweep: "SweepSpec",
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
        sweep: what was asked; its settings stand below the table.
        folder: where files go.
        json: path for the JSON, or - for stdout.
    """
    from keelbench.cli.output import terminal_width, write_text

    text = as_json({"schema": SCHEMA, "study": study, "rows": list(rows), "details": details})
    if json is not None:
        write_text(text, json)
    if json != "-":
        width = terminal_width()
        print(table(rows, columns, width))
        print("\n".join(["", *textwrap.wrap(caption(rows, columns, sweep), width)]))
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


def table(rows: Sequence[Row], columns: Mapping[str, str], width: int = 80) -> str:
    """Aligned text: names to the left, numbers to the right.

    What all rows share is left to the caption. Where the table would be wider than
    ``width``, intervals stand below their values.
    """
    shown = [name for name in columns if name not in _shared(rows, columns)]
    cells = [[_cell(row, name) for name in shown] for row in rows]
    lines = [[" ".join(filter(None, cell)) for cell in line] for line in cells]
    header = [columns[name] for name in shown]
    is_name = [all(isinstance(row[name], str) for row in rows) for name in shown]
    text = _aligned([header, *lines], is_name)
    if max(map(len, text.splitlines())) <= width:
        return text
    folded = [line for row in cells for line in zip(*row, strict=True) if any(line)]
    return _aligned([header, *folded], is_name)


def _aligned(lines: Sequence[Sequence[str]], is_name: Sequence[bool]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            f"{text:<{width}}" if left else f"{text:>{width}}"
            for text, width, left in zip(line, widths, is_name, strict=True)
        ).rstrip()
        for line in lines
    )


def caption(rows: Sequence[Row], columns: Mapping[str, str], sweep: "SweepSpec") -> str:
    """The settings that the numbers travel with, on one line."""
    from keelbench.report.numbers import plain_value, seeds_text, short

    cells = sweep.cells
    data = dict.fromkeys(cell.data.source for cell in cells)
    batches = dict.fromkeys(f"{cell.data.batch} × {cell.data.seq} tokens" for cell in cells)
    shared = _shared(rows, columns)
    parts = [SETTINGS[name].format(plain_value(value)) for name, value in shared.items()]
    if "max_lr" in columns:
        slopes = sorted({cell.resolved().ramp.slope or 0.0 for cell in cells})
        parts.append(f"slope {' / '.join(map(short, slopes))} LR/step")
    parts += [f"batch {' / '.join(batches)}", f"data {' / '.join(data)}"]
    parts += [
        f"{cells[0].dtype} on {cells[0].device}",
        seeds_text(sweep.seeds),
    ]
    if any(f"{name}_low" in row for row in rows for name in columns):
        few = len(sweep.seeds) < 3
        parts.append("no interval below 3 seeds" if few else "[95 % interval over seeds]")
    return " · ".join(parts)


def _shared(rows: Sequence[Row], columns: Mapping[str, str]) -> Row:
    """Settings that have a column and the same value in every row."""
    return {
        name: rows[0][name]
        for name in SETTINGS
        if name in columns and rows and len({row[name] for row in rows}) == 1
    }


def _cell(row: Row, name: str) -> tuple[str, str]:
    """A value and its interval, each as text; the interval may be empty."""
    value, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
    if name in RATES:
        return _rate(value, low, high)
    if not isinstance(value, float) or low is None or high is None:
        return _number(value, 5 if name.endswith("decay") else 4), ""
    places = _places(high - low)
    return f"{value:.{places}f}", f"[{low:.{places}f}, {high:.{places}f}]"


def _rate(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    from keelbench.report.numbers import lr_text, scientific

    if value is None:  # a run that reached its peak in good health tells a lower bound only
        return ("-" if low is None else f">= {lr_text(low)}"), ""
    if low is None or high is None:
        return lr_text(value), ""
    number = scientific(value, low, high)
    return number.plain, number.interval


def _places(span: float) -> int:
    """Decimals that give an interval two significant digits, and four at most."""
    return 4 if span <= 0 else max(0, min(4, 1 - math.floor(math.log10(span))))


def _number(value: Any, digits: int) -> str:
    from keelbench.report.numbers import short

    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        return short(value)
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
