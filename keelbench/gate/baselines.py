"""The folder of baselines: what is there, which one fits, how two differ."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.gate.baseline import Baseline, BaselineCell
from keelbench.gate.files import baseline_path, load
from keelbench.gate.matching import differing_settings
from keelbench.stats import paired_ratio

BASELINES_FOLDER = Path("results/baselines")


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineInfo:
    """One line of ``keelbench baseline list``."""

    path: Path
    name: str = ""
    sweep: str = ""
    hardware: str = ""
    detector: str = ""
    created: str = ""
    cells: int = 0
    lanes: int = 0
    problem: str | None = None
    """Why the file cannot be used; None if it can."""


def list_baselines(folder: Path | str = BASELINES_FOLDER) -> list[BaselineInfo]:
    """Every baseline in a folder by file name; one that cannot be read says why."""
    return [_info(path) for path in sorted(Path(folder).glob("*.json"))]


def _info(path: Path) -> BaselineInfo:
    try:
        baseline = load(path)
    except KeelbenchError as error:
        return BaselineInfo(path=path, problem=error.message)
    return BaselineInfo(
        path=path,
        name=baseline.name,
        sweep=baseline.sweep,
        hardware=baseline.hardware,
        detector=baseline.detector,
        created=baseline.created,
        cells=len(baseline.cells),
        lanes=sum(len(cell.lanes) for cell in baseline.cells),
    )


def find_baseline(
    name: str, hardware: str, folder: Path | str = BASELINES_FOLDER
) -> tuple[Path, Baseline]:
    """The baseline of a name for a hardware class, and where it is.

    Raises:
        KeelbenchError: with exit code 3: there is none of that name, or none for this
            hardware (then says for which there is one), or it cannot be read.
    """
    path = baseline_path(folder, name, hardware)
    if path.exists():
        return path, load(path)
    others = [info for info in list_baselines(folder) if info.name == name]
    if others:
        classes = ", ".join(info.hardware for info in others)
        message = f"baseline '{name}' has no numbers for {hardware}, only for {classes}"
    else:
        there = ", ".join(info.name for info in list_baselines(folder) if info.name)
        message = f"there is no baseline '{name}' in {folder}: there is {there or 'none'}"
    raise KeelbenchError(
        message,
        f"on this hardware, run: keelbench baseline save {name}",
        ExitCode.NO_BASELINE,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CellDifference:
    """How one cell differs between two baselines."""

    label: str
    status: str
    """same, changed, added or removed."""
    ratio: float | None = None
    """Geometric mean of the new Max LR over the old, paired by seed, up to the peak."""
    details: tuple[str, ...] = ()
    """One line per lane or calibration that differs."""


def diff(old: Baseline, new: Baseline) -> tuple[list[str], list[CellDifference]]:
    """What changed from one baseline to another: facts about the whole, then cell by cell."""
    heads = [
        f"{name}: {getattr(old, name)} -> {getattr(new, name)}"
        for name in ("sweep", "hardware", "detector")
        if getattr(old, name) != getattr(new, name)
    ]
    heads += [
        f"environment.{key}: {old.environment.get(key)} -> {new.environment.get(key)}"
        for key in sorted({*old.environment, *new.environment})
        if old.environment.get(key) != new.environment.get(key)
    ]
    return heads, _cell_differences(
        {cell.hash: cell for cell in old.cells}, {cell.hash: cell for cell in new.cells}
    )


def _cell_differences(
    old: Mapping[str, BaselineCell], new: Mapping[str, BaselineCell]
) -> list[CellDifference]:
    both = [_difference(old[key], new[key]) for key in old if key in new]
    removed = [old[key] for key in old if key not in new]
    found = []
    for cell in (new[key] for key in new if key not in old):
        near = next((one for one in removed if one.label == cell.label), None)
        settings = differing_settings(near.spec, cell.spec) if near else {}
        found.append(
            CellDifference(
                label=cell.label,
                status="added",
                details=tuple(f"{key}: {a} -> {b}" for key, (a, b) in settings.items()),
            )
        )
    gone = [CellDifference(label=cell.label, status="removed") for cell in removed]
    return [*both, *found, *gone]


def _difference(old: BaselineCell, new: BaselineCell) -> CellDifference:
    details = []
    for seed in sorted({*old.lanes, *new.lanes}):
        a, b = old.lanes.get(seed), new.lanes.get(seed)
        before, after = (a.outcome if a else "absent"), (b.outcome if b else "absent")
        if before != after:
            details.append(f"seed {seed}: {before} -> {after}")
        elif a and b and a.sha256 != b.sha256:
            details.append(f"seed {seed}: {after}, losses differ")
    if old.calibration != new.calibration:
        details.append(f"calibration: {old.calibration} -> {new.calibration}")
    mean = paired_ratio(_restricted(new), _restricted(old)).mean
    ratio = None if mean is None or math.isclose(mean, 1.0) else mean
    return CellDifference(
        label=new.label,
        status="changed" if details else "same",
        ratio=ratio if details else None,
        details=tuple(details),
    )


def _restricted(cell: BaselineCell) -> dict[int, float]:
    return {
        seed: lane.restricted
        for seed, lane in cell.lanes.items()
        if lane.restricted is not None
    }
