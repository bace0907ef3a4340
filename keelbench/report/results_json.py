"""The stable JSON of results, documented in docs/results.md.

A value that does not exist is null, never 0 or NaN.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from keelbench.records import Record, Trace, Verdict, VerdictKind
from keelbench.report.cells import Cell, group
from keelbench.report.summary import DEFAULT_REFERENCE, Row, rows_of, summarise

RESULTS_SCHEMA = "keelbench.results/1"


def results_json(
    records: Sequence[Record], *, reference: str | None = DEFAULT_REFERENCE
) -> dict[str, Any]:
    """All results as plain JSON values, cells in the order of the summary.

    Raises:
        KeelbenchError: if there are no records.
    """
    cells = {(cell.id, cell.detector): cell for cell in group(records)}
    return {
        "schema": RESULTS_SCHEMA,
        "cells": [
            _cell_json(row, cells[row["cell"], row["detector"]])
            for row in rows_of(summarise(records, reference=reference))
        ],
        **_environments(records),
    }


def lanes_json(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every lane with the shape of its cell, in order of depth, width, architecture, seed.

    Raises:
        KeelbenchError: if there are no records.
    """
    return [
        {
            "cell": cell.id,
            "arch": cell.spec.model.arch,
            "depth": cell.spec.model.depth,
            "width": cell.spec.model.width,
            **lane_json(lane),
        }
        for cell in group(records)
        for lane in cell.lanes
    ]


def lane_json(record: Record) -> dict[str, Any]:
    """One lane: its seed, verdict, Max LR and cost."""
    return {
        "seed": record.seed,
        **verdict_json(record.trace, record.verdict, record.max_lr),
        "seconds": _finite(record.seconds),
        "id": record.id,
        "created": record.created or None,
    }


def verdict_json(trace: Trace, verdict: Verdict, max_lr: float | None) -> dict[str, Any]:
    """What can be said of any trace, wherever it comes from."""
    survived = verdict.kind is VerdictKind.SURVIVED and trace.steps > 0
    return {
        "verdict": str(verdict.kind),
        "rule": None if verdict.rule is None else str(verdict.rule),
        "onset_step": verdict.onset_step,
        "detected_step": verdict.detected_step,
        "max_lr": _finite(max_lr),
        "at_least": _finite(float(trace.lr[-1])) if survived and max_lr is None else None,
        "steps": trace.steps,
        "reason": verdict.reason,
    }


def to_text(values: Any) -> str:
    """JSON text, refusing NaN and infinity."""
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _cell_json(row: Row, cell: Cell) -> dict[str, Any]:
    return {
        **{name: row[name] for name in ("arch", "depth", "blocks", "width")},
        **{name: row[name] for name in ("slope", "peak", "batch", "seq", "data", "dtype")},
        **{name: row[name] for name in ("device", "protocol", "detector")},
        "seeds": [lane.seed for lane in cell.lanes],
        "max_lr": _estimate_json(row, "max_lr"),
        "normalized_max_lr": _estimate_json(row, "normalized"),
        "confidence": row["confidence"],
        "quantum_percent": row["quantum_percent"],
        "ratio": None if row["reference"] is None else _ratio_json(row),
        "rank": row["rank"],
        "lanes": [lane_json(lane) for lane in cell.lanes],
        "cell": cell.id,
        "settings": cell.spec.to_dict(),
    }


def _estimate_json(row: Row, name: str) -> dict[str, Any]:
    return {
        "mean": row[name],
        "low": row[f"{name}_low"],
        "high": row[f"{name}_high"],
        "n": row["n"],
        "censored": row["censored"],
    }


def _ratio_json(row: Row) -> dict[str, Any]:
    return {
        "reference": row["reference"],
        "mean": row["ratio"],
        "low": row["ratio_low"],
        "high": row["ratio_high"],
    }


def environments(records: Sequence[Record]) -> list[tuple[dict[str, Any], int]]:
    """Each distinct environment with its number of lanes, the most frequent first."""
    counts: dict[str, int] = {}
    for record in records:
        text = json.dumps(dataclasses.asdict(record.environment), sort_keys=True, default=str)
        counts[text] = counts.get(text, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(json.loads(text), count) for text, count in ordered]


def _environments(records: Sequence[Record]) -> dict[str, Any]:
    found = environments(records)
    return {
        "environment": found[0][0],
        "other_environments": [values for values, _ in found[1:]],
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
