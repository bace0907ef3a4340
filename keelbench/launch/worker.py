"""``python -m keelbench.launch.worker FD``: a worker process, started by the local launcher."""

import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from keelbench.launch.local import serve


def main() -> None:
    """Serve the parent at the other end of an inherited pipe."""
    # The parent answers Ctrl-C and ends its workers itself, so that it can finish writing.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, str(Path.cwd()))
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
