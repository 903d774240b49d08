"""Memory figures of the spec, and the arithmetic in the errors."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraph.contract.devices import Device
from kvgraph.contract.params import KVCacheParams
from kvgraph.errors import ParamsError
from kvgraph.kv.memory import plan_memory
from kvgraph.kv.paged import PagedKVCacheManager

LLAMA_8B = KVCacheParams("bfloat16", n_kv_heads=8, head_dim=128, num_layers=32, page_size=128)
GIB = 1 << 30


def test_llama_8b() -> None:
    assert LLAMA_8B.bytes_per_page == 16_777_216
    plan = plan_memory(LLAMA_8B, 40 * GIB, 64, 8192)
    assert plan.num_pages == 2560
    assert plan.nbytes == 40 * GIB
    assert (plan.pages_per_request, plan.max_concurrent_requests) == (64, 40)
    assert plan.num_tokens == 327_680


def test_the_batch_bounds_the_pages() -> None:
    assert plan_memory(LLAMA_8B, 40 * GIB, 4, 1000).num_pages == 4 * 8


def test_class_methods() -> None:
    devices = [Device("cpu")]
    size = PagedKVCacheManager.estimated_memory_size(LLAMA_8B, 64, 8192, 32, 40 * GIB, devices)
    assert size == 40 * GIB
    infer = PagedKVCacheManager.infer_optimal_batch_size
    assert infer(LLAMA_8B, 8192, 32, 40 * GIB, devices) == 40
    assert infer(LLAMA_8B, 8192, 32, 1, devices) == 1


def test_figures_are_of_one_replica_with_all_its_shards() -> None:
    devices = tuple(Device(f"cuda:{i}") for i in range(4))
    params = KVCacheParams("bfloat16", 8, 128, 32, devices=devices, data_parallel_degree=2)
    assert params.bytes_per_page == LLAMA_8B.bytes_per_page
    size = PagedKVCacheManager.estimated_memory_size(params, 64, 8192, 32, 40 * GIB, devices)
    assert size == 80 * GIB


def test_errors_show_the_arithmetic() -> None:
    with pytest.raises(ParamsError, match=r"16777216 bytes, got 1 bytes \(1 // 16777216 = 0"):
        plan_memory(LLAMA_8B, 1, 64, 8192)
    short = 63 * LLAMA_8B.bytes_per_page
    assert plan_memory(LLAMA_8B, short, 64, 8192).num_pages == 63
    with pytest.raises(ParamsError, match=r"expected 64 pages .*8192.*got 63 pages"):
        plan_memory(LLAMA_8B, short, 64, 8192, require_max_seq_len=True)
    with pytest.raises(ParamsError, match="max_seq_len: expected >= 1, got 0"):
        plan_memory(LLAMA_8B, short, 64, 0)


@pytest.mark.parametrize("given", [(float("nan"), 64, 64), (1 << 30, 2.5, 64), (1 << 30, 64, "9")])
def test_sizes_are_whole_numbers(given: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ParamsError, match="expected an integer, got "):
        plan_memory(LLAMA_8B, *given)
