"""Transfer of pages from one engine to another: one engine prefills, the other decodes.

    sender                                        receiver
    model, layout, tokens, digests, way ->
                                        <-        refused, and why | which pages it lacks
    their bytes, the chosen way         ->
                                        <-        how many it took

Both use a `multiprocessing.connection` (TCP or a Unix socket, authenticated by its authkey). The
bytes go over the connection, through shared memory, or by NIXL directly from pool to pool. Received
pages are cached: the next request with the same tokens takes them as its prefix.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import ProcessError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvgraph.contract.files import open_regular
from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.contract.plain import JsonObject
from kvgraph.errors import KVGraphError, TransferError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.identity import chain
from kvgraph.kv.pool.journal import PageStored
from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers.exchange import LeafPages
from kvgraph.signal_handlers import reraise_if_signalled

FORMAT = "kvgraph-transfer-1"
PAGE_DIGEST_BYTES = 32
MOST_HEADER = 64 << 20
"""Most bytes of a message other than a page; a list of a million pages is a tenth larger."""

Way = Literal["connection", "shared_memory", "nixl"]


class PageTransfer(NotCopyable):
    """Sends pages of one replica of `manager`, or receives them, on the manager's thread.

    Both sides need the same model and layout, tensor-parallel layout included. An error leaves both
    caches unchanged; a broken connection is closed. With `nixl` a side can also send and receive by
    NIXL, which registers the pools (host memory only).
    """

    def __init__(
        self, manager: PagedKVCacheManager, *, replica_idx: int = 0, nixl: bool = False
    ) -> None:
        self._manager = manager
        self._replica = replica_idx
        self._nixl: Any = None
        if nixl:
            from kvgraph.kv.tiers.nixl_pools import NixlPools

            self._nixl = NixlPools(manager.get_device_buffer(replica_idx).all_buffers)

    def send(self, ctx: TextContext, connection: Connection, *, way: Way = "connection") -> int:
        """Send the committed pages at the start of `ctx`; return how many the receiver took.

        The receiver takes only pages that it lacks. TransferError if it refuses them (layout,
        model, no room), or if the connection breaks.
        """
        with self._manager.held_pages(ctx, self._replica) as leaves, _unbroken(connection):
            _send(connection, self._header(ctx, leaves, way))
            answer = _receive(connection)
            if "refused" in answer:
                raise TransferError(str(answer["refused"]))
            wanted = [leaf.only(at) for leaf, at in zip(leaves, answer["wanted"], strict=True)]
            return self._give(connection, wanted, way, answer)

    def receive(self, connection: Connection) -> int:
        """Wait for pages of the other side and take them; return their number.

        Raises TransferError as `send` does, on both sides.
        """
        with _unbroken(connection):
            header = _receive(connection)
            try:
                wanted, stored = self._check(header), self._stored(header)
                _require_own(wanted, stored if "tokens" in header else None)
                with self._manager.adopted_pages(wanted, self._replica, stored=stored) as leaves:
                    self._take(connection, header, leaves)
                    taken = sum(len(leaf.pages) for leaf in leaves)
            except KVGraphError as error:
                _send(connection, {"refused": f"transfer: {error}"})
                raise TransferError(f"transfer: {error}") from error
            _send(connection, {"taken": taken})
            return taken

    def _give(
        self,
        connection: Connection,
        leaves: Sequence[LeafPages],
        way: Way,
        answer: JsonObject,
    ) -> int:
        if way == "shared_memory":
            with _ending(connection), _filled_block(leaves) as name:
                _send(connection, {"block": name})
                return _count(_receive(connection))
        if way == "nixl":
            with _ending(connection):
                self._nixl.write(leaves, answer["nixl"])
            _send(connection, {"done": True})
        else:
            with _ending(connection):
                for record in _records(leaves):
                    connection.send_bytes(record)
        return _count(_receive(connection))

    def _header(self, ctx: TextContext, leaves: Sequence[LeafPages], way: Way) -> JsonObject:
        if way not in get_args(Way):
            raise TransferError(f"way: expected one of {', '.join(get_args(Way))}, got {way!r}")
        if way == "nixl" and self._nixl is None:
            raise TransferError("transfer: expected PageTransfer(nixl=True) for NIXL, got none")
        return {
            "format": FORMAT,
            "fingerprint": self._manager.fingerprint.hex(),
            "way": way,
            "root": self._manager.settings.identities(ctx)[0].hex(),
            "tokens": ctx.tokens.tolist(),
            "leaves": [
                {
                    "path": leaf.pools.leaf,
                    "shards": leaf.pools.shards,
                    "bytes": leaf.pools.record_size,
                    "digests": [digest.hex() for digest in leaf.digests],
                }
                for leaf in leaves
            ],
        }

    def _check(self, header: JsonObject) -> list[list[bytes]]:
        """The sender's digests, per leaf; TransferError names the field that does not match."""
        _require("format", FORMAT, header.get("format"))
        own = self._manager.leaf_pools(self._replica)
        theirs = header["leaves"]
        _require("caches", [pools.leaf for pools in own], [leaf["path"] for leaf in theirs])
        for pools, leaf in zip(own, theirs, strict=True):
            where = f"cache {pools.leaf!r}: " if pools.leaf else ""
            _require(f"{where}tensor-parallel shards", pools.shards, leaf["shards"])
            _require(f"{where}bytes of a page", pools.record_size, leaf["bytes"])
        mine = self._manager.fingerprint.hex()
        _require("model and layout (fingerprint)", mine, header.get("fingerprint"))
        way = header["way"]
        if way not in get_args(Way) or (way == "nixl" and self._nixl is None):
            raise TransferError(f"way: expected one that the receiver has, got {way}")
        return [[bytes.fromhex(digest) for digest in leaf["digests"]] for leaf in theirs]

    def _stored(self, header: JsonObject) -> list[PageStored]:
        """Events of the pages, for `events`; empty if the sender's version sends no tokens."""
        if "tokens" not in header:
            return []
        tokens = TextContext("transfer", header["tokens"]).tokens
        size = self._manager.settings.page_size
        count = len(tokens) // size
        digests = chain(bytes.fromhex(header["root"]), tokens, size, 0, count)
        parents = [None, *digests][:count]
        pages = tokens[: count * size].reshape(count, size).tolist()
        return [PageStored(*one) for one in zip(digests, parents, pages, strict=True)]

    def _take(
        self, connection: Connection, header: JsonObject, leaves: Sequence[LeafPages]
    ) -> None:
        """Ask for the pages of `leaves`, and copy them in."""
        answer: JsonObject = {"wanted": []}
        for leaf, offer in zip(leaves, header["leaves"], strict=True):
            lacking = {digest.hex() for digest in leaf.digests}
            answer["wanted"].append([i for i, d in enumerate(offer["digests"]) if d in lacking])
        if header["way"] == "nixl":
            answer["nixl"] = self._nixl.describe(leaves)
            _send(connection, answer)
            _receive(connection)
            return
        _send(connection, answer)
        if header["way"] == "shared_memory":
            name = str(_receive(connection)["block"])
            with _opened_block(name, leaves) as block:
                _copy_in(leaves, iter(block))
        else:
            records = _received(connection, leaves)
            try:
                _copy_in(leaves, records)
            except KVGraphError:
                for _ in records:  # the sender reads the refusal once all are sent
                    pass
                raise


def _require_own(offered: Sequence[Sequence[bytes]], stored: Sequence[PageStored] | None) -> None:
    """Raise TransferError for a digest that is not of the sender's tokens. `stored`: None if the
    sender does not send its tokens."""
    own = None if stored is None else {page.digest for page in stored}
    for digest in [digest for leaf in offered for digest in leaf]:
        if len(digest) != PAGE_DIGEST_BYTES or (own is not None and digest not in own):
            raise TransferError(
                f"digests: expected those of the sender's tokens, got {digest.hex()[:64]!r}"
            )


def _require(name: str, expected: object, found: object) -> None:
    if expected != found:
        raise TransferError(
            f"{name}: expected {expected} from the receiver, got {found} from the sender"
        )


# -- messages and bytes


ODD = (EOFError, OSError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError,
       ProcessError)  # fmt: skip
"""What messages of a side that does not follow the protocol raise."""


@contextmanager
def _unbroken(connection: Connection) -> Iterator[None]:
    """Close the connection after an error within a message or between two of them; TransferError
    for one in ODD. A KVGraphError is raised on."""
    try:
        yield
    except KVGraphError:
        raise
    except BaseException as error:
        connection.close()
        reraise_if_signalled(error)
        if not isinstance(error, ODD):
            raise
        is_page = isinstance(error, ProcessError)  # which holds the whole message
        raise TransferError(
            f"transfer: expected the other side to follow the protocol to its end, got "
            f"{'a message that is too long' if is_page else f'{type(error).__name__} {error}'}"
        ) from (None if is_page else error)


@contextmanager
def _ending(connection: Connection) -> Iterator[None]:
    """Close the connection after an error, so that the receiver does not wait for ever."""
    try:
        yield
    except KVGraphError:
        connection.close()
        raise


def _send(connection: Connection, message: JsonObject) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _receive(connection: Connection) -> JsonObject:
    message = json.loads(connection.recv_bytes(MOST_HEADER))
    if not isinstance(message, dict):
        raise ValueError(f"a message that is no object: {message!r}")
    return message


def _count(answer: JsonObject) -> int:
    if "refused" in answer:
        raise TransferError(str(answer["refused"]))
    taken = answer["taken"]
    if type(taken) is not int or taken < 0:
        raise ValueError(f"a count of pages that is none: {str(taken)[:60]}")
    return taken


def _records(leaves: Sequence[LeafPages]) -> Iterator[Any]:
    """Yield the bytes of each page in turn; an array is valid until the next one."""
    for leaf in leaves:
        record = np.empty(leaf.pools.record_size, np.uint8)
        for page in leaf.pages:
            leaf.pools.copy_out([page], [record])
            yield record


def _received(
    connection: Connection, leaves: Sequence[LeafPages]
) -> Iterator[npt.NDArray[np.uint8]]:
    for leaf in leaves:
        record = np.empty(leaf.pools.record_size, np.uint8)
        for _ in leaf.pages:
            size = connection.recv_bytes_into(record.data)
            if size != len(record):
                raise ValueError(f"a page of {size} bytes instead of {len(record)}")
            yield record


def _copy_in(leaves: Sequence[LeafPages], records: Iterator[npt.NDArray[np.uint8]]) -> None:
    for leaf in leaves:
        for page in leaf.pages:
            leaf.pools.copy_in([page], [next(records)])


# -- shared memory: a file in a memory file system that both sides map


def _memory_folder() -> Path:
    """A folder with files in memory, /dev/shm; without one, the system's temporary folder."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def _block_of(size: int) -> Iterator[IO[bytes]]:
    """A new file with `size` allocated bytes: a write to a mapping of unallocated bytes could kill
    the process. TransferError if there is no room."""
    folder = _memory_folder()
    with ExitStack() as opened:
        try:
            file = opened.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix="kvgraph-"))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        except OSError as error:
            reraise_if_signalled(error)
            raise TransferError(
                f"transfer: expected {size} bytes of shared memory in {folder}, got "
                f"{error.strerror!r}; send them over the connection"
            ) from error
        yield file


@contextmanager
def _filled_block(leaves: Sequence[LeafPages]) -> Iterator[str]:
    """Yield the name of a block that holds the pages one after the other, until the scope ends."""
    size = max(1, sum(leaf.nbytes for leaf in leaves))
    with _block_of(size) as file:
        with mmap.mmap(file.fileno(), size) as block:
            start = 0
            for leaf in leaves:
                for page in leaf.pages:
                    end = start + leaf.pools.record_size
                    record = np.frombuffer(block, np.uint8)[start:end]
                    leaf.pools.copy_out([page], [record])
                    del record  # a mapping with views cannot be closed
                    start = end
        yield os.path.basename(file.name)


@contextmanager
def _opened_block(name: str, leaves: Sequence[LeafPages]) -> Iterator[list[npt.NDArray[np.uint8]]]:
    """Yield the pages of the other side's block, as arrays."""
    sizes = [leaf.pools.record_size for leaf in leaves for _ in leaf.pages]
    with open_regular(_memory_folder() / os.path.basename(name)) as file:
        size = os.fstat(file.fileno()).st_size
        if size < sum(sizes):
            raise ValueError(f"a block of {size} bytes instead of {sum(sizes)}")
        if not sizes:
            yield []
            return
        block = np.memmap(file, np.uint8, "r", shape=(sum(sizes),))
    yield np.split(block, np.cumsum(sizes)[:-1])
