"""The command line, as `kvgraph` and as `python -m kvgraph`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line. Ctrl-C during its imports exits silently with status 130."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from kvgraph import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":  # worker processes of a command import this module
    main()
