"""Events of the pool in vLLM's format, read as its documented example of a subscriber does."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

zmq = pytest.importorskip("zmq", reason="pip install 'kvgraph[events]'")
import msgspec  # noqa: E402

from kvgraph import Engine, SamplingParams  # noqa: E402
from kvgraph.errors import RequestError  # noqa: E402
from kvgraph.kv.pool import journal  # noqa: E402
from kvgraph.serve.kv_events import END, KEPT, KVEventPublisher, block_hash  # noqa: E402
from tests.serve.running import COMMAND, SECONDS, Server  # noqa: E402
from tests.support.command_line import run  # noqa: E402


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]


DECODER = msgspec.msgpack.Decoder(Batch)


class Index:
    """What a router knows: block hash -> (parent, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.sequences: list[int] = []

    def apply(self, sequence: bytes, data: bytes) -> None:
        self.sequences.append(int.from_bytes(sequence, "big"))
        for event in DECODER.decode(data).events:
            if isinstance(event, Cleared):
                self.blocks.clear()
            elif isinstance(event, Removed):
                for each in event.block_hashes:
                    del self.blocks[each]
            else:
                size, parent = event.block_size, event.parent_block_hash
                assert len(event.token_ids) == size * len(event.block_hashes)
                for i, each in enumerate(event.block_hashes):
                    assert each not in self.blocks
                    self.blocks[each] = (parent, event.token_ids[i * size : (i + 1) * size])
                    parent = each


@pytest.fixture
def subscriber() -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
        socket.linger = 0
        yield socket


def replayed(endpoint: str, first: int, seconds: float = 0.0) -> list[tuple[bytes, bytes]]:
    """All batches from `first` on, read so many seconds after the question.

    A DEALER, as a REQ socket takes one answer to each question.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        time.sleep(seconds)
        found: list[tuple[bytes, bytes]] = []
        while True:
            assert socket.poll(10_000)
            _, sequence, data = socket.recv_multipart()
            if sequence == END:
                return found
            found.append((sequence, data))


def test_an_index_by_events_is_the_pool(compiled: Callable[..., Path], tmp_path: Path) -> None:
    """Through evictions, a prefix cache that is reset, a host tier, and an engine that begins
    again."""
    engine = Engine(
        compiled("tiny-llama", page_size=16),
        num_pages=24,
        total_num_host_pages=16,
        max_batch_size=4,
    )
    kv: Any = engine.kv
    kv.follow()
    endpoint = f"ipc://{tmp_path}/replay"
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events", endpoint, "kv-events", 16, None)
    rng = random.Random(0)
    shared = [rng.randrange(3, 2000) for _ in range(64)]
    for turn in range(30):
        prompts = [
            shared[: rng.choice((16, 40, 64))] + [rng.randrange(3, 2000) for _ in range(40)]
            for _ in range(3)
        ]
        for prompt in prompts:
            engine.submit(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True))
        while engine.busy:
            engine.step()
            publisher.publish(kv.events())
        if turn == 12:
            kv.reset_prefix_cache()
        if turn == 20:
            kv.rebuild()
            engine.scheduler.restart([])
        publisher.publish(kv.events())
        if turn % 10 == 9:
            index = Index()
            while not (found := replayed(endpoint, 0)) or len(index.sequences) != len(found):
                index = Index()
                for message in found:
                    index.apply(*message)
            pool = kv._replicas[0].leaves[0].pool
            assert set(index.blocks) == {block_hash(digest) for digest in pool.index}
            assert index.sequences == list(range(len(index.sequences)))
    assert pool.evictions
    publisher.close()
    engine.close()


def test_a_router_follows_a_server(
    compiled: Callable[..., Path], tmp_path: Path, subscriber: Any
) -> None:
    """The pages of a prompt, each behind the one before."""
    events, replay = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    options = ["--kv-events", events, "--kv-events-replay", replay, "--num-pages", "32"]
    folder = compiled("tiny-llama", page_size=16)
    socket = subscriber
    socket.connect(events)
    server = Server([*COMMAND, folder, "--port", "0", *options], tmp_path / "log")
    try:
        server.event("ready")
        prompt = list(range(5, 75))
        server.complete(prompt, max_tokens=4)
        for other in range(80, 120):  # what is told before a subscriber is there, it has to ask for
            server.complete([other] * 40, max_tokens=1)
            if socket.poll(2_000):
                break
        told, index = [], Index()
        end = time.monotonic() + SECONDS
        while [tokens for _, tokens in index.blocks.values()][-1:] != [[other] * 16]:
            assert time.monotonic() < end, "the last prompt's pages are not told"
            told, index = replayed(replay, 0), Index()
            for message in told:
                index.apply(*message)
        live: list[tuple[bytes, ...]] = []
        while live[-1:] != told[-1:]:
            assert socket.poll(SECONDS * 1000)
            topic, *parts = socket.recv_multipart()
            assert topic == b"kv-events"
            live.append(tuple(parts))
        assert told[-len(live) :] == live
        assert index.sequences == list(range(len(told)))
        blocks = list(index.blocks.items())
        assert [tokens for _, (_, tokens) in blocks[:4]] == [
            prompt[i : i + 16] for i in range(0, 64, 16)
        ]
        assert [parent for _, (parent, _) in blocks[:4]] == [None, *(one for one, _ in blocks[:3])]
        assert replayed(replay, len(told) - 1) == told[-1:]
    finally:
        server.close()


def test_a_replay_without_events(compiled: Callable[..., Path]) -> None:
    done = run("serve", compiled("tiny-llama"), "--kv-events-replay", "tcp://127.0.0.1:5558")
    assert done.code == 2
    assert "--kv-events-replay: expected --kv-events beside it, got none" in done.err


def test_an_endpoint_that_cannot_be_bound() -> None:
    with pytest.raises(RequestError, match=r"^--kv-events: expected an endpoint .* got 'nowhere' "):
        KVEventPublisher("nowhere", None, "", 16, None)


def test_an_answer_is_as_long_as_it_has_to_be(tmp_path: Path) -> None:
    """More batches than a socket of ZeroMQ queues by itself, to who reads late."""
    endpoint = f"ipc://{tmp_path}/replay"
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events", endpoint, "kv-events", 16, None)
    for i in range(KEPT + 10):
        publisher.publish([journal.PageStored(i.to_bytes(32, "big"), None, list(range(16)))])
    while len(publisher._kept) < KEPT or publisher._kept[-1][0] < KEPT + 9:
        time.sleep(0.01)
    found = replayed(endpoint, 0, seconds=0.5)
    assert [int.from_bytes(sequence, "big") for sequence, _ in found] == list(range(10, KEPT + 10))
    publisher.close()


def test_a_path_where_another_server_answers(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    first = KVEventPublisher(endpoint, None, "", 16, None)
    message = r"^--kv-events: expected an endpoint of this server alone, got .*; take another path$"
    with pytest.raises(RequestError, match=message):
        KVEventPublisher(endpoint, None, "", 16, None)
    first.close()
    (tmp_path / "events").touch()  # one that was killed leaves its file
    KVEventPublisher(endpoint, None, "", 16, None).close()


def test_a_thread_that_fails_closes_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later events are dropped, as nothing sends them."""
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    publisher = KVEventPublisher("inproc://events", "inproc://replay", "", 16, None)
    monkeypatch.setattr(publisher, "_blocks", lambda events: 1 / 0)
    publisher.publish([journal.PagesCleared()])
    publisher._thread.join(SECONDS)
    publisher.publish([journal.PagesCleared()])
    publisher.close()
    assert [each.exc_type for each in told] == [ZeroDivisionError]
    assert all(each.closed for each in publisher._sockets)
    assert publisher._queue.empty()


def test_a_topic_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^--kv-events-topic: expected text in UTF-8, got "):
        KVEventPublisher(f"ipc://{tmp_path}/events", None, "\udcff", 16, None)


def test_without_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(Exception, match=r"^pyzmq: needed for --kv-events, not installed; pip ins"):
        KVEventPublisher("tcp://127.0.0.1:0", None, "", 16, None)
