"""Records grouped into cells, and what distinguishes one cell from another."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keelbench.errors import KeelbenchError
from keelbench.parsing import content_hash
from keelbench.records import Record
from keelbench.specs import FIELD_NAMES, CellSpec

SHAPE = ("model.arch", "model.depth", "model.width")
"""Settings that every table shows anyway."""

BY_DEFAULT = "by default"
"""Stands for a setting that follows from the others, such as heads = width / 16."""


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """The lanes of one cell, ordered by seed, as judged by one version of the detector."""

    spec: CellSpec
    detector: str
    lanes: tuple[Record, ...]

    @property
    def id(self) -> str:
        return self.spec.hash

    @property
    def setting(self) -> str:
        """Hash of everything but the architecture: cells that share it can be ranked."""
        return self._hash_without("arch")

    @property
    def family(self) -> str:
        """Hash of everything but architecture and depth: a line in a plot against depth."""
        return self._hash_without("arch", "depth")

    def _hash_without(self, *names: str) -> str:
        values = self.spec.to_dict()
        values["model"] |= dict.fromkeys(names)
        return content_hash({"cell": values, "detector": self.detector})

    @property
    def quantum(self) -> float:
        """One ramp step: the LR distance between two readings."""
        return self.spec.ramp.slope or 0.0


def group(records: Iterable[Record]) -> list[Cell]:
    """Cells in order of depth, width and architecture; each record counts once.

    Raises:
        KeelbenchError: if there are no records.
    """
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        lanes = found.setdefault((record.cell.hash, record.detector), {})
        lanes[record.id] = record
    if not found:
        raise KeelbenchError(
            "there are no records to report",
            "run keelbench maxlr or keelbench compare first, or name another results folder",
        )
    cells = [
        Cell(
            spec=next(iter(lanes.values())).cell.resolved(),
            detector=detector,
            lanes=tuple(sorted(lanes.values(), key=lambda record: record.seed)),
        )
        for (_, detector), lanes in found.items()
    ]
    return sorted(cells, key=_order)


def varying_settings(specs: Sequence[CellSpec]) -> list[str]:
    """Dotted names of the settings, other than the shape, in which resolved cells differ.

    A setting that follows from the width in every cell (heads, slope, peak) does not count
    as varying, with one exception: the slope, without which a Max LR cannot be read.
    """
    written = [written_settings(spec) for spec in specs]
    names = [name for name in FIELD_NAMES if name not in SHAPE]
    varying = [name for name in names if len({str(values[name]) for values in written}) > 1]
    if "ramp.slope" not in varying and len({spec.ramp.slope for spec in specs}) > 1:
        varying.insert(0, "ramp.slope")
    return varying


def setting_of(spec: CellSpec, name: str) -> Any:
    """The value of a dotted setting."""
    outer, _, inner = name.rpartition(".")
    owner: Any = getattr(spec, outer) if outer else spec
    return getattr(owner, inner)


def written_settings(spec: CellSpec) -> dict[str, Any]:
    """Every dotted setting; ``BY_DEFAULT`` where it follows from the others."""
    return {
        name: BY_DEFAULT if _follows(spec, name) else setting_of(spec, name)
        for name in FIELD_NAMES
    }


def _follows(spec: CellSpec, name: str) -> bool:
    """True if leaving the setting out would give the same value."""
    if name not in _DERIVED:
        return False
    outer, _, inner = name.rpartition(".")
    part = dataclasses.replace(getattr(spec, outer), **{inner: None})
    resolved = dataclasses.replace(spec, **{outer: part}).resolved()
    return bool(setting_of(resolved, name) == setting_of(spec, name))


_DERIVED = (
    "model.heads",
    "model.kv_heads",
    "model.hidden",
    "model.init_std",
    "ramp.slope",
    "ramp.peak",
)
"""Settings whose default depends on other settings."""


def _order(cell: Cell) -> tuple[Any, ...]:
    model = cell.spec.model
    return (model.depth, model.width, model.arch, cell.id, cell.detector)
