"""Null and paged managers describe one graph, and runtime values bind to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgraph.contract.devices import Device, virtual_devices
from kvgraph.contract.inputs import Buffer, KVCacheInputs
from kvgraph.contract.params import KVCacheParams, KVCacheQuantization
from kvgraph.errors import DeviceError, ParamsError, UnsupportedError
from kvgraph.kv.continuous import ContinuousBatchingKVCacheManager
from kvgraph.kv.null import NullKVCacheManager
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from tests.support.builders import make_manager, make_params, start

MATRIX = [(dtype, tp, dp) for dtype in ("float32", "bfloat16") for tp in (1, 2) for dp in (1, 2)]


def null_of(params: KVCacheParams, devices: Any = None) -> NullKVCacheManager:
    return NullKVCacheManager(
        params,
        max_batch_size=4,
        max_seq_len=64,
        num_layers=params.num_layers,
        devices=devices or params.devices,
        session=None,
        available_cache_memory=1 << 20,
        page_size=params.page_size,
    )


def bind_all(symbols: Any, inputs: KVCacheInputs) -> dict[str, int]:
    """Position by position, one extent per dim over the whole deployment."""
    sizes: dict[str, int] = {}
    flat = [symbol for record in symbols for symbol in record]
    for symbol, value in zip(flat, inputs.flatten(), strict=True):
        symbol.bind(value.dtype, value.shape, sizes)
        assert value.device == symbol.device
    return sizes


@pytest.mark.parametrize(("dtype", "tp", "dp"), MATRIX)
def test_null_and_paged_symbols_are_equal(dtype: str, tp: int, dp: int) -> None:
    params = make_params(tp, dp, dtype=dtype)
    paged = PagedKVCacheManager(params, None, 8, max_batch_size=4)
    null = null_of(params)
    assert null.get_symbolic_inputs() == paged.get_symbolic_inputs()
    assert null.input_symbols() == paged.input_symbols() == params.get_symbolic_inputs()
    assert len(paged.input_symbols()) == tp * dp
    assert null.num_kv_inputs() == paged.num_kv_inputs() == 4


@pytest.mark.parametrize("tp", [1, 2])
def test_virtual_devices_give_the_symbols_of_real_ones(tp: int) -> None:
    real = make_params(devices=tuple(Device(f"cuda:{i}") for i in range(tp)))
    virtual = make_params(devices=tuple(virtual_devices("cuda:sm_90", tp)))
    assert null_of(real).input_symbols() == null_of(virtual).input_symbols()
    assert null_of(make_params(), real.devices).input_symbols() == real.get_symbolic_inputs()


@pytest.mark.parametrize(("dtype", "tp", "dp"), MATRIX)
def test_runtime_values_bind(dtype: str, tp: int, dp: int) -> None:
    manager = make_manager(tp=tp, dp=dp, dtype=dtype)
    batches = [[start(manager, f"r{i}", range(5 + 4 * i), i)] for i in range(dp)]
    inputs = manager.runtime_inputs(batches)
    assert len(inputs.inputs) == tp * dp
    sizes = bind_all(manager.input_symbols(), inputs)
    assert sizes["num_page_slots"] == 11
    prefixes = [""] if dp == 1 else ["replica_0_", "replica_1_"]
    for i, prefix in enumerate(prefixes):
        assert sizes[prefix + "batch_size"] == 1
        assert sizes[prefix + "max_num_pages"] == 2 + i


def test_quantised_pools_have_scales() -> None:
    manager = make_manager(quantization=KVCacheQuantization("int8", granularity=4))
    inputs = manager.runtime_inputs([[start(manager, "a", [1])]])
    assert manager.num_kv_inputs() == 5
    bind_all(manager.input_symbols(), inputs)
    assert inputs.inputs[0].kv_scales.shape == (11, 2, 2, 4, 2, 2)


@pytest.mark.parametrize(("dtype", "tp", "dp"), MATRIX)
def test_null_dummies_bind_and_hold_no_memory(dtype: str, tp: int, dp: int) -> None:
    null = null_of(make_params(tp, dp, dtype=dtype))
    for inputs in (null.runtime_inputs([[]] * dp), KVCacheInputs(null.get_runtime_inputs([]))):
        bind_all(null.input_symbols(), inputs)
        assert all(value.handle is None for value in inputs.flatten())


def test_shards_of_a_replica_share_the_index_arrays() -> None:
    manager = make_manager(tp=2, dp=2)
    batches = [[start(manager, f"r{i}", [1, 2], i)] for i in range(2)]
    records = manager.runtime_inputs(batches).inputs
    assert records[0].lookup_table.handle is records[1].lookup_table.handle
    assert records[0].kv_blocks.handle is not records[1].kv_blocks.handle
    assert not np.shares_memory(records[0].lookup_table.handle, records[2].lookup_table.handle)


def test_no_memory_on_virtual_devices_or_without_a_session() -> None:
    virtual = make_params(devices=tuple(virtual_devices("cuda:sm_90")))
    with pytest.raises(DeviceError, match="virtual"):
        PagedKVCacheManager(virtual, None, 8, max_batch_size=1)
    cuda = make_params(devices=(Device("cuda:0"),))
    with pytest.raises(DeviceError, match=r"session.*cuda:0, got None"):
        PagedKVCacheManager(cuda, None, 8, max_batch_size=1)
    with pytest.raises(ParamsError, match=r"tiers: expected enable_prefix_caching=True, got F"):
        PagedKVCacheManager(make_params(), None, 8, 3, max_batch_size=1)


def test_mla_is_described_and_not_run() -> None:
    mla = make_params(is_mla=True)
    assert null_of(mla).input_symbols()[0].kv_blocks.shape[1] == 1
    message = "is_mla: expected False to compile or run a cache, .*, got True; symbols, "
    with pytest.raises(UnsupportedError, match=message):
        PagedKVCacheManager(mla, None, 8, max_batch_size=1)
    for slots in (ContinuousBatchingKVCacheManager, PaddedKVCacheManager):
        with pytest.raises(UnsupportedError, match=message):
            slots(mla, 1, 64, mla.num_layers, mla.devices, None)


class FakeSession:
    """Owns memory, and copies index tensors to a pretended GPU."""

    identity = b"artifact"

    def __init__(self) -> None:
        self.allocated: list[tuple[str, tuple[int, ...]]] = []
        self.uploads: list[tuple[str, int]] = []

    def allocate(self, symbol: Any, sizes: Any) -> Buffer:
        shape = symbol.extents(sizes)
        self.allocated.append((symbol.name, shape))
        return Buffer(symbol.dtype, shape, symbol.device, object())

    def uploader(self) -> Any:
        def upload(symbol: Any, values: Any, capacity: int) -> Buffer:
            assert values.size <= capacity
            self.uploads.append((symbol.name, capacity))
            return Buffer("int32", values.shape, symbol.device, values.copy())

        return upload


def test_a_session_owns_pools_and_copies_index_tensors() -> None:
    session = FakeSession()
    manager = make_manager(devices=(Device("cuda:0"),), session=session)
    assert session.allocated == [("kv_blocks", (11, 2, 2, 4, 2, 8))]
    assert manager.identity == b"artifact"
    inputs = manager.runtime_inputs([[start(manager, "a", [1, 2])]])
    rows, pages = manager.max_batch_size, 10
    assert session.uploads == [("cache_lengths", rows), ("lookup_table", rows * pages)]
    bind_all(manager.input_symbols(), inputs)


def test_host_pools_are_lazily_zeroed() -> None:
    params = make_params(dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=32, page_size=128)
    before = resident_pages()
    manager = PagedKVCacheManager(params, None, 256, max_batch_size=1)  # 4 GiB
    pool = manager.get_device_buffer().all_buffers[0]
    assert np.asarray(pool)[255, 1, 31, 127, 7, 127] == 0
    assert (resident_pages() - before) * 4096 < 64 << 20


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
