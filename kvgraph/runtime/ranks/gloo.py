"""Transfers pieces of collectives between machines with torch.distributed's gloo; needs torch.

Decision: each rank gathers the parts of all ranks and adds them itself, in rank order, as in shared
memory. So all ranks get the same bits, and the same as ranks on one machine; the result of a gloo
sum would depend on the number of ranks. For two ranks, this sends no more bytes than a sum.

gloo aborts the process if pieces differ in size. They do not: sizes follow from the graph and from
the step's message, which all ranks have.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, Work

from kvgraph.contract.dims import Array
from kvgraph.errors import RankError
from kvgraph.signal_handlers import ignoring

SLACK_SECONDS = 60.0
"""Time by which gloo's deadline is later than ours, which names the missing rank."""

CLOSING_SECONDS = 2.0
"""Time that gloo may take to end its threads. After a failure they may wait until its deadline."""


class Gloo:
    """Gathers pieces of `size` ranks, which reach each other at their `host`."""

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout: float) -> None:
        """Join the group; all ranks must do so at once. RankError if they do not meet."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # of no stub
        # Without a host, a machine may resolve its own name to the loopback address.
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout + SLACK_SECONDS)
        before = _sockets()
        try:
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise RankError(
                f"rank {rank}: expected gloo to join {size} ranks at {host}, got {why}"
            ) from error
        self._connections = _sockets() - before
        self._rank = rank
        self._work: Work | None = None

    def start(self, parts: Sequence[Array]) -> None:
        assert self._group is not None, "not closed"
        tensors = [torch.from_numpy(part) for part in parts]
        gather = self._group.allgather  # type: ignore[attr-defined]
        self._work = gather([tensors], [tensors[self._rank]])

    def wait(self, seconds: float) -> bool:
        assert self._work is not None, "started"
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # raises its error, unless it completed in the meantime
        return True

    def close(self) -> None:
        """End gloo's threads; at interpreter exit they could not end. Idempotent.

        A thread that waits for a rank would continue until gloo's deadline. gloo has no call to
        stop it, so its connections are shut down.
        """
        try:
            if self._work is not None and not self._work.is_completed():
                self._shut_down()
        finally:
            held = [self._work, self._group]
            self._work = self._group = None
            ending = threading.Thread(target=held.clear, daemon=True)
            with suppress(RuntimeError):  # no thread can start while the interpreter exits
                ending.start()
                ending.join(CLOSING_SECONDS)

    def _shut_down(self) -> None:
        for number in self._connections:
            with ignoring(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # OSError for a listening one: gloo would abort
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[int]:
    """File descriptors of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with ignoring(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found
