"""Whole pages: one result, or two side by side."""

import html
from collections.abc import Sequence
from importlib.resources import files

from keelbench import __version__
from keelbench.records import Record
from keelbench.report.cells import Cell, group
from keelbench.report.html import figures
from keelbench.report.html.parts import (
    READING,
    bullets,
    code_block,
    detector_note,
    environment_tables,
    section,
    settings_tables,
    thresholds_table,
)
from keelbench.report.html.reproduce import commands
from keelbench.report.plots.inline import palette_css
from keelbench.report.summary import DEFAULT_REFERENCE
from keelbench.report.tables import cells_table, comparison_table, html_table, lanes_table

MANY_LANES = 12
"""A longer list of lanes is folded away."""


def render_html(
    records: Sequence[Record],
    *,
    title: str = "Maximum Tolerable LR",
    command: str | None = None,
    reference: str | None = DEFAULT_REFERENCE,
) -> str:
    """A page with tables, figures, settings, thresholds, environment and the command.

    Args:
        records: what to report.
        title: heading of the page, such as the name of the results folder.
        command: what made these results; worked out from the records if not given.
        reference: architecture that ratios refer to.

    Raises:
        KeelbenchError: if there are no records.
    """
    lines = [command] if command else commands(records)
    body = [
        _header(title, _subject(group(records))),
        section("Max LR", html_table(cells_table(records, reference=reference))),
        section("Figures", figures.all_figures(records)),
        section("How to read the number", bullets(READING)),
        section("Every seed", _lanes(records)),
        section("Settings", settings_tables(records)),
        section("Detector", detector_note(records), thresholds_table()),
        section("Environment", environment_tables(records)),
        section("Reproduce", code_block([f"pip install keelbench=={__version__}", *lines])),
    ]
    return _page(title, body)


def render_comparison(
    first: Sequence[Record],
    second: Sequence[Record],
    first_name: str = "A",
    second_name: str = "B",
) -> str:
    """A page that puts two results side by side.

    Raises:
        KeelbenchError: if a set has no records.
    """
    title = f"{first_name} and {second_name}"
    table = comparison_table(first, second, first_name, second_name)
    body = [
        _header(title, "Two results of keelbench side by side"),
        section("Max LR", html_table(table)),
        section("Figure", figures.comparison(first, second, first_name, second_name)),
        section("How to read the number", bullets(READING)),
    ]
    for name, records in ((first_name, first), (second_name, second)):
        body += [
            section(f"{name}: table", html_table(cells_table(records))),
            section(f"{name}: settings", settings_tables(records)),
            section(f"{name}: environment", environment_tables(records)),
            section(f"{name}: reproduce", code_block(commands(records))),
        ]
    body.append(section("Detector", detector_note([*first, *second]), thresholds_table()))
    return _page(title, body)


def _page(title: str, body: Sequence[str]) -> str:
    style = files("keelbench.report").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} – keelbench</title>\n"
        # An empty icon keeps browsers from asking a server for one.
        '<link rel="icon" href="data:,">\n'
        f"<style>\n{palette_css()}{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "</main>\n</body>\n</html>\n"
    )


def _header(title: str, subject: str) -> str:
    return (
        f"<header>\n<h1>{html.escape(title)}</h1>\n<p>{html.escape(subject)}</p>\n"
        f"<p>keelbench {__version__}</p>\n</header>\n"
    )


def _subject(cells: Sequence[Cell]) -> str:
    """``6 architectures, depths 64 and 512, 36 lanes, finished 2026-11-29``."""
    archs = len({cell.spec.model.arch for cell in cells})
    depths = sorted({cell.spec.model.depth for cell in cells})
    lanes = [lane for cell in cells for lane in cell.lanes]
    finished = max(lane.created for lane in lanes)[:10]
    parts = [
        f"{archs} architecture{'s' if archs > 1 else ''}",
        f"depth{'s' if len(depths) > 1 else ''} {', '.join(map(str, depths))}",
        f"{len(lanes)} lane{'s' if len(lanes) > 1 else ''}",
        *([f"finished {finished}"] if finished else []),
    ]
    return " · ".join(parts)


def _lanes(records: Sequence[Record]) -> str:
    table = html_table(lanes_table(records))
    if len(records) <= MANY_LANES:
        return table
    summary = f"<summary>{len(records)} lanes: verdict, rule, onset, Max LR</summary>"
    return f"<details>\n{summary}\n{table}</details>"
