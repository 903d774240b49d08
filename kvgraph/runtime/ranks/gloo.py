"""Pieces of collectives between machines: gloo, by torch.distributed; only these need torch.

Decision: each rank gathers the parts of all and adds them itself, in their order, as it does in
shared memory. So all ranks have the same bits, and those of ranks of one machine; a sum by gloo
would depend on the number of ranks. Of two ranks no more bytes travel than for a sum.

gloo ends the process where pieces differ in size. They do not: sizes follow from the graph and from
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

SLACK_SECONDS = 60.0
"""gloo's own deadline is behind ours, which names the rank."""

CLOSING_SECONDS = 2.0
"""That gloo may take to end its threads. After a failure they may wait until its deadline."""


class Gloo:
    """Gathers pieces of `size` ranks, which reach each other at their `host`."""

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout: float) -> None:
        """All ranks at once; RankError where they do not meet."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # of no stub
        # By its name a machine may find itself at the loopback address.
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
            self._work.wait()  # raises what it failed with; it may have come in the meantime
        return True

    def close(self) -> None:
        """Ends its threads: later, with the interpreter, they could not. Idempotent.

        One that waits for a rank would go on until gloo's deadline, and gloo has no way to end it:
        its connections are shut.
        """
        if self._work is not None and not self._work.is_completed():
            for number in self._connections:
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.getpeername()  # OSError of one that listens: gloo would abort
                    connection.shutdown(socket.SHUT_RDWR)
        held = [self._work, self._group]
        self._work = self._group = None
        ending = threading.Thread(target=held.clear, daemon=True)
        with suppress(RuntimeError):  # none starts any more where the interpreter ends
            ending.start()
            ending.join(CLOSING_SECONDS)


def _sockets() -> set[int]:
    """Descriptors of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found
