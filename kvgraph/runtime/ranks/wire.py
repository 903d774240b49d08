"""Messages between the leader and a follower: JSON header, arrays, and shared memory.

    4 bytes   length of the header, little endian
    header    JSON; "arrays" lists dtype and shape of each array
    arrays    row-major, one after the other

Shared memory is sent as the file descriptor of an anonymous file. It has no name, so it is freed
when both processes end, however they end.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.errors import RankError, UnsupportedError
from kvgraph.ops.group import gone, is_readable
from kvgraph.signal_handlers import reraise_if_signalled

MOST_HEADER_BYTES = 1 << 20
MOST_ARRAY_BYTES = 1 << 31


class Wire(NotCopyable):
    """One end of a connection to `peer`, the rank at the other end."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._socket = connection
        self.peer = peer
        self._exit = -1

    def send(
        self, header: Mapping[str, Any], arrays: Sequence[Array] = (), file: int | None = None
    ) -> None:
        """Send a message; `file`: a descriptor to pass. RankError if the other rank is lost."""
        listed = [(array.dtype.name, array.shape) for array in arrays]
        text = json.dumps({**header, "arrays": listed}).encode()
        parts = [len(text).to_bytes(4, "little"), text]
        parts += [np.ascontiguousarray(array).tobytes() for array in arrays]
        data = b"".join(parts)
        try:
            if file is not None:
                sent = socket.send_fds(self._socket, [data], [file])
                data = data[sent:]
            self._socket.sendall(data)
        except TimeoutError as error:
            reraise_if_signalled(error)
            raise RankError(
                f"rank {self.peer}: expected it to read a message in time, it did not"
            ) from error
        except OSError as error:
            reraise_if_signalled(error)
            raise self._gone() from error

    def receive(self) -> tuple[dict[str, Any], list[Array], int | None]:
        """Header, arrays and file descriptor of the next message; RankError if none comes."""
        head, file = self._head()
        length = int.from_bytes(head, "little")
        try:
            if length > MOST_HEADER_BYTES:
                raise ValueError(length)
            header = json.loads(self._exactly(length))
            arrays = [self._array(name, shape) for name, shape in header.pop("arrays")]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RankError(
                f"rank {self.peer}: expected a message of kvgraph, got other bytes"
            ) from error
        return header, arrays, file

    def _array(self, name: str, shape: Sequence[int]) -> Array:
        dtype = DTYPES[name].numpy
        count = int(np.prod(shape, dtype=np.int64))
        if not 0 <= count * dtype.itemsize <= MOST_ARRAY_BYTES:
            raise ValueError(shape)
        return np.frombuffer(self._exactly(count * dtype.itemsize), dtype).reshape(shape)

    def limit(self, seconds: float | None) -> None:
        """Set the time that a message may take; None: no limit."""
        self._socket.settimeout(seconds)

    def watch(self, exit: int) -> None:
        """Stop waiting for messages once descriptor `exit` is readable: the peer has ended.

        A child of the peer may still hold the connection open. -1: wait for messages only."""
        self._exit = exit

    def require_open(self) -> None:
        """Raise RankError if the connection is closed. Call it only if no message is expected."""
        if is_readable(self._socket.fileno()):
            raise self._gone()

    def close(self) -> None:
        self._socket.close()

    def _head(self) -> tuple[bytes, int | None]:
        """The first 4 bytes of a message, and the file descriptor that comes with them."""
        self._await()
        try:
            data, files, _, _ = socket.recv_fds(self._socket, 4, 1)
        except TimeoutError as error:
            reraise_if_signalled(error)
            if error.errno is not None:  # from the system: the peer's machine does not answer
                raise self._gone() from error
            raise RankError(f"rank {self.peer}: expected a message, got none") from error
        except OSError as error:
            reraise_if_signalled(error)
            raise self._gone() from error
        if not data:
            raise self._gone()
        return data + self._exactly(4 - len(data)), files[0] if files else None

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            self._await()
            try:
                more = self._socket.recv_into(view[got:])
            except OSError as error:
                reraise_if_signalled(error)
                raise self._gone() from error
            if not more:
                raise self._gone()
            got += more
        return bytes(data)

    def _await(self) -> None:
        if self._exit < 0:
            return
        ready = select.poll()
        for descriptor in (self._socket.fileno(), self._exit):
            ready.register(descriptor, select.POLLIN)
        if self._socket.fileno() not in dict(ready.poll()):
            raise self._gone()

    def _gone(self) -> RankError:
        return gone(self.peer)


def require_linux() -> None:
    """Raise UnsupportedError on systems without anonymous shared memory or pidfds."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        raise UnsupportedError(
            f"ranks: expected Linux, whose ranks share memory, got {sys.platform}"
        )


def shared_file(nbytes: int) -> int:
    """A descriptor of `nbytes` of zeroed memory that processes can share; the caller, which is
    rank 0, closes it. RankError if the system refuses it."""
    require_linux()
    try:
        file = os.memfd_create("kvgraph", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, max(nbytes, 1))
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        reraise_if_signalled(error)
        raise RankError(
            f"rank 0: expected {nbytes} bytes of memory to share with other ranks, got "
            f"{error.strerror!r}; raise the limits of its process (ulimit -f, ulimit -n)"
        ) from error
    return file


def mapped(file: int, shape: Sequence[int], dtype: str) -> Array:
    """The memory of `file` as an array; the caller may then close the descriptor."""
    kind = DTYPES[dtype].numpy
    count = int(np.prod(shape, dtype=np.int64))
    memory = mmap.mmap(file, max(count * kind.itemsize, 1))
    return np.frombuffer(memory, np.uint8)[: count * kind.itemsize].view(kind).reshape(shape)
