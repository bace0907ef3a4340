"""The command that repeats a set of results, worked out from the records."""

import shlex
from collections.abc import Sequence
from typing import Any

from keelbench.records import Record
from keelbench.report.cells import SHAPE, Cell, group, setting_of
from keelbench.specs import FIELD_NAMES, CellSpec, ModelSpec


def commands(records: Sequence[Record]) -> list[str]:
    """One ``keelbench compare`` per set of cells that a grid of options can express.

    Raises:
        KeelbenchError: if there are no records.
    """
    sets: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in group(records):
        key = (tuple(_overrides(cell.spec)), tuple(lane.seed for lane in cell.lanes))
        sets.setdefault(key, []).append(cell)
    found = []
    for (overrides, seeds), cells in sets.items():
        for part in _grids(cells):
            found.append(_command(part, overrides, seeds))
    return found


def _overrides(spec: CellSpec) -> list[str]:
    """``key=value`` for every setting that differs from what the shape alone would give."""
    model = spec.model
    plain = CellSpec(
        model=ModelSpec(arch=model.arch, depth=model.depth, width=model.width)
    ).resolved()
    return [
        f"{name}={_text(setting_of(spec, name))}"
        for name in FIELD_NAMES
        if name not in SHAPE and setting_of(spec, name) != setting_of(plain, name)
    ]


def _grids(cells: Sequence[Cell]) -> list[list[Cell]]:
    """All cells at once if they are a full grid of arch, depth and width, else by shape."""
    models = [cell.spec.model for cell in cells]
    sizes = [len({getattr(model, name) for model in models}) for name in _AXES]
    if len(cells) == sizes[0] * sizes[1] * sizes[2]:
        return [list(cells)]
    by_shape: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        by_shape.setdefault((cell.spec.model.depth, cell.spec.model.width), []).append(cell)
    return list(by_shape.values())


_AXES = ("arch", "depth", "width")


def _command(cells: Sequence[Cell], overrides: Sequence[str], seeds: Sequence[int]) -> str:
    models = [cell.spec.model for cell in cells]
    options = [
        f"--{name} {shlex.quote(','.join(str(value) for value in _distinct(models, name)))}"
        for name in _AXES
    ]
    counted = list(seeds) == list(range(len(seeds)))
    seed_option = f"--seeds {len(seeds) if counted else _listed(seeds)}"
    return " ".join(["keelbench compare", *options, seed_option, *map(shlex.quote, overrides)])


def _distinct(models: Sequence[ModelSpec], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(model, name) for model in models))


def _listed(seeds: Sequence[int]) -> str:
    """A list that cannot be taken for a count: ``5,`` and not ``5``."""
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
