"""Publishes changes of a server's prefix cache to routers over ZeroMQ, as vLLM's KV events.

    PUB     [topic, sequence (8 bytes, big-endian), batch]        one message after a step
    ROUTER  <- [sequence to begin with]   -> [b"", sequence, batch] ..., [b"", END, b""]

A batch is MessagePack: `[time, events, rank]`; an event is an array that begins with its name. The
layout is that of vLLM 0.25's `BlockStored`, `BlockRemoved` and `AllBlocksCleared`
(vllm/distributed/kv_events.py). A block's hash is the last 64 bits of its page's digest, which is
the same in every process.

A separate thread sends and answers; the engine's thread only queues events.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

import msgspec

from kvgraph.contract.loading import require_package
from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.contract.threads import threads_needed
from kvgraph.errors import RequestError
from kvgraph.kv.pool.journal import Event, PageRemoved, PagesCleared, PageStored
from kvgraph.serve.unix_socket import answers_at

if TYPE_CHECKING:
    import zmq

END = (-1).to_bytes(8, "big", signed=True)
KEPT = 10_000
"""Number of recent batches that a subscriber can request again."""

POLL_MILLISECONDS = 20
"""Longest time that an event waits while the thread polls for replay requests."""

LINGER_MILLISECONDS = 200
"""Time in which subscribers can still receive sent messages at shutdown."""


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


class KVEventPublisher(NotCopyable):
    """Publishes events at `endpoint` ("tcp://*:5557"), and answers at `replay` if it is given.

    MissingDependencyError without pyzmq; RequestError for an endpoint that cannot be bound;
    CapacityError if the system refuses a thread.
    """

    def __init__(
        self, endpoint: str, replay: str | None, topic: str, page_size: int, medium: str | None
    ) -> None:
        self._topic = _encoded(topic)
        self._page_size, self._medium = page_size, medium
        self._queue: SimpleQueue[tuple[float, list[Event]] | None] = SimpleQueue()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._encoder = msgspec.msgpack.Encoder()
        install = "pip install 'kvgraph[events]'"
        self._zmq = require_package("zmq", "needed for --kv-events", install, "pyzmq")
        self._context = self._zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._bind(self._zmq.PUB, endpoint, "--kv-events")
            if replay is not None:
                self._replay = self._bind(self._zmq.ROUTER, replay, "--kv-events-replay")
            self._thread = Thread(target=self._run, name="kv-events", daemon=True)
            with threads_needed():
                self._thread.start()
        except BaseException:
            self._let_go()
            raise

    def _bind(self, kind: int, endpoint: str, flag: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(made)
        if kind == self._zmq.ROUTER:
            made.sndhwm = KEPT + 1  # room for a whole answer: a ROUTER drops messages beyond
        if _is_taken(endpoint):
            raise RequestError(
                f"{flag}: expected an endpoint of this server alone, got {endpoint!r}, where "
                "another process answers; take another path"
            )
        try:
            made.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise RequestError(
                f"{flag}: expected an endpoint that can be bound, such as tcp://*:5557, got "
                f"{endpoint!r} ({error})"
            ) from error
        return made

    def _let_go(self) -> None:
        for each in self._sockets:
            each.close(linger=LINGER_MILLISECONDS)
        self._context.term()

    def publish(self, events: list[Event]) -> None:
        """Queue the events of a step, at the cost of a queue's put; drop them after `close`, and if
        the thread has failed."""
        if events and self._thread.is_alive():
            self._queue.put((time.time(), events))

    def close(self) -> None:
        """Send all queued events, and close the endpoints. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    # -- in the publisher's thread

    def _run(self) -> None:
        try:
            self._run_until_closed()
        finally:
            self._let_go()

    def _run_until_closed(self) -> None:
        sequence = 0
        while True:
            while self._replay is None or not self._queue.empty():
                item = self._queue.get()
                if item is None:
                    return
                data = self._encoder.encode(Batch(item[0], self._blocks(item[1])))
                self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), data])
                self._kept.append((sequence, data))
                sequence += 1
            if self._replay.poll(POLL_MILLISECONDS):
                self._answer(self._replay)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        client, *_, asked = replay.recv_multipart()
        first = int.from_bytes(asked, "big") if len(asked) == 8 else 0
        for sequence, data in self._kept:
            if sequence >= first:
                replay.send_multipart([client, b"", sequence.to_bytes(8, "big"), data])
        replay.send_multipart([client, b"", END, b""])

    def _blocks(
        self, events: Sequence[Event]
    ) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Convert events to vLLM's; consecutive pages of one prefix become one event."""
        made: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        before: Event | None = None
        for event in events:
            last = made[-1] if made else None
            if isinstance(event, PagesCleared):
                made.append(AllBlocksCleared())
            elif isinstance(event, PageRemoved):
                if isinstance(last, BlockRemoved):
                    last.block_hashes.append(block_hash(event.digest))
                else:
                    made.append(BlockRemoved([block_hash(event.digest)], self._medium))
            elif (
                isinstance(before, PageStored)
                and isinstance(last, BlockStored)
                and event.parent == before.digest
            ):
                last.block_hashes.append(block_hash(event.digest))
                last.token_ids += event.tokens
            else:
                parent = None if event.parent is None else block_hash(event.parent)
                hashes = [block_hash(event.digest)]
                made.append(
                    BlockStored(
                        hashes, parent, list(event.tokens), self._page_size, medium=self._medium
                    )
                )
            before = event
        return made


def _is_taken(endpoint: str) -> bool:
    """Whether another process listens at an ipc path: ZeroMQ would silently replace it."""
    scheme, _, path = endpoint.partition("://")
    return scheme == "ipc" and answers_at(path)


def _encoded(topic: str) -> bytes:
    try:
        return topic.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"--kv-events-topic: expected text in UTF-8, got {error}") from error


def block_hash(digest: bytes) -> int:
    """The last 64 bits of a page's digest, as the unsigned integer that routers use."""
    return int.from_bytes(digest[-8:], "big")
