"""The skins for documents: Markdown and HTML."""

import html
import re

from keelbench.report.summary import BEST, TIED, Row
from keelbench.report.tables.table import IN_CAPTION, PROSE, Column, Table

MARKDOWN_IMPORTANCE = 4
"""Less important columns would make a table in a README too wide to read."""


def markdown(table: Table) -> str:
    """A pipe table with its caption and notes as paragraphs below."""
    columns = [column for column in table.columns if column.importance <= MARKDOWN_IMPORTANCE]
    rows = [[_literal(column.text(row, PROSE)) for column in columns] for row in table.rows]
    for row, texts in zip(table.rows, rows, strict=True):
        if row.get("standing") == BEST:
            texts[:] = [
                _bold(text) if column.is_emphasised else text
                for text, column in zip(texts, columns, strict=True)
            ]
    header = [_literal(column.joined_header) for column in columns]
    widths = [max(3, *map(len, texts)) for texts in zip(header, *rows, strict=True)]
    rule = [
        "-" * (width - 1) + (":" if column.align == "right" else "-")
        for width, column in zip(widths, columns, strict=True)
    ]
    lines = [
        _line([_padded(*triple) for triple in zip(texts, widths, columns, strict=True)])
        for texts in (header, *rows)
    ]
    below = "\n\n".join(_literal(text) for text in (table.caption, *table.notes))
    return "\n".join([lines[0], _line(rule), *lines[1:], "", below]) + "\n"


def html_table(table: Table) -> str:
    """A <table> inside its own scrolling container, with caption and notes below."""
    columns = [column for column in table.columns if column.importance < IN_CAPTION]
    head = "".join(
        f'<th scope="col"{_align(column)}>{_header(column)}</th>' for column in columns
    )
    body, previous = [], None
    for row in table.rows:
        section = table.section(row)
        classes = [row["standing"]] if row.get("standing") in (BEST, TIED) else []
        classes += ["starts"] if previous not in (None, section) else []
        attribute = f' class="{" ".join(classes)}"' if classes else ""
        cells = "".join(f"<td{_align(column)}>{_cell(column, row)}</td>" for column in columns)
        body.append(f"<tr{attribute}>{cells}</tr>")
        previous = section
    below = "".join(
        f"<p>{html.escape(_typeset(text))}</p>" for text in (table.caption, *table.notes)
    )
    return (
        '<div class="scroll" tabindex="0"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody>\n"
        f'</table></div>\n<div class="below">{below}</div>\n'
    )


def _bold(text: str) -> str:
    """Bold, with the mark of the best row left outside."""
    name, mark, _ = text.partition(" \\*")
    return f"**{name}**{mark}"


def _cell(column: Column, row: Row) -> str:
    text = html.escape(column.text(row, PROSE))
    is_best = row.get("standing") == BEST and column.is_emphasised
    return f"<strong>{text}</strong>" if is_best else text


def _padded(text: str, width: int, column: Column) -> str:
    return text.rjust(width) if column.align == "right" else text.ljust(width)


def _line(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _literal(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_~|<>#])", r"\\\1", _typeset(text))


def _typeset(text: str) -> str:
    return text.replace(">=", "≥")


def _align(column: Column) -> str:
    return ' class="right"' if column.align == "right" else ""


def _header(column: Column) -> str:
    name, _, unit = column.header.partition("\n")
    second = f"<br><small>{html.escape(unit)}</small>" if unit else ""
    return html.escape(name) + second
