"""The command line, as `kvgraph` and as `python -m kvgraph`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext, suppress

from kvgraph.signal_handlers import end_at_signals


def main() -> None:
    """Run the command line. Ctrl-C during its imports exits silently with status 130."""
    # In a container this may be process 1. The kernel drops its signals that have no handler.
    with end_at_signals() if os.getpid() == 1 else nullcontext():
        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
        from kvgraph import cli

        signal.signal(signal.SIGINT, before)
        try:
            cli.main()
        except SystemExit as ended:
            if "kvgraph.runtime.ranks.hosts" in sys.modules:
                _leave_meeting(ended.code)
            raise


def _leave_meeting(code: str | int | None) -> None:
    """Exit at once if a meeting of ranks still waits in a thread."""
    from kvgraph.runtime.ranks.hosts import is_meeting

    if is_meeting():
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":  # worker processes of a command import this module
    main()
