"""Sweeps: YAML in, cells out. Strict keys, every problem reported at once."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from keelbench.archs import canonical_name
from keelbench.errors import KeelbenchError
from keelbench.parsing import raise_problems
from keelbench.registry import did_you_mean
from keelbench.specs import FIELD_NAMES, CellSpec, find_field

SWEEP_KEYS = ("name", "seeds", "reference", "defaults", "matrix", "vary", "cells")


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """Cells and seeds: what ``keelbench compare`` runs."""

    name: str
    cells: tuple[CellSpec, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    reference: str | None = "pre_ln"
    """Architecture that ratios are taken to; None for no ratios."""
    source: str = field(default="", compare=False)
    """The YAML file, if there was one."""


def load_sweep(path: Path, overrides: dict[str, Any] | None = None) -> SweepSpec:
    """Read and expand a sweep file.

    ``matrix`` maps settings to lists and expands to their product; ``vary`` maps settings to
    lists too, and changes one of them at a time in every cell of the matrix, beside the
    unchanged cell; ``cells`` lists cells one by one; ``defaults`` holds for all. Overrides win
    over everything in the file.

    Raises:
        KeelbenchError: if the file is missing or not YAML, or with every problem in it.
    """
    return build_sweep(load_values(path), overrides or {}, source=str(path))


def load_values(path: Path) -> dict[str, Any]:
    """The plain values of a sweep file, named after the file unless it says otherwise."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeelbenchError(f"cannot read sweep {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KeelbenchError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise KeelbenchError(
            f"{path} must be a mapping with some of {', '.join(SWEEP_KEYS)}, got {values!r}"
        )
    return {"name": path.stem, **values}


def build_sweep(
    values: dict[str, Any],
    overrides: dict[str, Any],
    axes: dict[str, list[Any]] | None = None,
    source: str = "",
) -> SweepSpec:
    """Expand a sweep given as plain values; see ``load_sweep``.

    ``axes`` (full names, lists of values) take the place of the matrix's. Listed cells that
    name such a setting are restricted to these values, others are repeated for each of them.
    """
    axes = axes or {}
    where = f"{source}: " if source else ""
    problems: list[str] = []
    for key in values:
        if key not in SWEEP_KEYS:
            near = did_you_mean(str(key), SWEEP_KEYS)
            problems.append(f"unknown key '{key}'{near}: allowed are {', '.join(SWEEP_KEYS)}")
    defaults = _settings(values.get("defaults") or {}, "defaults", problems)
    forced = _settings(overrides, "overrides", problems)
    listed = _listed_rows(values.get("cells") or [], problems)
    has_rows = bool(values.get("matrix") or values.get("vary"))
    matrix = _matrix_rows(values, axes if has_rows or not listed else {}, problems)
    listed = _on_axes(listed, axes, [] if has_rows else problems)
    changes = _single_changes(values.get("vary") or {}, problems)
    varied = [row | change for change, row in itertools.product(changes, matrix)]
    settings = [{**defaults, **row, **forced} for row in [*varied, *listed]]
    settings = settings or [{**defaults, **forced}]
    seeds = parse_seeds(values.get("seeds", 3), problems)
    cells = _cells(settings, problems)
    reference = values.get("reference", "pre_ln")
    raise_problems([where + problem for problem in problems])
    return SweepSpec(
        name=str(values.get("name") or "sweep"),
        cells=tuple(dict.fromkeys(cells)),
        seeds=seeds,
        reference=None if reference in (None, "none") else str(reference),
        source=source,
    )


def parse_seeds(value: Any, problems: list[str]) -> tuple[int, ...]:
    """``3`` means seeds 0, 1, 2; a list names them."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return tuple(range(value))
    if isinstance(value, list | tuple) and value and all(_is_seed(seed) for seed in value):
        return tuple(dict.fromkeys(value))
    problems.append(f"seeds is {value!r}: give a number >= 1 or a list of seeds >= 0")
    return (0,)


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _settings(values: Any, where: str, problems: list[str]) -> dict[str, Any]:
    """Settings under their full dotted names: ``slope`` becomes ``ramp.slope``."""
    if not isinstance(values, dict):
        problems.append(f"{where} must be a mapping of settings, got {values!r}")
        return {}
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = find_field(str(key))
        if name is None:
            short = [field_name.rpartition(".")[2] for field_name in FIELD_NAMES]
            near = did_you_mean(str(key), [*FIELD_NAMES, *short])
            problems.append(f"{where}: unknown setting '{key}'{near}")
        else:
            named[name] = value
    return named


def _matrix_rows(
    values: dict[str, Any], axes: dict[str, list[Any]], problems: list[str]
) -> list[dict[str, Any]]:
    lists = _lists(values.get("matrix") or {}, "matrix", problems) | axes
    if not lists and not values.get("vary"):
        return []
    return [dict(zip(lists, row, strict=True)) for row in itertools.product(*lists.values())]


def _on_axes(
    rows: list[dict[str, Any]], axes: dict[str, list[Any]], problems: list[str]
) -> list[dict[str, Any]]:
    """Listed cells along axes; a value that no listed cell has is a problem."""
    for key, choices in axes.items():
        listed = dict.fromkeys(_plain(key, row[key]) for row in rows if key in row)
        is_named = bool(rows) and all(key in row for row in rows)
        option = key.rpartition(".")[2]
        problems += [
            f"no listed cell has {option} {choice}: they have {', '.join(listed)}"
            for choice in choices
            if is_named and _plain(key, choice) not in listed
        ]
        wanted = {_plain(key, choice) for choice in choices}
        chosen: list[dict[str, Any]] = []
        for row in rows:
            if key not in row:
                chosen += [row | {key: choice} for choice in choices]
            elif _plain(key, row[key]) in wanted:
                chosen.append(row)
        rows = chosen
    return rows


def _plain(key: str, value: Any) -> str:
    """A setting's value as text, an architecture with its parameters in order."""
    if key != "model.arch":
        return str(value)
    try:
        return canonical_name(value)
    except (KeelbenchError, AttributeError, TypeError):
        return str(value)


def _single_changes(vary: Any, problems: list[str]) -> list[dict[str, Any]]:
    """No change, and then each value of each setting alone."""
    axes = _lists(vary, "vary", problems)
    return [{}, *({name: value} for name, values in axes.items() for value in values)]


def _lists(values: Any, where: str, problems: list[str]) -> dict[str, list[Any]]:
    """Settings with lists of values; a single value is a list of one."""
    axes = {
        name: value if isinstance(value, list) else [value]
        for name, value in _settings(values, where, problems).items()
    }
    problems += [f"{where}: {name} is an empty list" for name in axes if not axes[name]]
    return axes


def _listed_rows(cells: Any, problems: list[str]) -> list[dict[str, Any]]:
    if not isinstance(cells, list):
        problems.append(f"cells must be a list of mappings, got {cells!r}")
        return []
    return [_settings(row, f"cells[{i}]", problems) for i, row in enumerate(cells)]


def _cells(settings: list[dict[str, Any]], problems: list[str]) -> list[CellSpec]:
    """The cells; what is wrong with them is added to ``problems``, each thing once."""
    cells: list[CellSpec] = []
    found: dict[str, list[str]] = {}
    for row in settings:
        try:
            cells.append(make_cell(row))
        except KeelbenchError as error:
            hint = f" ({error.hint})" if error.hint else ""
            for problem in error.problems:
                found.setdefault(problem + hint, []).append(_label(row))
    for problem, labels in found.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        problems.append(f"cell ({labels[0]}){more}: {problem}")
    return cells


def _label(row: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={row[key]}" for key in row)


def make_cell(settings: dict[str, Any]) -> CellSpec:
    """A validated cell from dotted or short settings, with the architecture's name in order.

    Raises:
        KeelbenchError: with every problem of the cell.
    """
    cell = CellSpec().replaced(settings)
    if cell.model.module is not None:
        return cell.replaced({"model.arch": cell.model.module}).validated()
    try:
        arch = canonical_name(cell.model.arch)
    except KeelbenchError as error:
        if others := cell.problems():
            raise_problems([error.message, *others])
        raise
    return cell.replaced({"model.arch": arch}).validated()
