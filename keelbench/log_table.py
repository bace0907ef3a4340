"""CSV and JSON lines as columns of cells: what a file says, before anyone asks what it means.

Only the columns that may matter are kept, so that a million rows or thousands of other columns
cost little.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from keelbench.errors import KeelbenchError
from keelbench.records import FloatArray, IntArray

EMPTY = {"", "null", "none"}
"""Cells without a value. ``nan`` is one: something that was computed and is not a number."""

PEEK = 1 << 16
"""Bytes that are looked at to tell text from binary, and JSON lines from CSV."""


@dataclass(slots=True, eq=False)
class Table:
    """The columns that may matter, as found: numbers or text, ``None`` where a row has none."""

    path: Path
    names: dict[str, None] = field(default_factory=dict)
    """Every column in the file, in order."""
    cells: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Per column that may matter: one cell for every row."""
    lines: list[int] = field(default_factory=list)
    """Line number in the file of every row."""
    notes: list[str] = field(default_factory=list)

    def numbers(self, name: str) -> tuple[IntArray, FloatArray]:
        """Rows that have a value in a column, and the values; NaN and infinity are values."""
        cells = self.cells[name]
        rows = [row for row, cell in enumerate(cells) if cell is not None and cell != ""]
        try:  # nothing but numbers: converted at once
            values = np.array([cells[row] for row in rows], dtype=np.float64)
        except (TypeError, ValueError):
            rows = [row for row in rows if str(cells[row]).strip().lower() not in EMPTY]
            values = np.array([self._number(name, row) for row in rows], dtype=np.float64)
        return np.array(rows, dtype=np.int64), values

    def _number(self, name: str, row: int) -> float:
        cell = self.cells[name][row]
        try:
            return float(cell)
        except (TypeError, ValueError):
            raise KeelbenchError(
                f"{self.path}, line {self.lines[row]}, column '{name}': {cell!r} is not a "
                "number",
                "allowed are numbers, nan, inf, and empty cells",
            ) from None

    def lacks(self, name: str, hint: str) -> KeelbenchError:
        """The error to raise where a column is missing."""
        shown = ", ".join(f"'{column}'" for column in [*self.names][:20])
        more = f" and {len(self.names) - 20} more" if len(self.names) > 20 else ""
        return KeelbenchError(f"{self.path} has no column '{name}': it has {shown}{more}", hint)


def read_table(path: Path, matters: Callable[[str], bool]) -> Table:
    """Read the columns for which ``matters(name)`` holds.

    Raises:
        KeelbenchError: if this is not a readable table with a header and rows.
    """
    if path.is_dir():
        raise KeelbenchError(f"{path} is a folder, not a log", "give the CSV or JSONL file")
    table = Table(path)
    try:
        with path.open("rb") as raw:
            if b"\0" in raw.read(PEEK):
                raise _not_text(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            start = file.read(PEEK).lstrip()
            file.seek(0)
            if start.startswith("["):
                raise KeelbenchError(
                    f"{path} is a JSON array", "write one object per line: jq -c '.[]' FILE"
                )
            if start.startswith("{"):
                _read_json_lines(table, file, matters)
            else:
                _read_csv(table, file, matters)
    except OSError as error:
        raise KeelbenchError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _not_text(path) from error
    if not table.lines:
        what = "has a header, but no rows" if table.names else "is empty"
        raise KeelbenchError(f"{path} {what}", "expected one row per step")
    return table


def _not_text(path: Path) -> KeelbenchError:
    return KeelbenchError(
        f"{path} is not a text file (UTF-8)", "export the log as CSV or JSON lines"
    )


def _read_csv(table: Table, file: TextIO, matters: Callable[[str], bool]) -> None:
    first = next((line for line in iter(file.readline, "") if line.strip()), "")
    file.seek(0)
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(file, delimiter=delimiter)
    try:
        header = next((row for row in reader if row), [])
        if header and all(_is_number(cell) for cell in header):
            raise KeelbenchError(
                f"{table.path} starts with numbers ({first.strip()[:60]}): it has no header",
                "put the column names into the first line, for example step,lr,loss",
            )
        table.names = dict.fromkeys(header)
        if len(table.names) < len(header):
            twice = next(name for name in table.names if header.count(name) > 1)
            raise KeelbenchError(f"{table.path} has two columns named '{twice}'")
        _read_csv_rows(table, reader, header, matters)
    except csv.Error as error:
        raise KeelbenchError(f"{table.path}, line {reader.line_num}: {error}") from error


def _read_csv_rows(
    table: Table, reader: Any, header: list[str], matters: Callable[[str], bool]
) -> None:
    useful = [(at, name) for at, name in enumerate(header) if matters(name)]
    columns: dict[str, list[str]] = {name: [] for _, name in useful}
    append = [(at, columns[name].append) for at, name in useful]
    short = 0
    for row in reader:
        if not row or row == header:  # a blank line; a header repeated by a resumed run
            continue
        if short:
            raise KeelbenchError(
                f"{table.path}, line {short}: fewer values than the {len(header)} columns",
                "a log may end in the middle of a line, but not go on after it",
            )
        if len(row) < len(header):
            short = reader.line_num
            continue
        for at, append_to_column in append:
            append_to_column(row[at])
        table.lines.append(reader.line_num)
    if short:
        table.notes.append(f"line {short} is cut off: left out")
    table.cells.update(columns)


def _read_json_lines(table: Table, file: TextIO, matters: Callable[[str], bool]) -> None:
    useful: dict[str, None] = {}
    found: list[dict[str, Any]] = []
    broken: tuple[int, str] | None = None
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        if broken:
            raise KeelbenchError(
                f"{table.path}, line {broken[0]}: not JSON ({broken[1]})",
                "expected one object per line",
            )
        try:
            values = json.loads(line)
        except ValueError as error:
            broken = number, str(error)
            continue
        if not isinstance(values, dict):
            raise KeelbenchError(
                f"{table.path}, line {number}: {line.strip()[:60]} is not an object",
                'expected lines such as {"step": 0, "lr": 1e-5, "loss": 4.8}',
            )
        for name in values:
            if name not in table.names:
                table.names[name] = None
                if matters(name):
                    useful[name] = None
        found.append({name: values[name] for name in useful if name in values})
        table.lines.append(number)
    if broken:
        table.notes.append(f"line {broken[0]} is cut off: left out")
    table.cells = {name: [row.get(name) for row in found] for name in useful}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
