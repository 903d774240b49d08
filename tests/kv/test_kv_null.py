"""The null manager: its page's constants, and that it never allocates."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraph.contract.devices import virtual_devices
from kvgraph.errors import ParamsError, RequestError
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.null import NullKVCacheManager
from kvgraph.kv.requests import TextContext
from tests.support.builders import make_params


def make_null(**changes: object) -> NullKVCacheManager:
    arguments: dict[str, object] = {
        "params": make_params(),
        "max_batch_size": 2,
        "max_seq_len": 64,
        "num_layers": 2,
        "devices": virtual_devices("cuda:sm_90"),
        "session": None,
        "available_cache_memory": 1,
        "page_size": 4,
    }
    return NullKVCacheManager(**(arguments | changes))  # type: ignore[arg-type]


def test_constants_of_its_page() -> None:
    null, ctx = make_null(), TextContext("a", [1, 2])
    params, devices = make_params(), virtual_devices("cuda:sm_90")
    assert NullKVCacheManager.estimated_memory_size(params, 2, 64, 2, 1 << 30, devices) == 0
    assert NullKVCacheManager.infer_optimal_batch_size(params, 64, 2, 1 << 30, devices) == 1
    assert (null.num_free_blocks, null.total_num_host_pages) == (1000, 0)
    assert (null.free_blocks_pct, null.used_blocks_pct) == (1.0, 0.0)
    assert null.host_committed_block_pct == 0.0
    assert null.get_req_blocks("a") == []
    assert (null.get_replica(ctx), null.get_or_recommend_replica(ctx)) == (0, 0)
    assert null.get_data_parallel_splits([ctx, ctx, ctx]) == [[0, 1, 2]]
    assert null.metrics == KVCacheMetrics()
    records = null.get_runtime_inputs([ctx])
    assert null.increment_cache_lengths(records, None) is records


def test_lifecycle_does_nothing_but_track_claims() -> None:
    null, ctx = make_null(), TextContext("a", [1, 2])
    null.claim("a")
    assert null.contains("a")
    null.alloc(ctx, num_steps=3)
    null.alloc_batch([[ctx]])
    null.step([ctx])
    null.reset_prefix_cache()
    null.reset_metrics()
    with pytest.raises(RequestError, match=r"'a'.*replica 0 already"):
        null.claim("a")
    null.release("a")
    assert not null.contains("a")
    null.release("a")
    null.claim("a", 1)
    with pytest.raises(RequestError, match=r"release of 'a'.*replica 0, got .* on replica 1"):
        null.release("a", 0)
    null.release("a")
    with null.reserve([[ctx]]):
        assert null.contains("a")
    assert not null.contains("a")


def test_dummies_have_one_record_per_device() -> None:
    null = make_null(devices=virtual_devices("cuda:sm_90", 2))
    records = null.get_runtime_inputs([TextContext("a", [1]), TextContext("b", [1])], num_steps=3)
    assert len(records) == 2
    shapes = [value.shape for value in records[1].flatten()]
    assert shapes == [(1, 2, 2, 4, 1, 8), (2,), (2, 1), (3, 2)]


def test_no_devices_are_not_its_own() -> None:
    with pytest.raises(ParamsError, match="devices: expected at least data_parallel_degree=1, got"):
        make_null().get_symbolic_inputs(devices=[])


@pytest.mark.parametrize(("name", "value"), [("page_size", 128), ("num_layers", 3)])
def test_contradictions(name: str, value: int) -> None:
    with pytest.raises(ParamsError, match=rf"{name}: expected \d from params, got {value}"):
        make_null(**{name: value})


@pytest.mark.parametrize("replica", [0.5, "1", True])
def test_numbers_are_whole(replica: Any) -> None:
    null = make_null()
    said = f"got {type(replica).__name__} {replica!r}$"
    with pytest.raises(
        RequestError, match=f"^claim: replica_idx: expected an integer >= 0, {said}"
    ):
        null.claim("a", replica)
    with pytest.raises(RequestError, match=f"^num_steps: expected an integer, {said}"):
        null.fetch([], num_steps=replica)
    with pytest.raises(RequestError, match=r"^claim: replica_idx: expected >= 0, got -1$"):
        null.claim("a", -1)
    with pytest.raises(RequestError, match=r"^request_id: expected a hashable key, got \[\]$"):
        null.claim([])  # type: ignore[arg-type]
    for call in (null.release, null.contains):
        with pytest.raises(RequestError, match=r"^request_id: expected a hashable key, got \[\]$"):
            call([])
    assert not null.contains("a")
