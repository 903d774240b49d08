"""The connector with its threads: order, refusals, pins, drops, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from kvgraph.contract.devices import HOST
from kvgraph.contract.inputs import Buffer
from kvgraph.errors import DeviceError, KernelError, StoreError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.tiers import uses
from kvgraph.kv.tiers.connector import Move, Transfer
from kvgraph.kv.tiers.copies import HostCopier, copier_of
from kvgraph.kv.tiers.host import HostStore
from kvgraph.kv.tiers.leaf_pools import LeafPools
from kvgraph.kv.tiers.open import fingerprint_of
from kvgraph.kv.tiers.store import page_key
from kvgraph.kv.tiers.tiered import TieredConnector
from tests.support.builders import make_params
from tests.support.stores import MemoryStore, opener

PAGES = 12


class Gate(HostCopier):
    """Copies only while it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.fails = False
        self.copied: list[tuple[str, int]] = []

    def copy_pages_out(self, buffer: Buffer, pages: Sequence[int], rows: Any) -> None:
        self._pass("out", pages)
        super().copy_pages_out(buffer, pages, rows)

    def copy_pages_in(self, buffer: Buffer, pages: Sequence[int], rows: Any) -> None:
        self._pass("in", pages)
        super().copy_pages_in(buffer, pages, rows)

    def _pass(self, way: str, pages: Sequence[int]) -> None:
        assert self.open.wait(30)
        if self.fails:
            raise KernelError("no")
        self.copied += [(way, page) for page in pages]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def make_pools(copier: Gate) -> LeafPools:
    """A quantised leaf of two shards: page p of every buffer is filled with p."""
    buffers = []
    for dtype, width in (("int8", 6), ("float32", 2)) * 2:
        values = np.broadcast_to(np.arange(PAGES)[:, None], (PAGES, width)).astype(dtype)
        buffers.append(Buffer(dtype, values.shape, HOST, values.copy()))
    return LeafPools("leaf", "0-2/2", tuple(buffers), copier)


def connect(
    pools: LeafPools, pages: int, *stores: Any, staging: int = 2, **options: Any
) -> TieredConnector:
    size = pools.record_size
    host = HostStore({size: pages}, {size: staging}, lambda nbytes: np.zeros(nbytes, np.uint8))
    limits = {"largest": size, "max_offloads": 100, "max_writes": 100} | options
    return TieredConnector(host, stores, **limits)


def move(pools: LeafPools, page: int, key: int | None = None) -> Move:
    return Move(bytes([page if key is None else key]) * 32, pools, page)


def wait_for(connector: TieredConnector, count: int) -> list[Transfer]:
    """Transfers until `count` moves have ended."""
    ended: list[Transfer] = []
    while sum(len(transfer.moves) for transfer in ended) < count:
        assert connector.wait(30)
        ended += connector.poll()
    return ended


def settle(connector: TieredConnector) -> None:
    deadline = time.monotonic() + 30
    while connector.metrics().inflight_ops:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    connector.poll()


def test_a_record_is_of_all_buffers(gate: Gate) -> None:
    pools = make_pools(gate)
    assert pools.sizes == (6, 8, 6, 8)
    assert pools.record_size == 28
    store = MemoryStore()
    connector = connect(pools, 4, store)
    assert connector.offload([move(pools, 3), move(pools, 5)]) == [move(pools, 3), move(pools, 5)]
    wait_for(connector, 2)
    settle(connector)
    scale = np.full(2, 3, np.float32).tobytes()
    assert store.pages[move(pools, 3).key] == b"\x03" * 6 + scale + b"\x03" * 6 + scale
    ended = connector.load([move(pools, 9, key=3)])
    assert wait_for(connector, 1) == [ended]
    assert ended.ok
    for buffer in pools.buffers:
        assert (buffer.handle[9] == 3).all()
        assert (buffer.handle[8] == 8).all()
    connector.close()


def test_a_load_is_all_or_a_refusal(gate: Gate) -> None:
    pools, store = make_pools(gate), MemoryStore()
    for stores in [(), (store,)]:
        connector = connect(pools, 4, *stores)
        connector.offload([move(pools, 3)])
        wait_for(connector, 1)
        load = connector.load([move(pools, 8, key=3), move(pools, 9, key=77)])
        assert wait_for(connector, 2) == [load]
        assert not load.ok
        assert connector.load([move(pools, 8, key=3)]).moves
        assert wait_for(connector, 1)[0].ok
        connector.close()


def test_loads_go_before_offloads(gate: Gate) -> None:
    pools = make_pools(gate)
    connector = connect(pools, 10)
    connector.offload([move(pools, 0)])
    wait_for(connector, 1)
    gate.open.clear()
    connector.offload([move(pools, 1)])
    while connector._offloads:
        time.sleep(0.001)
    connector.offload([move(pools, 2)])
    connector.load([move(pools, 9, key=0)])
    gate.open.set()
    wait_for(connector, 3)
    firsts = [copied for at, copied in enumerate(gate.copied) if at % 4 == 0]
    assert firsts == [("out", 0), ("out", 1), ("in", 9), ("out", 2)]
    connector.close()


def test_what_is_known_is_not_offloaded_again(gate: Gate) -> None:
    pools = make_pools(gate)
    connector = connect(pools, 10)
    assert len(connector.offload([move(pools, 0)])) == 1
    wait_for(connector, 1)
    assert connector.offload([move(pools, 0), move(pools, 5, key=0)]) == []
    assert connector.metrics().offload_dropped == 0
    connector.close()


def test_queues_are_bounded(gate: Gate) -> None:
    pools = make_pools(gate)
    connector = connect(pools, 10, max_offloads=3)
    gate.open.clear()
    taken = connector.offload([move(pools, page) for page in range(8)])
    assert taken == [move(pools, page) for page in range(3)]
    assert connector.metrics().offload_dropped == 5
    gate.open.set()
    wait_for(connector, 3)
    connector.close()


def test_writes_are_bounded(gate: Gate) -> None:
    """A slow store costs its own hits, not the host's."""
    pools = make_pools(gate)
    stuck = threading.Event()
    store = MemoryStore(fails=lambda call: call == "write" and not stuck.wait(30))
    connector = connect(pools, 10, store, max_writes=2)
    connector.offload([move(pools, page) for page in range(8)])
    wait_for(connector, 8)
    assert connector.stats()["host"].num_used_pages == 8
    stuck.set()
    settle(connector)
    dropped = connector.metrics().offload_dropped
    assert dropped >= 5
    assert len(store.pages) == 8 - dropped
    connector.close()


def test_a_copier_that_fails_is_a_load_that_fails(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    pools, store = make_pools(gate), MemoryStore()
    connector = connect(pools, 4, store)
    connector.offload([move(pools, 1)])
    wait_for(connector, 1)
    settle(connector)
    gate.fails = True
    load = connector.load([move(pools, 9, key=1)])
    wait_for(connector, 1)
    assert not load.ok
    assert connector.offload([move(pools, 2)])
    wait_for(connector, 1)
    assert not connector.lookup([[(move(pools, 2).key, 28)]])[0].present
    assert connector.metrics().offload_dropped == 1
    gate.fails = False
    assert connector.offload([move(pools, 2)])
    wait_for(connector, 1)
    connector.close()
    assert "a tier failed" in caplog.text


def test_reset_forgets_what_is_on_its_way_too(gate: Gate) -> None:
    pools, store = make_pools(gate), MemoryStore()
    connector = connect(pools, 4, store)
    connector.offload([move(pools, 1)])
    wait_for(connector, 1)
    settle(connector)
    gate.open.clear()
    connector.offload([move(pools, 2)])
    while connector._offloads:
        time.sleep(0.001)
    connector.reset()
    assert store.pages == {}
    gate.open.set()
    wait_for(connector, 1)
    settle(connector)
    assert store.pages == {}
    assert connector.stats()["host"].num_used_pages == 0
    connector.close()


def test_close_finishes_what_is_queued(gate: Gate) -> None:
    pools, store = make_pools(gate), MemoryStore()
    connector = connect(pools, 0, store, staging=1)
    threads = list(connector._threads)
    connector.offload([move(pools, page) for page in range(8)])
    connector.close()
    assert len(store.pages) == 8
    assert store.is_closed
    assert not any(thread.is_alive() for thread in threads)
    connector.close()


def test_promotion_fills_the_host(gate: Gate) -> None:
    pools, store = make_pools(gate), MemoryStore()
    first = connect(pools, 0, store)
    first.offload([move(pools, page) for page in range(3)])
    first.close()
    second = connect(pools, 2, store)
    lookup = second.lookup([[(move(pools, page).key, 28) for page in (0, 1, 2, 7)]])[0]
    while not lookup.done:
        second.wait(30)
        second.poll()
    assert lookup.present == {move(pools, page).key for page in range(3)}
    second.load([move(pools, 5 + page, key=page) for page in range(3)])
    assert wait_for(second, 3)[0].ok
    stats = second.stats()
    assert stats["host"].num_used_pages == 2
    reads = store.reads
    second.load([move(pools, 9, key=2)])
    assert wait_for(second, 1)[0].ok
    assert (store.reads, second.metrics().h2d_blocks_copied) == (reads, 4)
    second.close()


def work(connector: TieredConnector) -> None:
    while connector.work():
        pass


def test_touches_and_flushes_come_between_writes(gate: Gate) -> None:
    """Writes that never end keep nothing from the stores, and from those that wait for a page."""
    pools, store = make_pools(gate), MemoryStore()
    connector = connect(pools, 200, store, threads=False, max_offloads=200, max_writes=200)
    moves = [move(pools, 0, key) for key in range(200)]
    connector.offload(moves)
    connector.touch([moves[0].key])
    while len(store.calls) < 150:
        assert connector.work()
    assert "touch" in store.calls
    assert store.calls.count("flush") > 1
    assert connector._writes
    assert connector.has_settled([moves[0].key])
    assert not connector.has_settled([moves[-1].key])
    work(connector)
    assert store.calls[-1] == "flush"
    assert connector.has_settled([each.key for each in moves])
    connector.close()


def test_uses_are_told_in_slices_and_only_the_last_of_them(gate: Gate) -> None:
    told: list[list[bytes]] = []

    class Told(MemoryStore):
        def touch(self, keys: Sequence[bytes]) -> None:
            told.append(list(keys))

    connector = connect(make_pools(gate), 2, Told(), threads=False)
    keys = [i.to_bytes(32) for i in range(2 * uses.MOST_KEYS)]
    connector.touch(keys)
    connector.touch(keys[-3:-1])
    connector.touch(keys[-2:-1])
    work(connector)
    assert max(map(len, told)) <= 1000
    expected = [*keys[-uses.MOST_KEYS : -3], keys[-1], keys[-3], keys[-2]]
    assert [key for some in told for key in some] == expected
    connector.close()


def test_a_load_that_is_cancelled_before_its_copy_ends_at_once(gate: Gate) -> None:
    pools = make_pools(gate)
    connector = connect(pools, 1, staging=0, threads=False)
    connector.offload([move(pools, 1)])
    work(connector)
    connector.poll()
    load = connector.load([move(pools, 9, key=1)])
    connector.cancel(load)
    assert (list(connector.poll()), load.ok) == ([load], False)
    assert connector.metrics().inflight_ops == 0
    assert (pools.buffers[0].handle[9] == 9).all(), "not copied"
    connector.offload([move(pools, 2)])
    work(connector)
    (lookup,) = connector.lookup([[(move(pools, 2).key, 28)]])
    assert lookup.present, "its slot is free for another page"
    connector.close()


def test_a_store_is_counted_by_its_own_name(gate: Gate) -> None:
    pools, stores = make_pools(gate), [MemoryStore(name) for name in ("disk", "remote", "own")]
    connector = connect(pools, 4, *stores)
    connector.offload([move(pools, page) for page in range(3)])
    wait_for(connector, 3)
    connector.close()
    metrics, stats = connector.metrics(), connector.stats()
    assert (metrics.disk_blocks_written, metrics.remote_blocks_written) == (3, 3)
    assert [stats[store.name].written for store in stores] == [3, 3, 3]


@pytest.mark.parametrize("with_store", [False, True], ids=["host", "store"])
def test_after_close_nothing_is_found_taken_or_waited_for(with_store: bool, gate: Gate) -> None:
    pools = make_pools(gate)
    connector = connect(pools, 4, *[MemoryStore()] * with_store)
    connector.offload([move(pools, 1)])
    wait_for(connector, 1)
    connector.close()
    (lookup,) = connector.lookup([[(move(pools, 1).key, 28), (move(pools, 2).key, 28)]])
    assert lookup.done
    assert lookup.present == set()
    load = connector.load([move(pools, 9, key=1)])
    assert (load.ok, list(connector.poll())) == (False, [load])
    assert connector.offload([move(pools, 3)]) == []
    connector.touch([move(pools, 1).key])
    waiting = threading.Thread(
        target=lambda: (connector.wait(), connector.yield_pages()), daemon=True
    )
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    with pytest.raises(StoreError, match=r"^reset: .* open") if with_store else nullcontext():
        connector.reset()
    assert connector.metrics().inflight_ops == 0


def test_stores_that_opened_are_closed_where_the_next_one_fails() -> None:
    def fails(fingerprint: bytes, page_bytes: int) -> Any:
        raise StoreError("folder: expected one that can be written, got none")

    store = MemoryStore()
    with pytest.raises(StoreError, match="folder: expected"):
        PagedKVCacheManager(
            make_params(enable_prefix_caching=True),
            None,
            8,
            max_batch_size=1,
            stores=[opener(store), fails],
        )
    assert store.is_closed


def test_a_device_whose_session_copies_no_pages_is_refused() -> None:
    buffer = Buffer("float32", (2, 3), HOST, object())
    with pytest.raises(DeviceError, match=r"expected a session that copies pages .* got NoneType"):
        copier_of(None, [buffer])


def test_keys_and_fingerprints_differ_in_everything() -> None:
    keys = {
        page_key(digest, leaf, shards)
        for digest in (b"a" * 32, b"b" * 32)
        for leaf in ("", "sliding", "sliding0-1/1")
        for shards in ("0-1/1", "0-2/2", "")
    }
    assert len(keys) == 2 * 3 * 3
    assert all(len(key) == 32 for key in keys)
    assert fingerprint_of(b"model") != fingerprint_of(b"modem")
