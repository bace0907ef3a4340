"""Tables of results: one builder, five skins."""

import dataclasses
from collections.abc import Sequence
from enum import StrEnum

from keelbench.records import Record
from keelbench.report.results_json import lanes_json, results_json, to_text
from keelbench.report.summary import DEFAULT_REFERENCE
from keelbench.report.tables.cells_table import cells_table
from keelbench.report.tables.comparison_table import comparison_table
from keelbench.report.tables.data import csv_text
from keelbench.report.tables.lanes_table import lanes_table
from keelbench.report.tables.latex import latex
from keelbench.report.tables.markup import html_table, markdown
from keelbench.report.tables.paper import paper_tables
from keelbench.report.tables.table import Table
from keelbench.report.tables.terminal import terminal

__all__ = [
    "Skin",
    "cells_table",
    "comparison_table",
    "html_table",
    "lanes_table",
    "render",
    "render_comparison",
    "render_lanes",
]


class Skin(StrEnum):
    """How a table is written: the values of ``--format``."""

    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"
    LATEX = "latex"


def render(
    records: Sequence[Record],
    skin: Skin | str = Skin.TERMINAL,
    *,
    reference: str | None = DEFAULT_REFERENCE,
    width: int = 80,
    color: bool = False,
    encoding: str = "utf-8",
) -> str:
    """The main table, one row per cell; JSON in the schema of ``results_json``.

    ``width``, ``color`` and ``encoding`` concern the terminal alone.

    Raises:
        KeelbenchError: if there are no records.
    """
    if Skin(skin) is Skin.JSON:
        return to_text(results_json(records, reference=reference))
    return _dressed(cells_table(records, reference=reference), skin, width, color, encoding)


def render_lanes(
    records: Sequence[Record],
    skin: Skin | str = Skin.TERMINAL,
    *,
    width: int = 80,
    color: bool = False,
    encoding: str = "utf-8",
) -> str:
    """The second table, one row per lane.

    Raises:
        KeelbenchError: if there are no records.
    """
    if Skin(skin) is Skin.JSON:
        return to_text(lanes_json(records))
    return _dressed(lanes_table(records), skin, width, color, encoding)


def render_comparison(
    first: Sequence[Record],
    second: Sequence[Record],
    skin: Skin | str = Skin.TERMINAL,
    *,
    first_name: str = "baseline",
    second_name: str = "current",
    width: int = 80,
    color: bool = False,
    encoding: str = "utf-8",
) -> str:
    """Two sets of records side by side, one row per cell.

    Raises:
        KeelbenchError: if a set has no records.
    """
    table = comparison_table(first, second, first_name, second_name)
    if Skin(skin) is Skin.JSON:
        names = {"first": first_name, "second": second_name}
        return to_text({"schema": COMPARISON_SCHEMA, **names, "cells": list(table.rows)})
    return _dressed(table, skin, width, color, encoding)


def render_paper(
    records: Sequence[Record],
    skin: Skin | str = Skin.TERMINAL,
    *,
    width: int = 80,
    color: bool = False,
    encoding: str = "utf-8",
) -> str:
    """Our numbers beside Table 1 of arXiv 2601.19895, a table for each setting.

    Raises:
        KeelbenchError: if no record is of one of its cells.
    """
    tables = paper_tables(records)
    rows = tuple(row for table in tables for row in table.rows)
    match Skin(skin):
        case Skin.JSON:
            return to_text({"schema": PAPER_SCHEMA, "cells": list(rows)})
        case Skin.CSV:
            return csv_text(dataclasses.replace(tables[0], rows=rows))
    texts = [_dressed(table, skin, width, color, encoding).rstrip("\n") for table in tables]
    return "\n\n".join(texts) + "\n"


PAPER_SCHEMA = "keelbench.paper/1"

COMPARISON_SCHEMA = "keelbench.comparison/1"


def _dressed(table: Table, skin: Skin | str, width: int, color: bool, encoding: str) -> str:
    match Skin(skin):
        case Skin.MARKDOWN:
            return markdown(table)
        case Skin.CSV:
            return csv_text(table)
        case Skin.LATEX:
            return latex(table)
        case _:
            return terminal(table, width, color, encoding)
