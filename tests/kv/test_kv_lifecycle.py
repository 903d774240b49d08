"""Claim, alloc, runtime inputs, step, release: the examples of the spec, and what stays fixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgraph.contract.inputs import BatchCharacteristics, Buffer, KVCacheInputs
from kvgraph.errors import DeviceError, RequestError
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import RequestID, TextContext
from tests.support.builders import decode, make_manager, make_params, snapshot, start

P = 10


def table(inputs: KVCacheInputs, device: int = 0) -> list[list[int]]:
    rows: list[list[int]] = np.asarray(inputs.inputs[device].lookup_table).tolist()
    return rows


def test_a_page_edge_in_prefill_and_in_decode() -> None:
    manager = make_manager(pages=P)
    a, b = start(manager, "a", range(7)), start(manager, "b", [1])
    inputs = manager.runtime_inputs([[a, b]])
    record = inputs.inputs[0]
    assert table(inputs) == [[0, 1], [2, P]]
    assert np.asarray(record.cache_lengths).tolist() == [0, 0]
    assert np.asarray(record.max_lengths).tolist() == [[7, 7]]
    for ctx in (a, b):
        ctx.update(5)
    manager.step([[a, b]])
    manager.alloc_batch([[a, b]])
    record = manager.runtime_inputs([[b, a]]).inputs[0]
    assert np.asarray(record.lookup_table).tolist() == [[2, P], [0, 1]]
    assert np.asarray(record.cache_lengths).tolist() == [1, 7]
    assert np.asarray(record.max_lengths).tolist() == [[1, 8]]
    decode(manager, a, 6)
    assert manager.get_req_blocks("a") == [0, 1, 3]
    assert (manager.num_free_blocks(), manager.get_num_used_pages()) == (P - 4, 4)


def test_pages_without_content_are_reused_first() -> None:
    manager = make_manager(pages=6)
    start(manager, "a", range(4))
    start(manager, "b", range(8))
    manager.release("b")
    start(manager, "c", range(12))
    assert manager.get_req_blocks("c") == [1, 2, 3]


def test_index_tensors_keep_their_addresses_and_the_record_before_stays_valid() -> None:
    manager = make_manager(pages=P)
    a = start(manager, "a", [1, 2, 3])
    seen: list[set[tuple[int, ...]]] = [set(), set()]
    before: tuple[KVCacheInputs, list[list[int]], int] | None = None
    for step in range(12):
        inputs = manager.runtime_inputs([[a]])
        record = inputs.inputs[0]
        seen[step % 2].add(
            tuple(
                value.handle.ctypes.data
                for value in (record.cache_lengths, record.lookup_table, record.max_lengths)
            )
        )
        if before is not None:
            last, rows, length = before
            assert table(last) == rows
            assert np.asarray(last.inputs[0].cache_lengths).tolist() == [length]
        before = (inputs, table(inputs), a.processed_length)
        decode(manager, a, step)
    assert len(seen[0]) == len(seen[1]) == 1
    assert seen[0] != seen[1]


def test_an_empty_replica_batch() -> None:
    manager = make_manager(dp=2)
    a = start(manager, "a", [1, 2], 1)
    inputs = manager.runtime_inputs([[], [a]])
    assert inputs.inputs[0].cache_lengths.shape == (0,)
    assert inputs.inputs[0].lookup_table.shape == (0, 1)
    a.update(3)
    manager.step([[], [a]])


def test_max_cache_length_widens_the_table() -> None:
    manager = make_manager(pages=P)
    a = start(manager, "a", [1, 2])
    inputs = manager.runtime_inputs([[a]], max_cache_length=9)
    assert table(inputs) == [[0, P, P]]
    assert table(manager.runtime_inputs([[a]], max_cache_length=4 * P)) == [[0] + [P] * (P - 1)]


def test_batch_characteristics_shape_every_replica() -> None:
    manager = make_manager(dp=2)
    a, b = start(manager, "a", [1], 0), start(manager, "b", range(6), 1)
    bounds = BatchCharacteristics(2, max_prompt_length=8, max_cache_valid_length=17)
    inputs = manager.runtime_inputs([[a], [b]], batch_characteristics=bounds)
    for record in inputs.inputs:
        assert record.lookup_table.shape == (1, 5)
        assert np.asarray(record.max_lengths).tolist() == [[8, 17]]


def test_dummies_point_at_the_null_page() -> None:
    manager = make_manager(pages=P, enable_prefix_caching=True)
    a, dummy = start(manager, "a", range(9)), TextContext("dummy", [0])
    manager.alloc_dummy("dummy")
    assert manager.get_req_blocks("dummy") == [P]
    for _ in range(5):
        manager.alloc_batch([[a, dummy]])
        assert table(manager.runtime_inputs([[a, dummy]]))[1] == [P] * ((a.current_length + 3) // 4)
        a.update(1)
        dummy.update(1)
        manager.step([[a, dummy]])
    assert manager.get_num_used_pages() == 4
    manager.release("dummy")
    assert not manager.contains("dummy")


def test_reserve_releases_on_every_way_out() -> None:
    manager = make_manager(pages=P)
    with manager.reserve([TextContext("a", range(9))]):  # flat: the batch of the only replica
        assert manager.get_num_used_pages() == 3
    with pytest.raises(KeyError), manager.reserve([[TextContext("a", range(9))]]):
        raise KeyError
    before = snapshot(manager)["claimed"]
    too_many = [TextContext("a", range(9)), TextContext("b", range(4 * P))]
    with pytest.raises(RuntimeError), manager.reserve([too_many]):
        pass
    assert snapshot(manager)["claimed"] == before == {}


def test_reserve_leaves_out_what_its_scope_has_released() -> None:
    manager = make_manager(pages=P)
    batch = [TextContext("a", [1]), TextContext("b", [2])]
    with manager.reserve([batch]):
        manager.release("b")
    assert not manager.contains("a")

    def scope() -> None:
        with manager.reserve([batch]):
            manager.release("b")
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        scope()
    assert not manager.contains("a")


class FailsToRelease(PagedKVCacheManager):
    def release(self, request_id: RequestID, replica_idx: int = 0) -> None:
        if request_id == "b":
            raise OSError("a release that fails")
        super().release(request_id, replica_idx)


@pytest.mark.parametrize("error", [None, KeyError("the user's own")])
def test_a_release_that_fails_stops_no_other(error: Exception | None) -> None:
    manager = FailsToRelease(make_params(), None, 4, max_batch_size=3)

    def scope() -> None:
        with manager.reserve([[TextContext(name, [1]) for name in "abc"]]):
            if error is not None:
                raise error

    with pytest.raises(OSError if error is None else KeyError):
        scope()
    assert [manager.contains(name) for name in "abc"] == [False, True, False]


def test_chunks_grow_by_chunk() -> None:
    manager = make_manager(pages=P)
    ctx = TextContext("a", range(14))
    manager.claim("a")
    for end, pages in ((5, 2), (10, 3), (14, 4)):
        ctx.active_length = end - ctx.processed_length
        manager.alloc(ctx)
        assert len(manager.get_req_blocks("a")) == pages
        ctx.update()
        manager.step([ctx])
    assert manager.get_metrics_aggregated() == KVCacheMetrics(input_tokens=14)


def test_lookahead_and_steps_take_pages_ahead() -> None:
    manager = make_manager(pages=P)
    ctx = start(manager, "a", range(4))
    manager.alloc(ctx, num_steps=2)
    assert len(manager.get_req_blocks("a")) == 2
    manager.alloc(ctx, num_steps=2, lookahead=4)
    assert len(manager.get_req_blocks("a")) == 3
    manager.alloc(ctx)
    assert len(manager.get_req_blocks("a")) == 3


def test_several_steps_without_a_call_between() -> None:
    many, single = make_manager(pages=P), make_manager(pages=P)
    a, b = (start(m, "a", range(3)) for m in (many, single))
    many.alloc(a, num_steps=4)
    records = many.fetch([a], num_steps=4)
    state = snapshot(many)
    offsets = np.array([0, 3], np.int32)
    for step in range(4):
        expected = single.get_runtime_inputs([b])[0]
        record = records[0]
        width = expected.lookup_table.shape[1]
        assert np.asarray(record.lookup_table)[:, :width].tolist() == table(
            KVCacheInputs([expected])
        )
        assert np.asarray(record.cache_lengths).tolist() == [b.processed_length]
        assert np.asarray(record.max_lengths)[0].tolist() == [3 if step == 0 else 1, 3 + step]
        decode(single, b, step)
        if step < 3:
            records = many.increment_cache_lengths(records, offsets)
            offsets = np.array([0, 1], np.int32)
    assert snapshot(many) == state
    with pytest.raises(ValueError, match=r"at least 2 steps .* got 1"):
        many.increment_cache_lengths(records, offsets)


@pytest.mark.parametrize(
    "offsets",
    [
        np.array([0, 5], np.int32),
        np.array([6, 5, 0], np.int32),
        np.array([0, 5, 1], np.uint32),
        np.array([1, 5, 6], np.int32),
        np.array([0, 5.5, 6]),
        np.zeros(0, np.int32),
        None,
    ],
)
def test_offsets_that_are_none(offsets: Any) -> None:
    """A row would get the length of another."""
    manager = make_manager(pages=30)
    batch = [TextContext(i, range(5 + i)) for i in range(2)]
    for context in batch:
        manager.claim(context.request_id)
        manager.alloc(context, num_steps=2)
    inputs = manager.runtime_inputs([batch], num_steps=2)
    before = inputs.inputs[0].cache_lengths.handle.copy()
    with pytest.raises(RequestError, match=r"^input_row_offsets: expected 3 integers from 0 on"):
        manager.increment_cache_lengths(inputs, offsets)
    assert (inputs.inputs[0].cache_lengths.handle == before).all()


def test_increments_ask_the_session_for_device_memory() -> None:
    class Session:
        identity = b""

        def __init__(self) -> None:
            self.increments: list[object] = []

        def increment(self, lengths: Buffer, row_offsets: object) -> None:
            self.increments.append(lengths.handle)

    manager = make_manager(tp=2)
    manager.session = session = Session()  # type: ignore[assignment]
    a = start(manager, "a", range(3))
    inputs = manager.runtime_inputs([[a]], num_steps=2)
    handle = object()
    for record in inputs.inputs:
        record.cache_lengths = Buffer("int32", (1,), record.cache_lengths.device, handle)
    manager.increment_cache_lengths(inputs, np.array([0, 3]))
    assert session.increments == [handle]
    manager.session = None
    with pytest.raises(DeviceError, match=r"^session: expected one that increments cache_lengths"):
        manager.increment_cache_lengths(inputs, np.array([0, 3]))


def test_window_example_of_the_spec() -> None:
    manager = make_manager(pages=P, window_size=9)
    ctx = start(manager, "a", range(20))
    assert manager.get_req_blocks("a") == [0, 1, 2, 3, 4]
    ctx.update(1)
    manager.step([ctx])
    assert manager.get_req_blocks("a") == [P, P, P, 3, 4]
    assert manager.num_free_blocks() == P - 2


def test_a_window_lets_a_request_outgrow_the_pool() -> None:
    manager = make_manager(pages=4, window_size=9)
    ctx = start(manager, "a", range(16))
    decode(manager, ctx, *range(200))
    assert len(manager.get_req_blocks("a")) == 54
    assert manager.get_num_used_pages() <= 4
    assert manager.runtime_inputs([[ctx]]).inputs[0].lookup_table.shape == (1, 54)


def test_replicas_have_pools_of_their_own() -> None:
    manager = make_manager(dp=2, enable_prefix_caching=True)
    a, b = start(manager, "a", range(9), 0), start(manager, "b", range(9), 1)
    for ctx in (a, b):
        ctx.update(1)
    manager.step([[a], [b]])
    assert manager.get_req_blocks("a", 0) == manager.get_req_blocks("b", 1) == [0, 1, 2]
    assert manager.contains("a", 0)
    assert not manager.contains("a", 1)
    assert manager.get_metrics_aggregated() == KVCacheMetrics(input_tokens=18)


def test_forecast_changes_nothing() -> None:
    manager = make_manager(pages=P, enable_prefix_caching=True)
    a = start(manager, "a", range(17))
    a.update(1)
    manager.step([a])
    manager.release("a")
    again, larger = TextContext("b", range(17)), TextContext("c", range(8 * P))
    before = snapshot(manager)
    assert manager.get_pct_used_blocks_after_allocation(again) == 50.0
    assert manager.get_pct_used_blocks_after_allocation(larger) == 200.0
    assert manager.page_identities(again) == manager.page_identities(larger)[:4]
    assert snapshot(manager) == before
    assert (again.processed_length, larger.processed_length) == (0, 0)


def test_forecast_of_a_request_with_nothing_to_process() -> None:
    manager = make_manager(pages=P, enable_prefix_caching=True)
    a = start(manager, "a", range(17))
    a.update(1)
    manager.step([a])
    manager.release("a")
    again = TextContext("b", range(17))
    manager.claim("b")
    again.active_length = 0
    assert manager.get_pct_used_blocks_after_allocation(again) == 0
    manager.alloc(again)
    assert manager.get_num_used_pages() == 0


def test_raw_pools_and_tiers_that_are_not_there() -> None:
    manager = make_manager(tp=2, dp=2)
    shapes = [buffer.shape for buffer in manager.get_device_buffer(1).all_buffers]
    assert shapes == [(11, 2, 2, 4, 1, 8)] * 2
    assert manager.get_num_pages(1) == manager.total_num_blocks(1) == 10
    assert manager.get_num_host_pages(0) == manager.get_num_used_host_pages(0) == 0
    assert manager.get_num_disk_pages(0) == manager.get_num_used_disk_pages(0) == 0


def test_runtime_inputs_for_leaf() -> None:
    manager = PagedKVCacheManager(make_params(), None, 4, max_batch_size=1)
    ctx = start(manager, "a", [1])
    assert type(manager.runtime_inputs_for_leaf([[ctx]])) is KVCacheInputs


def test_a_new_request_changes_no_row_of_a_batch_without_it() -> None:
    """Its row stands where the batch's own does, as it has been in no batch."""
    manager = make_manager()
    a = start(manager, "a", range(3))
    for _ in range(2):
        manager.runtime_inputs([[a]])
    start(manager, "b", range(3))
    assert table(manager.runtime_inputs([[a]])) == [manager.get_req_blocks("a")]
