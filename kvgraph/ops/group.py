"""Groups of ranks for the native collectives (`plugins/include/kvgraph/abi.h`).

Ranks of one machine exchange data in its memory, ranks of several machines by a library that
gathers their pieces.

Each adapter's library has its own kernels, and so its own group per thread: a rank enters its group
in all of these libraries.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Protocol

from kvgraph.contract.dims import Array
from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.errors import RankError
from kvgraph.ops import native

FAULTS = {
    1: "got the end of its process",
    2: "got nothing from it in {seconds:g} s (--collective-timeout)",
    3: "got its failure; its own message says why",
    4: "got a failure of what carries it between the machines",
}
"""Text of an error by its kvg_group_fault."""

FAILED, DONE, WAITS = range(3)
"""Values of kvg_gathered."""

SLICE_SECONDS = 0.1
"""Seconds between two checks whether other ranks have failed."""


class Gather(Protocol):
    """Transport of pieces between machines."""

    def start(self, parts: Sequence[Array]) -> None:
        """Start to gather each rank's piece, as bytes, into `parts[rank]`; this rank's piece is
        there already."""

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; whether all pieces have arrived."""

    def close(self) -> None:
        """End the transport."""


_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_int32,
)
"""C type of kvg_gather."""

_entered = threading.local()


class _Group(ctypes.Structure):
    """The struct kvg_group of abi.h."""

    _fields_: ClassVar = [
        ("memory", ctypes.c_void_p),
        ("exits", ctypes.POINTER(ctypes.c_int32)),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("timeout_ms", ctypes.c_int64),
        ("calls", ctypes.c_uint64),
        ("waited_ns", ctypes.c_uint64),
        ("moved_bytes", ctypes.c_uint64),
        ("gather", _CALLBACK),
        ("context", ctypes.c_void_p),
    ]


class Group(NotCopyable):
    """One rank of a group of `size` ranks that share `memory` (`shared_bytes(size)` zeroed bytes).

    `exits`: for each rank a descriptor that is readable once its process has ended, or -1; the
    group closes them. With `gather` only this rank uses the memory, and `exits` are connections to
    the other ranks.
    """

    def __init__(
        self,
        memory: Array,
        rank: int,
        size: int,
        exits: Sequence[int],
        timeout: float,
        gather: Gather | None = None,
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._memory = memory  # must outlive the group
        self._exits = (ctypes.c_int32 * size)(*exits)
        weakref.finalize(self, _close, [exit for exit in exits if exit >= 0])
        exit_list = ctypes.cast(self._exits, ctypes.POINTER(ctypes.c_int32))
        milliseconds = max(1, int(timeout * 1000))
        self._gather = gather
        self._callback = _CALLBACK() if gather is None else _CALLBACK(self._gathered)
        self._error: BaseException | None = None
        self._group = _Group(
            memory.ctypes.data, exit_list, rank, size, milliseconds, 0, 0, 0, self._callback, None
        )
        self._address = ctypes.addressof(self._group)

    def enter(self) -> None:
        """Let the calling thread run this rank's graph from now on."""
        for dll in _libraries():
            dll.kvg_cpu_enter_group(self._address)
        _entered.group = self  # lives as long as the thread may use it

    def abort(self) -> None:
        """Make the collectives of all ranks fail from now on; their error names this rank."""
        _libraries()[0].kvg_cpu_abort_group(self._address)

    def close(self) -> None:
        """End the transport between machines, if there is one. Idempotent."""
        if self._gather is not None:
            self._gather.close()

    def exit(self, rank: int) -> int:
        """The descriptor that is readable once the rank's process has ended; -1 if it has none."""
        return int(self._exits[rank])

    def ended(self) -> list[int]:
        """Ranks with a descriptor whose process has ended."""
        return [rank for rank, exit in enumerate(self._exits) if exit >= 0 and is_readable(exit)]

    def require_whole(self) -> None:
        """Raise RankError if a rank has failed, ended or timed out. Raise the interrupt that ended
        a collective of this rank, if there was one."""
        if self._error is not None and not isinstance(self._error, Exception):
            error, self._error = self._error, None  # raise an interrupt only once
            raise error
        broken = int(_libraries()[0].kvg_cpu_group_broken(self._address))
        if broken:
            rank = broken & 0xFFFF
            why = FAULTS[broken >> 16].format(seconds=self.timeout)
            if self._error is not None and rank == self.rank:
                why = f"{why} ({(str(self._error) or repr(self._error)).splitlines()[0]})"
            raise RankError(
                f"rank {rank}: expected it to take part in the step of {self.size} ranks, {why}; "
                "start all ranks again"
            ) from self._error

    def _gathered(
        self, context: int | None, parts: int, stride: int, nbytes: int, is_first: int
    ) -> int:
        """Callback of collectives. It must not raise: C would lose the error, or an interrupt."""
        try:
            assert self._gather is not None
            if is_first:
                begin = parts - self._memory.ctypes.data
                places = (begin + rank * stride for rank in range(self.size))
                self._gather.start([self._memory[at : at + nbytes] for at in places])
            return DONE if self._gather.wait(SLICE_SECONDS) else WAITS
        except BaseException as error:
            self._error = error
            return FAILED

    @property
    def calls(self) -> int:
        """Number of pieces of collectives so far."""
        return int(self._group.calls)

    @property
    def waited_seconds(self) -> float:
        """Seconds that collectives have waited for other ranks."""
        return float(self._group.waited_ns) / 1e9


def entered() -> Group | None:
    """The group that the calling thread entered last, if any."""
    group: Group | None = getattr(_entered, "group", None)
    return group


def gone(rank: int) -> RankError:
    """The RankError for a rank whose process has ended, found outside of a collective."""
    return RankError(
        f"rank {rank}: expected it to take part, got the end of its process; start all ranks again"
    )


def is_readable(descriptor: int) -> bool:
    """Whether a descriptor can be read now: a message came, or its connection or process ended."""
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(0))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def shared_bytes(size: int) -> int:
    """Bytes of the memory that `size` ranks share."""
    return int(_libraries()[0].kvg_cpu_group_bytes(size))


@cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    libraries = tuple(native.opened(native.library_path(n)) for n in ("cpu", "onnxruntime"))
    for dll in libraries:
        dll.kvg_cpu_enter_group.argtypes = [ctypes.c_void_p]
        dll.kvg_cpu_enter_group.restype = None
        dll.kvg_cpu_abort_group.argtypes = [ctypes.c_void_p]
        dll.kvg_cpu_abort_group.restype = None
        dll.kvg_cpu_group_broken.argtypes = [ctypes.c_void_p]
        dll.kvg_cpu_group_broken.restype = ctypes.c_uint32
        dll.kvg_cpu_group_bytes.argtypes = [ctypes.c_int32]
        dll.kvg_cpu_group_bytes.restype = ctypes.c_uint64
    return libraries
