"""The sections of a report that are made of text: settings, thresholds, environment, notes."""

import ast
import dataclasses
import html
import inspect
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from keelbench.divergence import DEFAULT_THRESHOLDS, DETECTOR_VERSION, Thresholds
from keelbench.records import Record
from keelbench.report.cells import group, setting_of
from keelbench.report.numbers import plain_value
from keelbench.report.results_json import environments
from keelbench.specs import FIELD_NAMES

READING = (
    "<b>Max LR</b> is the learning rate of the last step before a run starts to diverge, while "
    "it rises by the same amount at every step. The onset is backdated to where the excursion "
    "starts, not to where it is noticed.",
    "<b>It depends on the slope</b>, the batch, the data, the width and the precision: they "
    "stand below every table. Compare numbers only where these agree.",
    "<b>The value is the geometric mean over seeds</b>, the interval Student's t on its "
    "logarithm. It covers what changes with the seed, and nothing else. With fewer than three "
    "seeds no interval is claimed.",
    "<b>≥</b> means that some lanes reached the peak of the ramp in good health. Only a lower "
    "bound is known; it never enters a mean as if it were a value.",
    "<b>Normalized</b> is Max LR × width / 1024: what the number would be at width 1024, if "
    "learning rates scale as 1 / width.",
    "<b>One step of the ramp</b> is the finest difference that can be read. Where it is "
    "several per cent of Max LR, small differences mean nothing.",
    "<b>A ramp passes each learning rate once.</b> What can be held for long is lower: "
    "<code>ramp.protocol=hold</code> measures that.",
)


def section(title: str, *parts: str) -> str:
    """A heading and what stands below it."""
    return f"<section>\n<h2>{html.escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>\n"


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words, escaped, which may wrap; no header, no line for it."""
    cells = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in header)
    head = f"<thead><tr>{cells}</tr></thead>\n" if header else ""
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return (
        '<div class="scroll" tabindex="0"><table class="text">\n'
        f"{head}<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def bullets(items: Iterable[str]) -> str:
    """A list of sentences that may hold markup."""
    return "<ul>\n" + "\n".join(f"<li>{item}</li>" for item in items) + "\n</ul>"


def code_block(lines: Iterable[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def settings_tables(records: Sequence[Record]) -> str:
    """Every setting of the cells with all of its values, a table per part of the cell."""
    specs = [cell.spec for cell in group(records)]
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in FIELD_NAMES:
        values = list(dict.fromkeys(plain_value(setting_of(spec, name)) for spec in specs))
        part, _, last = name.rpartition(".")
        parts.setdefault(part or "machine", []).append((last, ", ".join(values)))
    tables = [
        f"<div><h3>{part}</h3>{text_table((), rows)}</div>" for part, rows in parts.items()
    ]
    return '<div class="parts">\n' + "\n".join(tables) + "\n</div>"


def thresholds_table() -> str:
    """The detector's thresholds, with the reason for each."""
    rows = [
        (name, plain_value(value), doc)
        for name, value, doc in documented_fields(DEFAULT_THRESHOLDS)
    ]
    return text_table(("threshold", "value", "unit and reason"), rows)


def detector_note(records: Sequence[Record]) -> str:
    """Which version judged, and whether the thresholds below are its own."""
    versions = sorted({record.detector for record in records})
    text = f"Judged by detector version {', '.join(versions)}."
    if versions != [DETECTOR_VERSION]:
        text += (
            f" The thresholds below are those of version {DETECTOR_VERSION}, with which this "
            "page was made."
        )
    return f"<p>{html.escape(text)}</p>"


def documented_fields(thresholds: Thresholds) -> list[tuple[str, Any, str]]:
    """Name, value and the text below each field in the source; empty if there is no source."""
    docs: dict[str, str] = {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(thresholds))))
    except (OSError, SyntaxError):
        tree = ast.Module(body=[], type_ignores=[])
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[field.target.id] = inspect.cleandoc(str(below.value.value)).replace("``", "")
    return [
        (
            field.name,
            getattr(thresholds, field.name),
            " ".join(docs.get(field.name, "").split()),
        )
        for field in dataclasses.fields(thresholds)
    ]


def environment_tables(records: Sequence[Record]) -> str:
    """Where the lanes ran: a table for each distinct environment."""
    tables = []
    found = environments(records)
    for values, count in found:
        extra = values.pop("extra", {})
        rows = [(name, plain_value(value)) for name, value in {**values, **extra}.items()]
        if len(found) > 1:
            tables.append(f"<h3>{count} lane{'s' if count != 1 else ''}</h3>")
        tables.append(text_table((), rows))
    return "\n".join(tables)
