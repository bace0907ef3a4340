"""Ctrl-C and SIGTERM: what is finished is stored, and a hint says how to go on."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import typer

from keelbench.errors import ExitCode


class _Terminated(BaseException):
    """SIGTERM, as an exception, so that it unwinds like Ctrl-C."""


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise _Terminated


@contextlib.contextmanager
def resumable(command: str) -> Iterator[None]:
    """Turn an interruption into exit code 130 or 143 and the command that goes on."""
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    except (KeyboardInterrupt, _Terminated) as stop:
        is_signal = isinstance(stop, _Terminated)
        print(
            f"{'terminated' if is_signal else 'interrupted'}: finished lanes are stored\n\n"
            f"hint: go on with: {command}",
            file=sys.stderr,
        )
        code = ExitCode.TERMINATED if is_signal else ExitCode.INTERRUPTED
        raise typer.Exit(int(code)) from None
    finally:
        signal.signal(signal.SIGTERM, before)
