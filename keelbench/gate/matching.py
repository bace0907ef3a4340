"""Which cell of a baseline a current cell is to be compared with, and whether it may be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.gate.baseline import Baseline, BaselineCell
from keelbench.gate.lanes import Lane
from keelbench.registry import did_you_mean
from keelbench.specs import FIELD_NAMES, CellSpec, find_field

IDENTITY = ("model.arch", "model.depth")
"""What makes a cell another cell, and not the same one with other settings."""

HARDWARE = "hardware"
"""The one name in ``--allow`` that is not a setting of a cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """A cell of the baseline and its counterpart, either of which may be absent."""

    spec: CellSpec
    """The current cell's settings where there is one, else the baseline's."""
    baseline: BaselineCell | None
    current: Mapping[int, Lane] | None
    """Lanes by seed; None if the cell is in neither the results nor the sweep."""
    differing: tuple[str, ...] = ()
    """``dtype: float32 -> bfloat16`` for each setting that differs and is not allowed to."""


def allowed_fields(allow: Iterable[str]) -> frozenset[str]:
    """Dotted names for the keys that a user allows to differ.

    Raises:
        KeelbenchError: if a key names no setting, with the nearest name.
    """
    found = set()
    for key in allow:
        name = HARDWARE if key == HARDWARE else find_field(key)
        if name is None:
            short = [field.rpartition(".")[2] for field in FIELD_NAMES]
            near = did_you_mean(key, [HARDWARE, *FIELD_NAMES, *short])
            raise KeelbenchError(
                f"--allow {key} names no setting{near}",
                f"settings are {HARDWARE}, {', '.join(FIELD_NAMES)}",
            )
        found.add(name)
    if "device" in found:
        found.add(HARDWARE)
    return frozenset(found)


def check_compatible(
    baseline: Baseline, *, detector: str, hardware: str, allowed: frozenset[str] = frozenset()
) -> None:
    """Refuse numbers that were read off differently or on another class of machine.

    Raises:
        KeelbenchError: with exit code 3, and a message of its own for each case.
    """
    if detector != baseline.detector:
        raise KeelbenchError(
            f"baseline '{baseline.name}' was read by detector {baseline.detector}, "
            f"this version has detector {detector}: their numbers do not compare",
            "save the baseline again, with the code that it is to stand for",
            ExitCode.NO_BASELINE,
        )
    if hardware != baseline.hardware and HARDWARE not in allowed:
        raise KeelbenchError(
            f"baseline '{baseline.name}' is for {baseline.hardware}, "
            f"this machine is {hardware}",
            "save a baseline on this hardware, or compare across hardware with "
            f"--allow {HARDWARE}",
            ExitCode.NO_BASELINE,
        )


def match_cells(
    baseline: Baseline,
    current: Sequence[tuple[CellSpec, Mapping[int, Lane]]],
    allowed: frozenset[str],
) -> list[Match]:
    """Pair the cells: first those with equal settings, then the nearest of the same identity.

    What remains is new (only current) or missing (only in the baseline).
    """
    left = {cell.hash: cell for cell in baseline.cells}
    exact = {spec.hash: left.pop(spec.hash) for spec, _ in current if spec.hash in left}
    matches = []
    for spec, lanes in current:
        cell = exact.get(spec.hash) or _nearest(spec, left.values(), allowed)
        if cell is not None:
            left.pop(cell.hash, None)
        differing = differing_settings(cell.spec, spec) if cell else {}
        matches.append(
            Match(
                spec=spec.resolved(),
                baseline=cell,
                current=lanes,
                differing=tuple(
                    f"{name}: {a} -> {b}"
                    for name, (a, b) in differing.items()
                    if name not in allowed
                ),
            )
        )
    missing = [Match(spec=cell.spec, baseline=cell, current=None) for cell in left.values()]
    return [*matches, *missing]


def _nearest(
    spec: CellSpec, cells: Iterable[BaselineCell], allowed: frozenset[str]
) -> BaselineCell | None:
    best: tuple[int, BaselineCell] | None = None
    for cell in cells:
        differing = differing_settings(cell.spec, spec).keys() - allowed
        if any(name in differing for name in IDENTITY):
            continue
        if best is None or len(differing) < best[0]:
            best = (len(differing), cell)
    return best[1] if best else None


def differing_settings(old: CellSpec, new: CellSpec) -> dict[str, tuple[Any, Any]]:
    """Dotted name to both values, for every resolved setting in which two cells differ."""
    before, after = _flat(old), _flat(new)
    return {
        name: (before[name], after[name]) for name in FIELD_NAMES if before[name] != after[name]
    }


def _flat(cell: CellSpec) -> dict[str, Any]:
    values = cell.resolved().to_dict()
    found = {}
    for name in FIELD_NAMES:
        outer, _, inner = name.rpartition(".")
        found[name] = values[outer][inner] if outer else values[name]
    return found
