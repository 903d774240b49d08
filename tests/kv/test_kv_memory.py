"""Memory figures of the spec, the arithmetic in the errors, and tables that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvgraph.contract.devices import Device
from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import CapacityError, ParamsError
from kvgraph.kv.memory import most_logits, plan_leaves, plan_memory
from kvgraph.kv.paged import PagedKVCacheManager
from tests.support.builders import make_manager, snapshot, start

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
    with pytest.raises(ParamsError, match=r"expected an integer( >= 1)?, got "):
        plan_memory(LLAMA_8B, *given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((0, None, GIB), "max_seq_len: expected >= 1, got 0"),
        ((2.5, None, GIB), "max_seq_len: expected an integer >= 1, got float 2.5"),
        ((16, None, "1GiB"), "available_cache_memory: expected an integer, got str '1GiB'"),
        ((16, "2", GIB), "num_layers: expected an integer, got str '2'"),
    ],
)
def test_sizes_of_a_batch_are_whole_numbers(given: tuple[Any, Any, Any], text: str) -> None:
    with pytest.raises(ParamsError, match=f"^{text}$"):
        PagedKVCacheManager.infer_optimal_batch_size(LLAMA_8B, *given)


SLIDING = KVCacheParams("float32", 2, 16, 3, page_size=128, window_size=128)
FULL = KVCacheParams("float32", 2, 16, 3, page_size=128)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("length", [1, 100, 128, 129, 1024])
@pytest.mark.parametrize("chunk", [16, 128, 2048])
def test_a_leaf_that_holds_the_whole_batch_limits_nothing(
    batch: int, length: int, chunk: int
) -> None:
    """However large a step is next to the window's pages."""
    params = MultiKVCacheParams.from_params({"sliding": SLIDING, "full": FULL})
    assert plan_leaves(params, GIB, batch, length, chunk).max_concurrent_requests == batch


@pytest.mark.parametrize("batch", [1, 4, 64])
@pytest.mark.parametrize("pages", range(10, 90, 7))
def test_requests_that_fit_are_none_or_more(batch: int, pages: int) -> None:
    """A window takes 3 pages of a request, and 4 of a chunk; the other leaf 8 of a request."""
    params = MultiKVCacheParams.from_params({"sliding": SLIDING, "full": FULL})
    plan = plan_leaves(params, pages * FULL.bytes_per_page, batch, 1024, 512)
    held = min(batch, plan.pages["full"] // 8)
    assert 0 <= plan.max_concurrent_requests <= held
    assert sum(plan.pages.values()) <= pages


def test_rows_of_logits_of_a_step() -> None:
    assert [most_logits(*given) for given in ((256, 2048), (256, 16), (1, 128))] == [384, 16, 128]


@contextmanager
def tables_below(nbytes: int) -> Iterator[None]:
    """A system that refuses int32 arrays of `nbytes` or more."""
    own = np.zeros

    def zeros(shape: Any, dtype: Any = float) -> Any:
        if dtype == np.uint8 and nbytes <= shape < 2 * nbytes:  # a pool is larger
            raise MemoryError
        return own(shape, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "zeros", zeros)
        yield


@pytest.mark.parametrize(
    ("pages", "rows", "text"),
    [
        (32, 1 << 14, r"lookup_table: expected 1.0 MiB of host memory for \[16384, 16\]"),
        (1 << 13, 32, r"lookup_table: expected 1.0 MiB of host memory for \[32, 8192\]"),
        (1, 1 << 18, r"lookup_table: expected 1.0 MiB of host memory for \[262144, 1\]"),
    ],
)
def test_tables_that_do_not_fit_are_one_sentence(pages: int, rows: int, text: str) -> None:
    """The table of the pool, and those of a batch."""
    with tables_below(1 << 20), pytest.raises(CapacityError, match=f"^{text}, which the system"):
        make_manager(pages, rows)


def test_a_table_that_cannot_grow_changes_no_request() -> None:
    manager = make_manager(pages=40, rows=3, dp=2, page_size=1)
    a, b = start(manager, "a", range(4)), start(manager, "b", range(4), 1)
    text = r"^lookup_table: expected .* of host memory for \[3, 32\], which the system refused"
    with tables_below(4 * 3 * 32):
        for call in (
            lambda: manager.alloc(b, 1, num_steps=20),
            lambda: manager.alloc_batch([[a], [b]], num_steps=20),
        ):
            before = snapshot(manager)
            with pytest.raises(CapacityError, match=text):
                call()
            assert snapshot(manager) == before
    manager.alloc_batch([[a], [b]], num_steps=20)
    table = manager.runtime_inputs([[a], [b]]).inputs[1].lookup_table
    assert np.asarray(table).tolist() == [[*range(4)]]
