"""Fixtures that every test may use. Importing this costs nothing: torch is left out."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

NOBODY = 65534


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Run the test as a user without special rights: root may read and write everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that an unprivileged user can enter and write to (pytest's own are closed)."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o777)
        yield Path(name)
