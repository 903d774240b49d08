"""Ports for processes that a test starts, and that bind them seconds later."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, COUNT = 20_000, 12_000
"""Below those that Linux gives to sockets that ask for any, so that none of these gets one."""

NUMBERS = itertools.count(os.getpid() * 1009)  # processes next to each other begin far apart


def free_port() -> int:
    """One that nothing has, and that this process has not handed out before."""
    while True:
        port = FIRST + next(NUMBERS) % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
