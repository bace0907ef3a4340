"""The command line: parse, call, print, exit. The only place that prints or exits.

stdout carries results alone (a table or JSON); progress, notes and errors go to stderr.
Modules of commands import the rest of the package inside the commands, so that ``--help``
starts fast.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import typer

from keelbench import __version__
from keelbench.errors import ExitCode, KeelbenchError

app = typer.Typer(
    name="keelbench",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure the Maximum Tolerable Learning Rate of Transformer architectures.",
    epilog="Exit codes: 0 done, 1 regression, 2 usage, 3 no or incompatible baseline, "
    "4 inconclusive, 5 run failed, 130 interrupted, 143 terminated.",
)


def _print_version(value: bool) -> None:
    if value:
        print(f"keelbench {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def fail(error: KeelbenchError) -> int:
    """Print an error as everyone sees it, and return its exit code."""
    note(f"error: {error.message}")
    if error.hint:
        note(f"\nhint: {error.hint}")
    return int(error.exit_code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    _mount()
    try:
        app(args=list(arguments), prog_name="keelbench", standalone_mode=True)
    except KeelbenchError as error:
        return fail(error)
    except BrokenPipeError:
        # The reader of stdout is gone (head, less): not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(ExitCode.USAGE)
    return int(ExitCode.OK)


def _mount() -> None:
    """Register the commands; each module adds its own to ``app``."""
    for name in ("measure", "read", "rejudge", "describe", "baselines", "gate", "study"):
        importlib.import_module(f"keelbench.cli.{name}")
