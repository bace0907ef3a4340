"""The only exception that users should see, and the exit codes that go with it."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns; documented in README and docs/ci.md."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    NO_BASELINE = 3
    INCONCLUSIVE = 4
    FAILED = 5
    INTERRUPTED = 130
    TERMINATED = 143


class KeelbenchError(Exception):
    """A mistake that the user can put right: what happened, and what to do next.

    Args:
        message: what happened, the value that was given, what is allowed.
        hint: the next step, printed after a blank line as ``hint: ...``.
        exit_code: what the process returns; usage errors (2) by default.
        problems: of a message that lists several, each of them; the message itself otherwise.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        exit_code: ExitCode = ExitCode.USAGE,
        *,
        problems: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.problems = problems or (message,)


class RunFailedError(KeelbenchError):
    """A run that could not be carried out (out of memory, non-finite at step 0)."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint, ExitCode.FAILED)
