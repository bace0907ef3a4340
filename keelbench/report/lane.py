"""One lane as text: what ``keelbench show ID`` prints."""

import dataclasses
import os
import textwrap
from collections.abc import Mapping
from typing import Any

from keelbench.records import Record, VerdictKind
from keelbench.report.curve import sparkcurve
from keelbench.report.numbers import plain_value, scientific, seconds_text, short
from keelbench.report.results_json import lane_json
from keelbench.specs import PAPER_WIDTH
from keelbench.stats import quantum_of

LABEL_WIDTH = 11

GLUE = "\N{NO-BREAK SPACE}"
"""A blank at which lines are not broken; printed as any other."""


def render_lane(
    record: Record, *, width: int = 80, color: bool = False, encoding: str = "utf-8"
) -> str:
    """Verdict, Max LR, settings, environment and loss curve of one lane.

    ``color`` asks for a bold heading; the environment variable NO_COLOR overrules it.
    """
    model = record.cell.resolved().model
    title = (
        f"{model.arch}, depth {model.depth} ({model.blocks} blocks), width {model.width}, "
        f"seed {record.seed}"
    )
    fields = [
        ("record", record.id),
        ("verdict", _verdict(record)),
        ("reason", record.verdict.reason),
        ("Max LR", _max_lr(record)),
        ("ran", f"{record.trace.steps} steps in {seconds_text(record.seconds)}"),
        ("ended", record.created),
        *settings_of(record),
        ("environment", _environment(record)),
    ]
    lines = [
        f"\033[1m{title}\033[0m" if color and not os.environ.get("NO_COLOR") else title,
        "",
    ]
    for label, text in fields:
        if text:
            lines += _wrapped(label, str(text), width)
    curve = sparkcurve(
        record.trace,
        width,
        onset_step=record.verdict.onset_step,
        encoding=encoding,
    )
    kind = "train" if record.trace.probe is None else "probe"
    return "\n".join([*lines, "", f"{kind} loss (nats per token)", curve])


def lane_page_json(record: Record) -> dict[str, Any]:
    """One lane with its settings and environment as plain JSON values."""
    return {
        "arch": record.cell.model.arch,
        "depth": record.cell.model.depth,
        "width": record.cell.model.width,
        "detector": record.detector,
        **lane_json(record),
        "settings": record.cell.resolved().to_dict(),
        "environment": dataclasses.asdict(record.environment),
    }


def settings_of(record: Record) -> list[tuple[str, str]]:
    """The resolved settings as one line per part of the cell."""
    parts = record.cell.resolved().to_dict()
    lines = [(part, _listed(v)) for part, v in parts.items() if isinstance(v, dict)]
    rest = {name: value for name, value in parts.items() if not isinstance(value, dict)}
    return [*lines, ("machine", _listed(rest))]


def _verdict(record: Record) -> str:
    verdict = record.verdict
    kind = verdict.kind.replace("_", " ")
    if verdict.kind is not VerdictKind.DIVERGED:
        return kind
    noticed = f", noticed at step {verdict.detected_step}"
    return f"{kind} by {verdict.rule}, onset at step {verdict.onset_step}{noticed}"


def _max_lr(record: Record) -> str:
    width = record.cell.model.width
    value = record.max_lr if record.max_lr is not None else record.lower_bound
    if value is None:
        return "none"
    slope = record.cell.resolved().ramp.slope or 0.0
    quantum = quantum_of(record) * value or slope
    sign = "" if record.max_lr is not None else ">= "
    scale = width / PAPER_WIDTH
    normalized = scientific(value * scale, quantum=quantum * scale).plain
    return (
        f"{sign}{scientific(value, quantum=quantum).plain} at slope {short(slope)} per step; "
        f"normalized {sign}{normalized}"
    )


def _environment(record: Record) -> str:
    values = dataclasses.asdict(record.environment)
    extra = values.pop("extra")
    return _listed({**values, **extra})


def _listed(values: Mapping[str, Any]) -> str:
    """``batch 8, seq 64``, each name on one line with its value."""
    return ", ".join(f"{name}{GLUE}{plain_value(value)}" for name, value in values.items())


def _wrapped(label: str, text: str, width: int) -> list[str]:
    indent = " " * (LABEL_WIDTH + 2)
    lines = textwrap.wrap(
        text,
        max(width, LABEL_WIDTH + 20),
        initial_indent=f"{label:<{LABEL_WIDTH}}  ",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return [line.replace(GLUE, " ") for line in lines]
