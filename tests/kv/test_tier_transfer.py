"""Pages from one engine's pool to another's: the same bytes, or a refusal and nothing changed."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Client, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine, SamplingParams
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import DeviceError, MissingDependencyError, TransferError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.journal import PagesCleared, PageStored
from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers.nixl_pools import NixlPools
from kvgraph.kv.tiers.transfer import PageTransfer, Way
from tests.support.builders import make_params, snapshot
from tests.support.transfers import transfer

TOKENS = list(range(30))


def nixl_or_skip(way: Way) -> bool:
    if way == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed")
    return way == "nixl"


def manager(pages: int = 20, model: bytes = b"m", **changes: Any) -> PagedKVCacheManager:
    options: dict[str, Any] = {"max_batch_size": 2, "enable_runtime_checks": True}
    params = make_params(**({"enable_prefix_caching": True} | changes))
    return PagedKVCacheManager(params, None, pages, identity=model, **options)


def tree(pages: int = 20) -> PagedKVCacheManager:
    """A full leaf and one with a window of two pages."""
    whole = make_params(enable_prefix_caching=True)
    sliding = make_params(enable_prefix_caching=True, window_size=9, num_layers=5)
    params = MultiKVCacheParams.from_params({"whole": whole, "sliding": sliding})
    return PagedKVCacheManager(
        params, None, pages, max_batch_size=2, max_seq_len=64, enable_runtime_checks=True
    )


def compute(kv: PagedKVCacheManager, tokens: list[int] = TOKENS) -> TextContext:
    """A request that ran and went; its pages hold random bytes."""
    ctx = TextContext("first", tokens)
    kv.claim("first")
    kv.alloc(ctx)
    for buffer in kv.get_device_buffer(0).all_buffers:
        raw = buffer.handle.reshape(-1).view(np.uint8)
        raw[:] = np.random.default_rng(0).integers(0, 255, raw.size, np.uint8)
    ctx.update(7)
    kv.step([ctx])
    kv.release("first")
    return TextContext("all", [*tokens, 7])


def bytes_of(kv: PagedKVCacheManager, ctx: TextContext) -> Any:
    pages = kv.committed_pages(ctx)
    return {leaf: {k: v.tobytes() for k, v in own.items()} for leaf, own in pages.items()}


WAYS: list[Way] = ["connection", "shared_memory", "nixl"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["one", "two shards", "quantised", "tree"])
def test_pages_arrive_as_they_were(way: Way, kind: str) -> None:
    nixl_or_skip(way)
    make: Callable[[], PagedKVCacheManager] = {
        "one": manager,
        "two shards": lambda: manager(tp=2),
        "quantised": lambda: manager(
            quantization=kvgraph.KVCacheQuantization("int8", granularity=4)
        ),
        "tree": tree,
    }[kind]
    sender, receiver = make(), make()
    ctx = compute(sender)
    before = snapshot(sender)
    expected = 7 + 2 if kind == "tree" else 7
    assert transfer(sender, ctx, receiver, way) == (expected, expected)
    after = snapshot(sender)
    del before["replicas"][0], after["replicas"][0]  # the free queue's order alone
    assert before == after
    assert bytes_of(receiver, ctx) == bytes_of(sender, ctx)
    assert receiver.num_free_blocks() == receiver.total_num_blocks()
    follower = TextContext("next", [*TOKENS, 1, 2])
    receiver.claim("next")
    receiver.alloc(follower)
    assert follower.cached_prefix_length == 28
    assert transfer(sender, ctx, receiver, way) == (0, 0), "it has them all"


def test_no_room_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has 64 MiB of it. A write into a mapping beyond would be a SIGBUS."""

    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender, receiver = manager(), manager()
    ctx = compute(sender)
    sent, received = transfer(sender, ctx, receiver, "shared_memory")
    assert re.fullmatch(
        r"transfer: expected \d+ bytes of shared memory in /dev/shm, got 'No space left on device'"
        "; send them over the connection",
        sent,
    )
    assert received.startswith("transfer: expected the other side to follow the protocol")
    assert receiver.num_free_blocks() == receiver.total_num_blocks()
    assert not list(Path("/dev/shm").glob("kvgraph-*"))


def test_pages_that_the_receiver_has_are_not_evicted() -> None:
    """They are those that its requests let go of first."""
    sender, receiver = manager(), manager(pages=8)
    ctx = compute(sender)
    compute(receiver, TOKENS[:9])
    compute(receiver, [50] * 21)
    assert len(receiver.committed_digests()) == 2 + 5
    assert transfer(sender, ctx, receiver, "connection") == (5, 5)
    follower = TextContext("next", [*TOKENS, 1, 2])
    receiver.claim("next")
    receiver.alloc(follower)
    assert follower.cached_prefix_length == 28


def test_the_start_of_a_prefix_that_arrives_is_the_last_to_go() -> None:
    """Also where the receiver had it long before."""
    sender, receiver = manager(), manager(pages=8)
    ctx = compute(sender)
    compute(receiver, TOKENS[:5])
    assert transfer(sender, ctx, receiver, "connection") == (6, 6)
    compute(receiver, [50] * 10)
    follower = TextContext("next", [*TOKENS, 1, 2])
    receiver.claim("next")
    receiver.alloc(follower)
    assert follower.cached_prefix_length == 28 - 2 * 4


def test_too_little_room_besides_the_pages_that_the_receiver_has() -> None:
    sender, receiver = manager(), manager(pages=6)
    ctx = compute(sender)
    compute(receiver, TOKENS[:9])
    before = snapshot(receiver)
    sent, received = transfer(sender, ctx, receiver, "connection")
    assert sent == received
    assert "pages of another engine: expected 5 free pages, got 4" in sent
    assert snapshot(receiver) == before


@pytest.mark.parametrize("make", [manager, tree])
def test_pages_that_arrive_are_told(make: Callable[[], PagedKVCacheManager]) -> None:
    """As the sender told of them."""
    sender, receiver = make(), make()
    sender.follow()
    ctx = compute(sender)
    compute(receiver, TOKENS[:9])
    receiver.follow()
    transfer(sender, ctx, receiver, "connection")
    assert receiver.events() == [PagesCleared(), *sender.events()[3:]]


def test_pages_of_an_older_sender_are_told_without_tokens() -> None:
    sender, receiver = manager(), manager()
    digests = sender.page_identities(compute(sender))
    receiver.follow()
    with receiver.adopted_pages([digests]):
        pass
    assert receiver.events()[1:] == [PageStored(digest, None, []) for digest in digests]
    with sender.held_pages(TextContext("x", TOKENS)) as leaves:
        header = PageTransfer(sender)._header(TextContext("x", TOKENS), leaves, "connection")
    del header["root"], header["tokens"]
    assert PageTransfer(receiver)._stored(header) == []


@pytest.mark.parametrize(
    "changes", [{"tokens": []}, {"tokens": [1 << 70]}, {"tokens": "x"}, {"root": 5}]
)
def test_tokens_that_are_none_are_refused(changes: Any) -> None:
    sender, receiver = manager(), manager()
    ctx = compute(sender)
    ours, theirs = Pipe()
    with sender.held_pages(ctx) as leaves:
        header = PageTransfer(sender)._header(ctx, leaves, "connection") | changes
    ours.send_bytes(json.dumps(header).encode())
    with pytest.raises(TransferError, match="transfer: "):
        PageTransfer(receiver).receive(theirs)
    assert receiver.num_free_blocks() == 20


@pytest.mark.parametrize(("digest", "said"), [("ab", 30), ("ab" * 32, 30), ("ab" * 32, 1)])
def test_pages_that_are_not_of_the_tokens_are_refused(digest: str, said: int) -> None:
    sender, receiver = manager(), manager()
    ctx = compute(sender)
    ours, theirs = Pipe()
    with sender.held_pages(ctx) as leaves:
        header = PageTransfer(sender)._header(ctx, leaves, "connection")
    header["leaves"][0]["digests"], header["tokens"] = [digest], header["tokens"][:said]
    ours.send_bytes(json.dumps(header).encode())
    expected = f"digests: expected those of the sender's tokens, got '{digest}'$"
    with pytest.raises(TransferError, match=expected):
        PageTransfer(receiver).receive(theirs)
    assert receiver.num_free_blocks() == 20


@pytest.mark.parametrize(
    ("receiver", "message"),
    [
        (lambda: manager(tp=2), r"tensor-parallel shards: expected 0-2/2 .*got 0-1/1"),
        (
            lambda: manager(page_size=8),
            r"bytes of a page: expected 2048 .* got 1024 from the sender",
        ),
        (lambda: manager(model=b"other"), r"model and layout \(fingerprint\): expected [0-9a-f]+"),
        (tree, r"caches: expected \['whole', 'sliding'\] from the receiver, got \[''\]"),
        (lambda: manager(pages=6), r"pages of another engine: expected 7 free pages, got 6"),
    ],
    ids=["shards", "page size", "model", "caches", "room"],
)
def test_what_does_not_fit_is_refused_by_name(
    receiver: Callable[[], PagedKVCacheManager], message: str
) -> None:
    sender, other = manager(), receiver()
    ctx, before = compute(sender), snapshot(other)
    sent, received = transfer(sender, ctx, other, "connection")
    assert sent == received
    with pytest.raises(TransferError, match=message):
        raise TransferError(sent)
    assert snapshot(other) == before


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_sender_that_dies_leaves_nothing(after: int) -> None:
    sender, receiver = manager(), manager()
    ctx = compute(sender)
    header = PageTransfer(sender)._header
    with sender.held_pages(ctx) as leaves:
        first = json.dumps(header(ctx, leaves, "connection")).encode()
    ours, theirs = Pipe()
    if after:
        ours.send_bytes(first)
        for _ in range(after - 1):
            ours.send_bytes(b"\x01" * leaves[0].pools.record_size)
    ours.close()
    with pytest.raises(TransferError, match=r"expected the other side to follow .* got \w+Error"):
        PageTransfer(receiver).receive(theirs)
    assert receiver.num_free_blocks() == 20
    assert bytes_of(receiver, ctx) == {"": {}}


@pytest.mark.parametrize(
    "message",
    [
        b"no JSON",
        b"[]",
        b"{}",
        b'{"format": "kvgraph-transfer-1"}',
        b'{"format": "kvgraph-transfer-1", "leaves": [{"path": ""}]}',
        b'{"format": "kvgraph-transfer-2"}',
        b"[" * 200_000,
    ],
)
def test_what_is_no_transfer(message: bytes) -> None:
    ours, theirs = Pipe()
    ours.send_bytes(message)
    with pytest.raises(TransferError, match="transfer: "):
        PageTransfer(manager()).receive(theirs)


@pytest.mark.parametrize("way", ["foo", None, 5])
def test_a_way_that_is_none_is_refused(way: Any) -> None:
    kv = manager()
    ctx = compute(kv)
    ours, theirs = Pipe()
    expected = f"^way: expected one of connection, shared_memory, nixl, got {way!r}$"
    with pytest.raises(TransferError, match=expected):
        PageTransfer(kv).send(ctx, ours, way=way)
    with kv.held_pages(ctx) as leaves:
        header = PageTransfer(kv)._header(ctx, leaves, "connection") | {"way": way}
    ours.send_bytes(json.dumps(header).encode())
    with pytest.raises(TransferError, match=f"way: expected one .* receiver has, got {way}"):
        PageTransfer(manager()).receive(theirs)


def test_pages_that_were_not_offered_are_refused() -> None:
    kv = manager()
    ours, theirs = Pipe()
    theirs.send_bytes(b'{"wanted": [[1000000]]}')
    with pytest.raises(TransferError, match="to follow the protocol to its end, got IndexError"):
        PageTransfer(kv).send(compute(kv), ours)


def test_a_page_of_another_size_is_no_page() -> None:
    sender, receiver = manager(), manager()
    ctx = compute(sender)
    ours, theirs = Pipe()
    with sender.held_pages(ctx) as leaves:
        header = PageTransfer(sender)._header(ctx, leaves, "connection")
        ours.send_bytes(json.dumps(header).encode())
    ours.send_bytes(b"\x01" * 10)
    with pytest.raises(TransferError, match="a page of 10 bytes instead of 1024"):
        PageTransfer(receiver).receive(theirs)
    assert bytes_of(receiver, ctx) == {"": {}}


def test_nixl_only_where_it_is() -> None:
    kv, other = manager(), manager()
    ctx = compute(kv)
    ours, _theirs = Pipe()
    with pytest.raises(TransferError, match=r"expected PageTransfer\(nixl=True\) for NIXL"):
        PageTransfer(kv).send(ctx, ours, way="nixl")
    buffer = other.get_device_buffer(0).all_buffers[0]
    buffer.handle = object()
    with pytest.raises(DeviceError, match="nixl: expected pools in host memory"):
        NixlPools([buffer])


def test_without_nixl_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvgraph\[nixl\]'"):
        PageTransfer(manager(), nixl=True)


DECODER = """
import json, sys
from multiprocessing.connection import Listener
from kvgraph import Engine, SamplingParams
from kvgraph.kv.tiers.transfer import PageTransfer
artifact, key, nixl, tokens = sys.argv[1], sys.argv[2].encode(), sys.argv[3] == "nixl", sys.argv[4]
engine = Engine(artifact, num_pages=40, num_threads=1)
side = PageTransfer(engine.kv, nixl=nixl)
with Listener(("127.0.0.1", 0), authkey=key) as listener:
    print(listener.address[1], flush=True)
    with listener.accept() as connection:
        taken = side.receive(connection)
        greedy = SamplingParams(max_new_tokens=8, ignore_eos=True)
        done = engine.generate([json.loads(tokens)], greedy)[0]
        cached = engine.kv.get_metrics_aggregated().cache_tokens
        connection.send_bytes(json.dumps([taken, cached, done.token_ids]).encode())
"""


@pytest.mark.parametrize("way", WAYS)
def test_prefill_here_decode_there(way: Way, compiled: Callable[..., Path]) -> None:
    """Two processes: what the other one generates is what one engine alone does."""
    nixl = nixl_or_skip(way)
    artifact = compiled("tiny-llama")
    tokens = np.random.default_rng(0).integers(3, 2048, 300).tolist()
    engine = Engine(artifact, num_pages=40, num_threads=1)
    wanted = engine.generate([tokens], SamplingParams(max_new_tokens=8, ignore_eos=True))[0]
    command = [sys.executable, "-c", DECODER, str(artifact), "secret", way, json.dumps(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as decoder:
        assert decoder.stdout is not None
        port = next(int(line) for line in decoder.stdout if line.strip().isdigit())
        assert isinstance(engine.kv, PagedKVCacheManager)
        side = PageTransfer(engine.kv, nixl=nixl)
        with Client(("127.0.0.1", port), authkey=b"secret") as connection:
            assert side.send(TextContext("prompt", tokens), connection, way=way) == 18
            found = json.loads(connection.recv_bytes())
    assert found == [18, 288, wanted.token_ids]
    assert decoder.returncode == 0
