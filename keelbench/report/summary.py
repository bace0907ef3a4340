"""The tidy summary: one DataFrame row per cell, from which every output is made.

Units: LRs are plain numbers, ``*_percent`` per cent, ``seconds`` seconds. A value that does
not exist is missing (NaN or None), never 0.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from keelbench.records import Record, VerdictKind
from keelbench.report.cells import Cell, group, setting_of, varying_settings
from keelbench.specs import PAPER_WIDTH
from keelbench.stats import Estimate, estimate_records, mean_quantum, paired_ratio

Row = Mapping[str, Any]
"""One row of the summary, missing values as None."""

DEFAULT_REFERENCE = "pre_ln"
"""The architecture that ratios refer to: what most models are built with."""

BEST, TIED = "best", "tied"
"""Standing of the highest Max LR in a setting, and of those not distinguishable from it."""


def summarise(
    records: Iterable[Record], *, reference: str | None = DEFAULT_REFERENCE
) -> pd.DataFrame:
    """One row per cell, ordered by depth, width, setting and falling Max LR.

    ``max_lr`` is the geometric mean over the seeds that diverged, with its interval in
    ``max_lr_low`` and ``max_lr_high``. If any lane survived its ramp (``censored``), only
    ``max_lr_low`` is given: a lower bound, to be written as ">=". ``ratio`` compares with
    the ``reference`` architecture in the same setting, paired by seed. Settings in which
    the cells differ, beyond architecture, depth and width, are columns under their dotted
    names. ``rank`` and ``standing`` are within one setting: cells of equal everything but
    architecture.

    Raises:
        KeelbenchError: if there are no records.
    """
    cells = group(records)
    varying = varying_settings([cell.spec for cell in cells])
    rows = [_row(cell, cells, reference, varying) for cell in cells]
    by_setting: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_setting.setdefault(row["setting"], []).append(row)
    for setting, members in by_setting.items():
        _rank(members, {cell.id: cell for cell in cells if cell.setting == setting})
    rows.sort(key=lambda row: (*_place(row, varying), row["rank"]))
    frame = pd.DataFrame(rows)
    return frame.astype(dict.fromkeys(FLOATS, float))


FLOATS = (
    "max_lr",
    "max_lr_low",
    "max_lr_high",
    "normalized",
    "normalized_low",
    "normalized_high",
    "ratio",
    "ratio_low",
    "ratio_high",
    "quantum_percent",
    "confidence",
)
"""Columns that hold a number or nothing."""


WITHOUT_VALUE = (VerdictKind.NEVER_LEARNED, VerdictKind.FAILED)
"""Verdicts that leave neither a Max LR nor a bound on it."""


def rows_of(summary: pd.DataFrame) -> list[Row]:
    """The rows as plain mappings, with None for every missing value."""
    return [
        {str(key): None if _is_missing(value) else value for key, value in row.items()}
        for row in summary.to_dict("records")
    ]


def _row(
    cell: Cell, cells: list[Cell], reference: str | None, varying: list[str]
) -> dict[str, Any]:
    spec = cell.spec
    result = estimate_records(cell.lanes)
    return {
        "arch": spec.model.arch,
        "depth": spec.model.depth,
        "blocks": spec.model.blocks,
        "width": spec.model.width,
        **{name: setting_of(spec, name) for name in varying},
        "n": result.n,
        "censored": result.censored,
        **_estimate_fields("max_lr", result, 1.0),
        **_estimate_fields("normalized", result, spec.model.width / PAPER_WIDTH),
        "confidence": result.confidence,
        **_ratio_fields(cell, cells, reference),
        "quantum_percent": 100 * mean_quantum(cell.lanes) or None,
        **_verdict_fields(cell),
        **_settings_fields(cell),
        "steps": sum(lane.trace.steps for lane in cell.lanes),
        "seconds": sum(lane.seconds for lane in cell.lanes),
        "cell": cell.id,
        "setting": cell.setting,
    }


def _settings_fields(cell: Cell) -> dict[str, Any]:
    """What a published number must travel with."""
    spec = cell.spec
    return {
        "slope": spec.ramp.slope,
        "peak": spec.ramp.peak,
        "batch": spec.data.batch,
        "seq": spec.data.seq,
        "data": spec.data.source,
        "dtype": spec.dtype,
        "device": spec.device,
        "protocol": spec.ramp.protocol,
        "detector": cell.detector,
        "seeds": " ".join(str(lane.seed) for lane in cell.lanes),
    }


def _verdict_fields(cell: Cell) -> dict[str, Any]:
    kinds = Counter(lane.verdict.kind for lane in cell.lanes)
    rules = Counter(lane.verdict.rule for lane in cell.lanes if lane.verdict.rule)
    return {
        "lanes": len(cell.lanes),
        **{str(kind): kinds[kind] for kind in VerdictKind},
        "rules": ", ".join(f"{count} {rule}" for rule, count in rules.most_common()),
        "reason": "; ".join(_reasons(cell)) or None,
    }


def _reasons(cell: Cell) -> list[str]:
    """Why lanes have neither a value nor a bound: the first clause, each reason once."""
    reasons = (
        (lane.verdict.reason or "").partition(";")[0]
        for lane in cell.lanes
        if lane.verdict.kind in WITHOUT_VALUE
    )
    return [reason for reason in dict.fromkeys(reasons) if reason][:2]


def _estimate_fields(name: str, result: Estimate, scale: float) -> dict[str, Any]:
    values = {"": result.mean, "_low": result.low, "_high": result.high}
    return {
        name + end: None if value is None else value * scale for end, value in values.items()
    }


def _ratio_fields(cell: Cell, cells: list[Cell], reference: str | None) -> dict[str, Any]:
    """The paired ratio to the reference; nothing if a lane of either is censored."""
    fields: dict[str, Any] = {"reference": None}
    found = next(
        (
            other
            for other in cells
            if other.spec.model.arch == reference and other.setting == cell.setting
        ),
        None,
    )
    ratio = None
    if found is not None:
        fields["reference"] = reference
        if found is not cell:
            ratio = ratio_of(cell, found)
    for end in ("mean", "low", "high"):
        name = "ratio" if end == "mean" else f"ratio_{end}"
        fields[name] = getattr(ratio, end) if ratio is not None else None
    return fields


def ratio_of(cell: Cell, other: Cell) -> Estimate | None:
    """Max LR of one cell over that of another, paired by seed; None if a lane survived."""
    if any(lane.max_lr is None and lane.is_censored for lane in (*cell.lanes, *other.lanes)):
        return None
    quantum = max(mean_quantum(cell.lanes), mean_quantum(other.lanes))
    return paired_ratio(_values(cell), _values(other), quantum=quantum)


def _rank(rows: list[dict[str, Any]], cells: Mapping[str, Cell]) -> None:
    """Add ``rank`` and ``standing`` to the rows of one setting.

    There is no best row while a survivor could still be higher than it.
    """
    rows.sort(key=lambda row: (-(_height(row) or 0.0), row["arch"]))
    for position, row in enumerate(rows, start=1):
        row["rank"] = position
        row["standing"] = ""
    best, others = rows[0], rows[1:]
    if not others or not _height(best) or any(row["censored"] for row in others):
        return
    best["standing"] = BEST
    for row in others:
        ratio = ratio_of(cells[row["cell"]], cells[best["cell"]])
        if ratio is not None and ratio.high is not None and ratio.high >= 1:
            row["standing"] = TIED


def _place(row: Row, varying: list[str]) -> tuple[Any, ...]:
    """Order of settings: depth, width, then whatever varies, numbers before words."""
    values = (row[name] for name in varying)
    return (
        row["depth"],
        row["width"],
        *((isinstance(value, str), value or 0) for value in values),
        row["setting"],
    )


def _height(row: Row) -> float | None:
    height: float | None = row["max_lr"] if row["max_lr"] is not None else row["max_lr_low"]
    return height


def _values(cell: Cell) -> dict[int, float]:
    return {lane.seed: lane.max_lr for lane in cell.lanes if lane.max_lr is not None}


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NaT or (isinstance(value, float) and value != value)
