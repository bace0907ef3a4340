"""``python -m keelbench`` and the console script."""

import sys
from pathlib import Path


def main() -> None:
    """Parse, run, and turn any user's mistake into one message and an exit code."""
    # A user's own rules and models are importable from the current folder.
    sys.path.insert(0, str(Path.cwd()))
    from keelbench.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
