"""Records on disk: one JSON per lane, written whole or not at all.

``results/<name>/records/<id>.json``. Each file is written under a unique temporary name and
renamed, so that a killed process loses at most the lanes in flight, and any number of
processes can write to one folder.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keelbench.errors import ExitCode, KeelbenchError
from keelbench.records import RECORD_SCHEMA, Record

MIGRATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Older schema to a function that lifts a record by one step; empty while there is only one."""


class Store:
    """The records of one results folder."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    @property
    def records_folder(self) -> Path:
        return self.folder / "records"

    def prepare(self) -> None:
        """Create the folder and prove that it can be written to, before any compute.

        Raises:
            KeelbenchError: if it cannot.
        """
        with _clear_os_errors(self.records_folder):
            self.records_folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.records_folder / ".probe", "")
            (self.records_folder / ".probe").unlink(missing_ok=True)

    def save(self, record: Record) -> Path:
        """Write one record atomically and return its path."""
        path = self._path(record.id)
        with _clear_os_errors(path):
            self.records_folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(record.to_dict()) + "\n")
        return path

    def load(self, record_id: str) -> Record | None:
        """The record with this id, or None if it is not stored."""
        path = self._path(record_id)
        return read_record(path) if path.exists() else None

    def has(self, record_id: str) -> bool:
        """Whether there is a record with this id, whatever its state."""
        return self._path(record_id).exists()

    def remove(self, record_id: str) -> None:
        """Forget one record, if it is stored."""
        path = self._path(record_id)
        with _clear_os_errors(path):
            path.unlink(missing_ok=True)

    def records(self) -> list[Record]:
        """Every stored record, ordered by architecture, depth, width, seed."""
        return sorted(self._iterate(), key=_order)

    def _path(self, record_id: str) -> Path:
        return self.records_folder / f"{record_id}.json"

    def _iterate(self) -> Iterator[Record]:
        if not self.records_folder.is_dir():
            return
        for path in self.records_folder.glob("*.json"):
            try:
                yield read_record(path)
            except KeelbenchError:
                if path.exists():
                    raise  # otherwise another process has replaced it meanwhile


def read_record(path: Path) -> Record:
    """Read one record file, lifting older schemas.

    Raises:
        KeelbenchError: if the file is unreadable, truncated, or of a newer schema.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        while values.get("schema") in MIGRATIONS:
            values = MIGRATIONS[values["schema"]](values)
        return Record.from_dict(values)
    except KeelbenchError as error:
        raise KeelbenchError(f"{path}: {error.message}", error.hint) from error
    except OSError as error:
        raise KeelbenchError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KeelbenchError(
            f"{path} is not a whole {RECORD_SCHEMA} record: {type(error).__name__}: {error}",
            "delete the file and run the same command again: only that lane is repeated",
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, under a unique temporary name in the same folder."""
    data = content.encode() if isinstance(content, str) else content
    # Named before it exists, so that an interruption at any point finds what to remove.
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _clear_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KeelbenchError(
            f"cannot write {path}: {error.strerror}",
            "choose another folder with --out, or free space and run the same command again: "
            "finished lanes are kept",
            ExitCode.FAILED if error.errno in _DISK_FULL else ExitCode.USAGE,
        ) from error


_DISK_FULL = (28, 122)
"""ENOSPC, EDQUOT."""


def _order(record: Record) -> tuple[Any, ...]:
    model = record.cell.model
    return (model.arch, model.depth, model.width, record.cell.hash, record.seed)
