"""The command line, as `kvgraph` and as `python -m kvgraph`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Ctrl-C ends it without a word while it imports what it needs too: nothing is made yet."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from kvgraph import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":  # worker processes of a command import this module
    main()
