"""Caches without pages: one slot per sequence, the view over it, and the padded rectangle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvgraph.contract.inputs import KVCacheInputs, PaddedKVCacheInputs
from kvgraph.contract.params import KVCacheQuantization
from kvgraph.contract.symbols import (
    ContinuousBatchingKVCacheInputSymbols,
    PaddedKVCacheInputSymbols,
)
from kvgraph.errors import BindingError, CapacityError, RequestError, UnsupportedError
from kvgraph.kv.collection import ContinuousBatchingKVCacheCollection
from kvgraph.kv.continuous import ContinuousBatchingKVCacheManager
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.null import NullKVCacheManager
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from tests.support.builders import make_manager, make_params


def make_continuous(dp: int = 1, tp: int = 1) -> ContinuousBatchingKVCacheManager:
    params = make_params(tp, dp)
    return ContinuousBatchingKVCacheManager(
        params, 4, 16, 2, params.devices, None, enable_runtime_checks=True
    )


def make_padded(dp: int = 1, tp: int = 1) -> PaddedKVCacheManager:
    params = make_params(tp, dp)
    return PaddedKVCacheManager(params, 3, 16, 2, params.devices, None)


def make_paged() -> PagedKVCacheManager:
    return make_manager(max_seq_len=16)


@pytest.mark.parametrize("make", [make_paged, make_continuous, make_padded])
def test_max_seq_len_bounds_the_room(make: Callable[[], KVCacheManager]) -> None:
    manager = make()
    manager.claim("a")
    manager.require_room("a", 16, 4)
    assert manager.has_room(TextContext("a", range(16)))
    with pytest.raises(RequestError, match=r"^request 'a': expected at most max_seq_len=16 .* 17$"):
        manager.require_room("a", 17, 4)
    long = TextContext("a", range(17))
    assert not manager.has_room(long)
    long.active_length = 4
    assert not manager.has_room(long)


def test_a_slot_is_as_long_as_a_context() -> None:
    assert make_continuous().max_context_length == 16


@pytest.mark.parametrize("kind", [ContinuousBatchingKVCacheManager, PaddedKVCacheManager])
def test_memory_of_slots_that_are_no_whole_pages(kind: type[KVCacheManager]) -> None:
    """Of 10 tokens; a page has 4."""
    params = make_params()
    nbytes = 3 * 10 * params.bytes_per_page // 4
    assert kind.estimated_memory_size(params, 3, 10, None, 1 << 20) == nbytes
    assert kind.infer_optimal_batch_size(params, 10, None, nbytes) == 3


def test_slots_are_claimed_all_or_none() -> None:
    """Dummies take rows but no slots: rows can run out first."""
    manager = make_continuous()
    for i in range(manager.max_batch_size - 1):
        manager.alloc_dummy(f"dummy {i}")
    for claim in (lambda: manager.external_claim([0, 1]), lambda: manager.claim_slots(2)):
        with pytest.raises(CapacityError, match=r"expected 2 free rows .*, got 1"):
            claim()
        assert not manager.contains(0)
    assert manager.claim_slots(1) == [0]


def bind(manager: object, inputs: KVCacheInputs) -> dict[str, int]:
    sizes: dict[str, int] = {}
    symbols = [s for record in manager.input_symbols() for s in record]  # type: ignore[attr-defined]
    for symbol, value in zip(symbols, inputs.flatten(), strict=True):
        symbol.bind(value.dtype, value.shape, sizes)
    return sizes


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_continuous_values_bind(dp: int, tp: int) -> None:
    manager = make_continuous(dp, tp)
    batches = [[TextContext(f"r{i}", [1, 2])] for i in range(dp)]
    with manager.reserve(batches):
        sizes = bind(manager, manager.runtime_inputs(batches))
    assert (sizes["num_slots"], sizes["max_seq_len"]) == (5, 16)
    null = NullKVCacheManager(manager.params, 4, 16, 2, manager.params.devices, None, 0, 4)
    assert null.input_symbols() == manager.input_symbols()
    assert type(null.input_symbols()[0]) is ContinuousBatchingKVCacheInputSymbols
    bind(null, null.runtime_inputs([[]] * dp))


def test_slots_are_claimed_by_number() -> None:
    manager = make_continuous()
    assert manager.slots_remaining == {0, 1, 2, 3}
    assert manager.claim_slots(2) == [0, 1]
    manager.external_claim([3])
    assert manager.slots_remaining == {2}
    with pytest.raises(CapacityError, match="expected 2 free slots, got 1"):
        manager.claim_slots(2)
    with pytest.raises(RequestError, match=r"free slots of \[2\], got \[2, 3\]"):
        manager.external_claim([2, 3])
    assert manager.slots_remaining == {2}
    manager.claim("by name")
    assert manager.get_req_blocks("by name") == [2]
    manager.release(3)
    assert not manager.contains(3)
    assert manager.slots_remaining == {3}
    rows = [TextContext(0, range(5)), TextContext("by name", [1])]
    manager.alloc_batch([rows])
    record = manager.runtime_inputs([rows]).inputs[0]
    assert np.asarray(record.lookup_table).tolist() == [0, 2]


def test_a_slot_holds_max_seq_len_tokens() -> None:
    manager = make_continuous()
    ctx = TextContext("a", range(16))
    manager.claim("a")
    manager.alloc(ctx)
    assert manager.get_metrics_aggregated().input_tokens == 16
    ctx.update(1)
    manager.step([ctx])
    with pytest.raises(RequestError, match="max_seq_len=16 tokens, got 17"):
        manager.alloc(ctx)
    with pytest.raises(RuntimeError, match="pages for 17 tokens, got 1 for 16"):
        manager.runtime_inputs([[ctx]])


def test_continuous_refuses_quantised_pools() -> None:
    params = make_params(quantization=KVCacheQuantization("int8"))
    with pytest.raises(UnsupportedError, match="quantization: expected None"):
        ContinuousBatchingKVCacheManager(params, 4, 16, 2, params.devices, None)


def test_the_collection_is_a_view() -> None:
    blocks = np.arange(3 * 2 * 2 * 5 * 2 * 4, dtype=np.float32).reshape(3, 2, 2, 5, 2, 4)
    view = ContinuousBatchingKVCacheCollection(
        blocks, np.array([3, 1], np.int32), np.array([2, 0], np.int32), 1, 3
    )
    assert view.get_key_cache(1)[0, 1, 3].tolist() == blocks[2, 0, 1, 3, 1].tolist()
    assert view.get_value_cache(0)[1, 0, 4].tolist() == blocks[0, 1, 0, 4, 0].tolist()
    view.get_key_cache(0)[0, 0, 0][:] = -1
    assert (blocks[2, 0, 0, 0, 0] == -1).all()
    assert (view.cache_length(0), view.cache_length(1)) == (3, 1)
    assert (view.max_seq_length, view.max_cache_length) == (1, 3)
    assert (view.dtype, view.name_str, view.scale_dtype) == (
        "float32",
        "continuous_batching",
        None,
    )
    assert view.kv_params == (2, 4)
    assert view.blocks_shape == (-1, -1, -1, -1, 2, 4)
    assert view.kv_cache_dynamic_shape == (3, 5, 2, 4)
    assert view.kv_cache_dynamic_strides == (2 * 2 * 5 * 8, 8, 4, 1)
    with pytest.raises(RequestError, match="layer_idx: expected 0 to 1, got 2"):
        view.get_key_cache(2)
    with pytest.raises(BindingError, match=r"lookup_table: expected rank 1, got shape \[1, 2\]"):
        ContinuousBatchingKVCacheCollection(blocks, [1], [[0, 1]], 1, 1)


def test_the_collection_over_a_managers_values() -> None:
    manager = make_continuous()
    ctx = TextContext("a", range(3))
    with manager.reserve([[ctx]]):
        record = manager.runtime_inputs([[ctx]]).inputs[0]
        view = ContinuousBatchingKVCacheCollection(
            record.kv_blocks, record.cache_lengths, record.lookup_table, 3, 0
        )
        view.get_key_cache(0)[0, 1, 2][:] = 7
        slot = manager.get_req_blocks("a")[0]
    assert (np.asarray(record.kv_blocks)[slot, 0, 0, 2, 1] == 7).all()


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_padded_values_bind(dp: int, tp: int) -> None:
    manager = make_padded(dp, tp)
    batches = [[TextContext(f"r{i}", [1, 2])] for i in range(dp)]
    with manager.reserve(batches):
        inputs = manager.runtime_inputs(batches)
        sizes = bind(manager, inputs)
    assert all(isinstance(record, PaddedKVCacheInputs) for record in inputs.inputs)
    assert sizes["max_seq_len"] == 16
    null = NullKVCacheManager(manager.params, 3, 16, 2, manager.params.devices, None, 0, 4)
    assert null.input_symbols() == manager.input_symbols()
    assert type(null.input_symbols()[0]) is PaddedKVCacheInputSymbols
    bind(null, null.runtime_inputs([[]] * dp))


def test_a_padded_batch_moves_in_step() -> None:
    manager = make_padded()
    a, b = TextContext("a", [1, 2, 3]), TextContext("b", [4, 5, 6])
    manager.claim("a")
    manager.claim("b")
    assert (manager.get_req_blocks("b"), manager.num_free_blocks()) == ([1], 1)
    manager.alloc_batch([[a, b]])
    first = manager.runtime_inputs([[a, b]])
    for ctx in (a, b):
        ctx.update(7)
    manager.step([a, b])
    second = manager.fetch([a, b])[0]
    assert np.asarray(first.inputs[0].start_pos).tolist() == [0]
    assert np.asarray(second.start_pos).tolist() == [3]
    assert second.k_cache is first.inputs[0].k_cache
    third = manager.increment_cache_lengths([second], np.array([0, 1, 2]))[0]
    assert np.asarray(third.start_pos).tolist() == [4]


def test_padded_errors() -> None:
    manager = make_padded()
    a, b = TextContext("a", [1, 2, 3]), TextContext("b", range(17))
    manager.claim("a")
    with pytest.raises(RequestError, match=r"'a'.*claimed on replica 0 already"):
        manager.claim("a")
    with pytest.raises(RequestError, match=r"step of 'b': .*got one that is not claimed"):
        manager.step([b])
    manager.claim("b")
    with pytest.raises(RequestError, match="max_seq_len=16 tokens, got 17"):
        manager.alloc(b)
    with pytest.raises(RequestError, match="of row 0 of the rectangle, got 'b' of row 1"):
        manager.runtime_inputs([[b, a]])
    a.update(9)
    with pytest.raises(RequestError, match=r"start_pos: expected 3 .*'a', got 0 in 'b'"):
        manager.runtime_inputs([[a, b]])
    manager.claim("c")
    with pytest.raises(CapacityError, match="max_batch_size=3 of replica 0, got none"):
        manager.claim("d")
    with pytest.raises(RequestError, match=r"expected 1 replica batches .*got 2"):
        manager.step([[a], [b]])
    with pytest.raises(RequestError, match="replica_idx below data_parallel_degree=1, got 1"):
        manager.claim("d", 1)
    manager.release("b")
    assert not manager.contains("b")
    manager.claim("d")
    assert manager.get_req_blocks("d") == [1]
