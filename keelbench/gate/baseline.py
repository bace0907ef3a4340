"""A baseline: the stability numbers that a project has agreed to keep.

One readable JSON per (sweep, hardware class), made to be committed and reviewed: every lane,
every setting, the environment, the detector's version and, if measured, the noise.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.gate.lanes import Lane, lanes_of
from keelbench.records import Environment, Record
from keelbench.specs import CellSpec

BASELINE_SCHEMA = "keelbench.baseline/1"

MAX_LOSSES = 200_000
"""Losses that a baseline carries at most (some 4 MB); beyond that only their checksums."""

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Other spellings of the same instruction set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How much the same code differs from itself in one cell, from repeats."""

    sd: float
    """Standard deviation of the per-seed log-ratio of Max LR between two repeats."""
    df: int
    """Degrees of freedom behind it."""
    margin: float
    """Smallest drop (relative) that the gate can tell from this noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineCell:
    """One cell of a baseline: its settings, and its lanes by seed."""

    spec: CellSpec
    lanes: Mapping[int, Lane]
    calibration: Calibration | None = None

    @property
    def hash(self) -> str:
        return self.spec.hash

    @property
    def label(self) -> str:
        return label_of(self.spec)

    def to_dict(self) -> dict[str, Any]:
        calibration = self.calibration and dataclasses.asdict(self.calibration)
        return {
            "label": self.label,
            "hash": self.hash,
            "settings": self.spec.resolved().to_dict(),
            "calibration": calibration,
            "lanes": [self.lanes[seed].to_dict() for seed in sorted(self.lanes)],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        lanes = [Lane.from_dict(lane) for lane in values["lanes"]]
        calibration = values.get("calibration")
        return cls(
            spec=CellSpec.from_dict(values["settings"]),
            lanes={lane.seed: lane for lane in lanes},
            calibration=Calibration(**calibration) if calibration else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What a check compares against."""

    name: str
    sweep: str
    hardware: str
    """Hardware class, see :func:`hardware_class`."""
    detector: str
    cells: tuple[BaselineCell, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that every cell has, in order: those that a check can pair."""
        shared = [set(cell.lanes) for cell in self.cells]
        return tuple(sorted(set.intersection(*shared))) if shared else ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": BASELINE_SCHEMA,
            "name": self.name,
            "sweep": self.sweep,
            "hardware": self.hardware,
            "detector": self.detector,
            "created": self.created,
            "environment": dict(self.environment),
            "cells": [cell.to_dict() for cell in self.cells],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(
            name=values["name"],
            sweep=values["sweep"],
            hardware=values["hardware"],
            detector=values["detector"],
            created=values.get("created", ""),
            environment=values.get("environment", {}),
            cells=tuple(BaselineCell.from_dict(cell) for cell in values["cells"]),
        )

    def only(self, hashes: Iterable[str]) -> "Baseline":
        """The same baseline with only the cells of these hashes."""
        wanted = set(hashes)
        return dataclasses.replace(
            self, cells=tuple(cell for cell in self.cells if cell.hash in wanted)
        )

    def calibrated(self, calibrations: Mapping[str, Calibration]) -> "Baseline":
        """The same baseline with the noise of the cells of these hashes filled in."""
        cells = tuple(
            dataclasses.replace(cell, calibration=calibrations.get(cell.hash, cell.calibration))
            for cell in self.cells
        )
        return dataclasses.replace(self, cells=cells)


def label_of(cell: CellSpec) -> str:
    """How tables and test cases name a cell: ``keel L64 w64``."""
    return f"{cell.model.arch} L{cell.model.depth} w{cell.model.width}"


def hardware_class(environment: Environment, device: str = "cpu") -> str:
    """Machines among which the statistical gate compares: ``cpu-x86_64``, ``cuda-nvidia-h100``.

    On a CPU it is the instruction set without its vector extension: hosted CI runners mix
    AVX2 and AVX-512 under one label, and what that changes is rounding, which the gate is
    made to tell from an effect. On a GPU it is the model's name.
    """
    if device == "cpu":
        known = re.search(r"x86_64|amd64|aarch64|arm64", environment.platform, re.IGNORECASE)
        machine = known[0].lower() if known else "unknown"
        return f"cpu-{MACHINES.get(machine, machine)}"
    return f"{device}-{slug(environment.device_name) or 'unknown'}"


def build_baseline(
    name: str, records: Sequence[Record], *, sweep: str = "", max_losses: int = MAX_LOSSES
) -> Baseline:
    """A baseline from the records of one sweep on one machine.

    Args:
        name: what ``check`` and people call it.
        records: every lane; all from one detector version and one hardware class.
        sweep: name of the sweep; by default that of the baseline.
        max_losses: losses to carry for ``--exact``; with more, only checksums are kept.

    Raises:
        KeelbenchError: if there are no records, if they do not belong together, or if no
            lane of a cell could be carried out.
    """
    measured = carried_out(records)
    if not measured:
        reason = next((r.verdict.reason for r in records if r.verdict.reason), "none was run")
        raise KeelbenchError(
            f"no results to make baseline '{name}' from: {reason}",
            "run the sweep first: keelbench baseline save NAME --sweep SWEEP",
            ExitCode.FAILED,
        )
    detector = _only("detector versions", {record.detector for record in measured})
    hardware = _only("hardware classes", {hardware_of(record) for record in measured})
    keep = sum(record.trace.steps for record in records) <= max_losses
    newest = max(measured, key=lambda record: record.created)
    environment = dataclasses.asdict(newest.environment)
    return Baseline(
        name=name,
        sweep=sweep or name,
        hardware=hardware,
        detector=detector,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment,
        cells=tuple(
            BaselineCell(spec=spec, lanes=_carried_out(spec, lanes))
            for spec, lanes in lanes_of(records, keep_losses=keep)
        ),
    )


def carried_out(records: Iterable[Record]) -> list[Record]:
    """Those that ran at least one step: the others know nothing of where they ran."""
    return [record for record in records if record.trace.steps]


def hardware_of(record: Record) -> str:
    """Hardware class of one record."""
    return hardware_class(record.environment, record.cell.device)


def _carried_out(spec: CellSpec, lanes: Mapping[int, Lane]) -> Mapping[int, Lane]:
    if any(lane.was_carried_out for lane in lanes.values()):
        return lanes
    reason = next(iter(lanes.values())).reason or "no step was run"
    raise KeelbenchError(
        f"every lane of {label_of(spec)} failed: {reason}",
        "a baseline needs runs that were carried out: repair the run, or drop the cell",
        ExitCode.FAILED,
    )


def _only(what: str, values: set[str]) -> str:
    if len(values) == 1:
        return values.pop()
    raise KeelbenchError(
        f"the records come from {len(values)} {what}: {', '.join(sorted(values))}",
        "a baseline holds one: choose a results folder with one, or run the sweep again",
    )


def slug(text: str) -> str:
    """Lower case, digits and hyphens: safe in a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
