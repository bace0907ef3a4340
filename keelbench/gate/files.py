"""Baselines on disk: where they are kept, writing them whole, and refusing what is not one."""

import json
from pathlib import Path
from typing import Any

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.gate.baseline import BASELINE_SCHEMA, Baseline, slug
from keelbench.store import write_atomically


def baseline_path(folder: Path | str, name: str, hardware: str) -> Path:
    """Where a baseline is kept: ``<folder>/<name>--<hardware>.json``."""
    return Path(folder) / f"{slug(name)}--{hardware}.json"


def save(baseline: Baseline, path: Path | str) -> Path:
    """Write a baseline whole or not at all; every lane on lines of its own, for review."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(baseline.to_dict(), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise KeelbenchError(
            f"cannot write {path}: {error.strerror}", "choose another path with --out"
        ) from error
    return path


def load(path: Path | str) -> Baseline:
    """Read a baseline.

    Raises:
        KeelbenchError: with exit code 3, and a message of its own for each of: missing,
            unreadable, truncated or not JSON, not a baseline, of a newer schema, incomplete,
            without cells.
    """
    path = Path(path)
    save_again = "make one with: keelbench baseline save NAME --sweep SWEEP"
    restore = f"restore it from version control (git checkout -- {path}), or save it again"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _no_baseline(f"there is no baseline at {path}", save_again) from None
    except OSError as error:
        raise _no_baseline(f"cannot read baseline {path}: {error.strerror}", restore) from error
    except ValueError as error:
        what = f"baseline {path} is truncated or not JSON: {error}"
        raise _no_baseline(what, restore) from error
    _check_schema(path, values)
    try:
        baseline = Baseline.from_dict(values)
    except (KeyError, TypeError, ValueError, AttributeError, KeelbenchError) as error:
        what = f"baseline {path} is incomplete: {type(error).__name__}: {error}"
        raise _no_baseline(what, restore) from error
    if not baseline.cells:
        raise _no_baseline(f"baseline {path} has no cells", save_again)
    return baseline


def _check_schema(path: Path, values: Any) -> None:
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema == BASELINE_SCHEMA:
        return
    family, _, version = str(schema).partition("/")
    if family == BASELINE_SCHEMA.partition("/")[0] and version.isdigit():
        raise _no_baseline(
            f"baseline {path} has schema {schema}, this version reads {BASELINE_SCHEMA}",
            "upgrade keelbench, or save the baseline again with this version",
        )
    raise _no_baseline(
        f"{path} is not a baseline: its schema is {schema!r}, expected {BASELINE_SCHEMA!r}",
        "name a file made by keelbench baseline save",
    )


def _no_baseline(message: str, hint: str) -> KeelbenchError:
    return KeelbenchError(message, hint, ExitCode.NO_BASELINE)
