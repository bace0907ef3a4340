"""What command lines say, as settings: axes, seeds, devices, workers, and early checks."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keelbench.errors import KeelbenchError

if TYPE_CHECKING:
    from keelbench.sweep_spec import SweepSpec


def parse_seed_option(text: str) -> Any:
    """``3`` for so many seeds, ``0,5,7`` for these."""
    return [_whole(part) for part in text.split(",") if part] if "," in text else text


def _whole(text: str) -> Any:
    """A whole number where it is one; anything else is left for validation to refuse."""
    return int(text) if text.strip().isdecimal() else text.strip()


def sweep_from(
    path: Path | None,
    axes: dict[str, Any],
    settings: dict[str, Any],
    seeds: str | None,
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
) -> "SweepSpec":
    """The sweep that a command line asks for; flags win over the file.

    A device or dtype of ``auto`` is settled where neither the file nor a setting names one.
    """
    from keelbench.archs import PAPER_ARCHS
    from keelbench.sweep_spec import build_sweep, load_values

    given = {key: value for key, value in settings.items() if value is not None}
    given |= {k: v for k, v in (("device", device), ("dtype", dtype)) if v != "auto"}
    values: dict[str, Any] = load_values(path) if path else {"name": name}
    defaults = values.get("defaults") or {}
    if isinstance(defaults, dict):
        values["defaults"] = _device_defaults(defaults | given) | defaults
    if not path and name == "compare":
        values["matrix"] = {"model.arch": list(PAPER_ARCHS)}
    if seeds is not None:
        values["seeds"] = parse_seed_option(seeds)
    return build_sweep(values, given, axes, source=str(path) if path else "")


def axes(archs: list[str] | None, depth: str | None, width: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if archs:
        found["model.arch"] = archs
    if depth is not None:
        found["model.depth"] = [_whole(part) for part in depth.split(",")]
    if width is not None:
        found["model.width"] = [_whole(part) for part in width.split(",")]
    return found


def arch_list(text: str | None) -> list[str] | None:
    """Split at commas outside parentheses: ``keel(alpha=4,first_block=v1),pre_ln``."""
    from keelbench.archs import ARCHS

    if text is None:
        return None
    if text == "all":
        return ARCHS.names()
    parts, level = [""], 0
    for character in text:
        level += (character == "(") - (character == ")")
        if character == "," and level == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def split_arguments(arguments: list[str]) -> tuple[Path | None, dict[str, Any]]:
    path, overrides = None, {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and not argument.endswith((".yaml", ".yml")):
            overrides[key] = value
        elif path is None:
            path = Path(argument)
        else:
            raise KeelbenchError(
                f"'{argument}' is neither KEY=VALUE nor the one sweep file ({path})"
            )
    return path, overrides


def _device_defaults(chosen: dict[str, Any]) -> dict[str, Any]:
    """Settle ``auto``: CUDA where there is one, and the precision that goes with it."""
    device = chosen.get("device") or ("cuda" if _has_cuda() else "cpu")
    return {"device": device, "dtype": "bfloat16" if device == "cuda" else "float32"}


def _has_cuda() -> bool:
    """True if a GPU is there; asks torch only where a driver is."""
    has_driver = Path("/proc/driver/nvidia/version").exists() or sys.platform == "win32"
    if not has_driver:
        return False
    import torch

    return torch.cuda.is_available()


def lane_count(text: str) -> int | None:
    return _count("--lanes", text, 1)


def worker_count(text: str) -> int | None:
    return _count("--workers", text, 0)


def _count(option: str, text: str, least: int) -> int | None:
    """A whole number, or None for ``auto``."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < least:
        raise KeelbenchError(f"{option} is '{text}': give auto or a number >= {least}")
    return int(text)


def check_cells(cells: Sequence[Any]) -> None:
    """What can be known before anything runs: readable data, and a model that fits.

    Raises:
        KeelbenchError: for data that cannot be used, and for a cell that needs more memory
            than the machine has even for one lane with checkpointing.
    """
    from keelbench.capacity import machine_memory
    from keelbench.cli.progress import label
    from keelbench.data import open_source
    from keelbench.memory import estimate_memory
    from keelbench.parsing import raise_problems
    from keelbench.registry import load_object

    named = {cell.model.module for cell in cells} | {cell.optim.name for cell in cells}
    for target in sorted(name for name in named if name and ":" in name):
        load_object(target)
    vocab = {spec: open_source(spec).vocab for spec in dict.fromkeys(c.data for c in cells)}
    total = machine_memory()
    problems = []
    for cell in cells:
        if cell.device != "cpu" or cell.model.module is not None:
            continue
        needed = estimate_memory(cell, vocab[cell.data], 1, is_checkpointed=True)
        if needed > total:
            problems.append(
                f"{label(cell)} needs about {needed / 2**30:,.1f} GiB for one lane, this "
                f"machine has {total / 2**30:,.1f} GiB: lower width, depth, batch or seq"
            )
    raise_problems(problems)
