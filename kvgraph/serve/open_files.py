"""The limit of open files, which bounds the clients of a server."""

from __future__ import annotations

import resource
import time
from contextlib import suppress

from kvgraph.serve.log import write_line

MOST_FILES = 1 << 16
"""The limit that is set if the system allows it."""

LAST_FILES = 4
"""Files below the limit at which clients are counted as too many: others may be opened meanwhile.
"""

PAUSE_SECONDS = 60.0
"""Least time between two lines about the limit."""


def raise_limit() -> None:
    """Raise this process's limit of open files, as far as its hard limit and MOST_FILES allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a lower limit for each process
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LimitOfClients:
    """Logs that clients reach the limit of open files. The system resets further ones, which no
    program sees."""

    def __init__(self) -> None:
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._next = 0.0

    def note(self, number: int) -> None:
        """Take note of a client's file descriptor, which is the lowest that was free."""
        if self._limit == resource.RLIM_INFINITY or number < self._limit - LAST_FILES:
            return
        if (now := time.monotonic()) >= self._next:
            self._next = now + PAUSE_SECONDS
            said = (
                f"clients: expected fewer than the limit of {self._limit} open files allows, got "
                "as many, and the system resets further ones; raise the limit (`ulimit -n`)"
            )
            write_line({"time": round(time.time(), 3), "event": "warning", "message": said})
