"""The terminal skin: rich, as many columns as fit, nothing told by colour alone."""

import io
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from keelbench.report.summary import BEST
from keelbench.report.tables.table import PLAIN, Column, Table

GAP = 2
"""Blanks between two columns, one of which is the box's own."""

HEADING = "\ue000"
"""Keeps a place for a line of settings: a character that no name or number contains."""

WIDEST_NAME = 24
"""A longer architecture name, such as a path, is folded."""

ASCII = str.maketrans({"─": "-", "×": "x", "·": "|", "≥": ">", "–": "-", "α": "a"})
"""Stand-ins of the same width for terminals without UTF-8."""


def terminal(
    table: Table, width: int = 80, color: bool = False, encoding: str = "utf-8"
) -> str:
    """The table, its caption and notes as text, at most ``width`` wide.

    ``color`` asks for bold and dim text where the terminal has them; the environment
    variable NO_COLOR overrules it.
    """
    heads = headings(table, width)
    narrow = replace(table, columns=tuple(c for c in table.columns if c not in heads))
    columns = fitting(narrow, width)
    styled = color and not os.environ.get("NO_COLOR")
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=styled,
        color_system="standard" if styled else None,
        legacy_windows=False,
        highlight=False,
    )
    console.print(_rich_table(table, columns, width, heads))
    for line in _lines_below(table, width):
        console.print(Text(line, style="dim"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    lines = [_headed(line, table, heads, width) for line in text.splitlines()]
    return encodable("\n".join(lines).strip("\n") + "\n", encoding)


def encodable(text: str, encoding: str) -> str:
    """The text itself if the encoding can carry it, else with plain stand-ins."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(ASCII).encode("ascii", "replace").decode()
    return text


def headings(table: Table, width: int) -> list[Column]:
    """Settings to write above their rows, where a column for each would be too wide."""
    needed = sum(
        _width(table, column) + GAP for column in table.columns if not column.importance
    )
    if needed <= width + GAP:
        return []
    return [column for column in table.columns if column.heads and not column.importance]


def fitting(table: Table, width: int) -> list[Column]:
    """The columns that fit into ``width``, in their order: the important ones first."""
    chosen = {id(column) for column in table.columns if column.importance == 0}
    used = sum(_width(table, column) + GAP for column in table.columns if id(column) in chosen)
    for column in sorted(table.columns, key=lambda column: column.importance):
        if id(column) in chosen:
            continue
        needed = _width(table, column) + GAP
        if used + needed <= width + GAP:
            chosen.add(id(column))
            used += needed
    return [column for column in table.columns if id(column) in chosen]


def _width(table: Table, column: Column, broken: bool = True) -> int:
    texts = [column.text(row, PLAIN) for row in table.rows]
    if column.breaks and broken:
        texts = [f"{piece}," for text in texts for piece in text.split(", ")]
    widest = max(map(len, [*texts, *column.header.split("\n")]))
    return min(widest, WIDEST_NAME) if column.name == "arch" else widest


def _rich_table(
    table: Table, columns: Sequence[Column], width: int, heads: Sequence[Column]
) -> RichTable:
    natural = sum(_width(table, column, broken=False) + GAP for column in columns) - GAP
    breaking = natural > width
    result = RichTable(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0)
    )
    for column in columns:
        result.add_column(
            Text(column.header, style="bold"),
            justify=column.align,
            no_wrap=column.name != "arch",
            overflow="fold",
        )
    above: list[str] = []
    for number, (row, following) in enumerate(
        zip(table.rows, [*table.rows[1:], None], strict=True)
    ):
        setting = [column.text(row, PLAIN) for column in heads]
        if setting != above:
            result.add_row(Text(f"{HEADING}{number}"), style="dim")
            above = setting
        texts = [column.text(row, PLAIN) for column in columns]
        cells = [
            text.replace(", ", ",\n") if column.breaks and breaking else text
            for text, column in zip(texts, columns, strict=True)
        ]
        ends = following is not None and table.section(row) != table.section(following)
        style = "bold" if row.get("standing") == BEST else None
        result.add_row(*(Text(cell) for cell in cells), style=style, end_section=ends)
    return result


def _headed(line: str, table: Table, heads: Sequence[Column], width: int) -> str:
    """The line, or the settings of the row below it if it keeps a place for them."""
    before, found, rest = line.rstrip().partition(HEADING)
    if not found:
        return line.rstrip()
    number = re.match(r"\d+", rest)
    assert number is not None
    row = table.rows[int(number[0])]
    settings = (f"{c.name.rpartition('.')[2]} {c.text(row, PLAIN)}" for c in heads)
    text = textwrap.shorten(", ".join(settings), width, placeholder=" ...")
    return before + text + rest[number.end() :].rstrip()


def _lines_below(table: Table, width: int) -> list[str]:
    lines = [""]
    for text in (table.caption, *table.notes):
        lines += textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    return lines
