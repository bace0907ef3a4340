"""A gate report as JSON, Markdown, step summary, annotations and terminal text. Pure.

Nothing here writes or prints: the command line does.
"""

import io
from typing import Any

from keelbench.gate.reasons import percent, signed
from keelbench.gate.verdicts import CellReport, CellVerdict, GateReport, LanePair

CHECK_SCHEMA = "keelbench.check/1"

MAX_SUMMARY_BYTES = 1024 * 1024
"""GitHub rejects a step summary that is larger, and shows nothing of it."""

MAX_ANNOTATIONS = 10
"""GitHub shows no more errors per step."""

MARKS = {
    CellVerdict.REGRESSED: "✗",
    CellVerdict.DIFFERS: "✗",
    CellVerdict.FAILED: "✗",
    CellVerdict.MISSING: "✗",
    CellVerdict.NOT_COMPARABLE: "✗",
    CellVerdict.NEW: "✗",
    CellVerdict.INCONCLUSIVE: "?",
    CellVerdict.WITHIN_NOISE: "✓",
    CellVerdict.IMPROVED: "✓",
    CellVerdict.PASS: "✓",
}

COLORS = {"✗": "red", "?": "yellow", "✓": "green"}


def to_json(report: GateReport) -> dict[str, Any]:
    """Everything, every lane included, as plain values; schema ``keelbench.check/1``."""
    return {
        "schema": CHECK_SCHEMA,
        "verdict": report.verdict.value,
        "exit_code": int(report.exit_code),
        "mode": "exact" if report.is_exact else "statistical",
        "strict": report.is_strict,
        "baseline": report.baseline,
        "sweep": report.sweep,
        "hardware": report.hardware,
        "detector": report.detector,
        "looks": [
            {"seeds": look.seeds, "alpha": look.alpha, "tail": look.tail}
            for look in report.looks
        ],
        "notes": list(report.notes),
        "cells": [_cell_json(cell) for cell in report.cells],
    }


def _cell_json(cell: CellReport) -> dict[str, Any]:
    ratio = cell.ratio
    return {
        "label": cell.label,
        "hash": cell.spec.hash,
        "verdict": cell.verdict.value,
        "reason": cell.reason,
        "ratio": ratio and ratio.mean,
        "ratio_low": ratio and ratio.low,
        "ratio_high": ratio and ratio.high,
        "confidence": ratio and ratio.confidence,
        "pairs": ratio.n if ratio else len(cell.pairs),
        "p_value": cell.p_value,
        "margin": cell.margin,
        "quantum": cell.quantum,
        "settings": cell.spec.to_dict(),
        "lanes": [_pair_json(pair) for pair in cell.pairs],
    }


def _pair_json(pair: LanePair) -> dict[str, Any]:
    found: dict[str, Any] = {"seed": pair.seed, "kind": pair.kind.value}
    for side, lane in (("baseline", pair.baseline), ("current", pair.current)):
        found[side] = lane and {
            "verdict": lane.verdict.value,
            "rule": lane.rule and lane.rule.value,
            "max_lr": lane.max_lr,
            "lower_bound": lane.lower_bound,
            "onset_step": lane.onset_step,
            "steps": lane.steps,
            "reason": lane.reason,
            "sha256": lane.sha256,
        }
    return found


def rows(report: GateReport) -> list[dict[str, str]]:
    """One row per cell, worst first, as text: the table that every skin shows."""
    return [_row(cell) for cell in report.worst_first]


def _row(cell: CellReport) -> dict[str, str]:
    ratio = cell.ratio
    interval = "-"
    if ratio and ratio.low is not None and ratio.high is not None:
        interval = f"{signed(ratio.low)} to {signed(ratio.high)}"
    return {
        "": MARKS[cell.verdict],
        "cell": cell.label,
        "verdict": cell.verdict.value,
        "change": signed(ratio.mean) if ratio and ratio.mean is not None else "-",
        "interval": interval,
        "margin": "-" if cell.margin is None else percent(cell.margin),
        "seeds": str(len(cell.pairs)),
        "reason": cell.reason,
    }


def headline(report: GateReport) -> str:
    """``regressed: 1 of 6 cells (exit 1), against baseline 'ci' for cpu-x86_64``."""
    worst = sum(cell.verdict is report.verdict for cell in report.cells)
    cells = "cell" if len(report.cells) == 1 else "cells"
    return (
        f"{report.verdict.value}: {worst} of {len(report.cells)} {cells} "
        f"(exit {int(report.exit_code)}), against baseline '{report.baseline}' "
        f"for {report.hardware}"
    )


def to_markdown(report: GateReport, *, accept: str | None = None) -> str:
    """A report for a pull request.

    Args:
        accept: the command that makes the new numbers the baseline; shown unless all passed.
    """
    shown = [key for key in rows(report)[0] if key != "reason"]
    lines = [
        f"### {MARKS[report.verdict]} keelbench check: {headline(report)}",
        "",
        f"| {' | '.join(shown)} |",
        f"|{'---|' * len(shown)}",
    ]
    lines += [
        f"| {' | '.join(_escape_cell(row[key]) for key in shown)} |" for row in rows(report)
    ]
    lines += [
        "",
        *(f"- **{_escape(c.label)}**: {_escape(c.reason)}" for c in report.worst_first),
    ]
    if report.notes:
        lines += ["", *(f"> {_escape(note)}" for note in report.notes)]
    if accept and report.verdict not in (CellVerdict.PASS, CellVerdict.WITHIN_NOISE):
        lines += ["", "If the new numbers are meant, accept them with:", "", f"    {accept}"]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("\n", " ")


def _escape_cell(text: str) -> str:
    return _escape(text).replace("|", "\\|")


def to_step_summary(markdown: str, *, already: int = 0) -> str:
    """Markdown to append to ``$GITHUB_STEP_SUMMARY``, cut so that the file stays under 1 MiB.

    Args:
        already: bytes that the file holds now.
    """
    note = "\n\n*Cut here: a step summary holds 1 MiB. The JSON report has everything.*\n"
    room = MAX_SUMMARY_BYTES - 1 - already
    data = markdown.encode()
    if len(data) <= room:
        return markdown
    room -= len(note.encode())
    if room <= 0:
        return ""
    whole_lines = data[:room].decode(errors="ignore").rpartition("\n")[0]
    return whole_lines + note


def to_annotations(report: GateReport) -> list[str]:
    """GitHub ``::error`` lines for cells that fail the gate, worst first, at most 10."""
    failing = [cell for cell in report.worst_first if cell.exit_code in _failing_codes(report)]
    lines = [
        f"::error title={_property(f'{cell.label}: {cell.verdict.value}')}::"
        f"{_data(cell.reason)}"
        for cell in failing
    ]
    if len(lines) <= MAX_ANNOTATIONS:
        return lines
    rest = len(lines) - MAX_ANNOTATIONS + 1
    return [
        *lines[: MAX_ANNOTATIONS - 1],
        f"::error title=keelbench check::and {rest} more cells: see the report",
    ]


def _failing_codes(report: GateReport) -> set[int]:
    return {1, 3, 4, 5} if report.is_strict else {1, 3, 5}


def _data(text: str) -> str:
    """Escape the message of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape a property of a workflow command."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def to_terminal(
    report: GateReport, *, width: int = 100, color: bool = False, accept: str | None = None
) -> str:
    """A table, the reason of every cell that did not plainly pass, and the gate's verdict."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=io.StringIO(), width=width, force_terminal=color, no_color=not color)
    table = Table(box=None, pad_edge=False)
    for name in (name for name in rows(report)[0] if name != "reason"):
        table.add_column(name, no_wrap=name != "cell", overflow="fold")
    for row in rows(report):
        style = COLORS[row[""]]
        table.add_row(
            *(
                Text(text, style=style if key in ("", "verdict") else "")
                for key, text in row.items()
                if key != "reason"
            )
        )
    with console.capture() as capture:
        console.print(table)
        for cell in report.worst_first:
            if cell.verdict is not CellVerdict.PASS:
                console.print(Text(f"{cell.label}: {cell.reason}"))
        for note in report.notes:
            console.print(Text(f"note: {note}"))
        console.print(Text(headline(report), style=COLORS[MARKS[report.verdict]]))
        if accept and report.exit_code:
            console.print(Text(f"to accept the new numbers: {accept}"), soft_wrap=True)
    return capture.get()
