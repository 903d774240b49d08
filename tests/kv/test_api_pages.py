"""The API that users of this field know, name by name: every line works, or is refused by name.

The tables hold the classes of the four pages with their methods, properties, parameters and return
types, as the pages have them. Each line is called on a manager of its own, once with the page's
keywords and once by position.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import (
    Buffer,
    ContinuousBatchingKVCacheCollection,
    ContinuousBatchingKVCacheManager,
    KVCacheInputs,
    KVCacheInputSymbols,
    NullKVCacheManager,
    PaddedKVCacheManager,
    PagedKVCacheManager,
    RaggedKVCacheInputs,
    TextContext,
)
from kvgraph.errors import RequestError
from tests.kv.own_manager import OwnManager, host
from tests.support.builders import make_params

BASE = """
__init__(params, max_batch_size, max_seq_len, num_layers, devices, session, is_ragged=False)
claim(n)  refused: claim_slots(3)
contains(seq_id) -> bool
estimated_memory_size(params, max_batch_size, max_seq_len, num_layers, available_cache_memory,
    devices) -> int
external_claim(seq_ids) -> None
fetch(batch, num_steps=1) -> list
increment_cache_lengths(kv_cache_inputs, prev_model_inputs) -> list
infer_optimal_batch_size(params, max_seq_len, num_layers, available_cache_memory, devices) -> int
input_symbols() -> list
num_kv_inputs() -> int
release(seq_id) -> None
slots_remaining -> set
step(batch) -> None
"""

NULL = """
__init__(params, max_batch_size, max_seq_len, num_layers, devices, session,
    available_cache_memory, page_size=4)
alloc(data, num_steps=1) -> None
claim(request_id, replica_idx=None) -> None
contains(request_id) -> bool
estimated_memory_size(params, max_batch_size, max_seq_len, num_layers, available_cache_memory,
    devices) -> int
free_blocks_pct -> float
get_data_parallel_splits(batch) -> list
get_or_recommend_replica(context) -> int
get_replica(context) -> int
get_req_blocks(request_id) -> list
get_runtime_inputs(batch, num_steps=1) -> list
get_symbolic_inputs(devices=None, num_layers=None) -> list
host_committed_block_pct -> float
increment_cache_lengths(kv_cache_inputs, prev_model_inputs) -> list
infer_optimal_batch_size(params, max_seq_len, num_layers, available_cache_memory, devices) -> int
metrics -> KVCacheMetrics
num_free_blocks -> int
release(request_id) -> None
reset_metrics() -> None
reset_prefix_cache() -> None
step(batch) -> None
total_num_host_pages -> int
used_blocks_pct -> float
"""

PAGED = """
__init__(params, session, total_num_pages, total_num_host_pages=0, enable_runtime_checks=False, *,
    max_batch_size)
alloc(data, replica_idx) -> None
alloc_dummy(request_id, replica_idx) -> None
claim(request_id, replica_idx) -> None
contains(request_id, replica_idx) -> bool
get_device_buffer(replica_idx) -> KVCacheBufferInterface
get_metrics_aggregated() -> KVCacheMetrics
get_num_disk_pages(replica_idx) -> int
get_num_host_pages(replica_idx) -> int
get_num_pages(replica_idx) -> int
get_num_used_disk_pages(replica_idx) -> int
get_num_used_host_pages(replica_idx) -> int
get_num_used_pages(replica_idx) -> int
get_pct_used_blocks_after_allocation(ctx, replica_idx) -> float
get_req_blocks(request_id, replica_idx) -> list
num_free_blocks(replica_idx=0) -> int
release(request_id, replica_idx) -> None
reserve(replica_batches)
reset_metrics() -> None
reset_prefix_cache() -> None
runtime_inputs(batches, *, max_cache_length=None, batch_characteristics=None)
    -> KVCacheInputsInterface
runtime_inputs_for_leaf(batches, *, max_cache_length=None, batch_characteristics=None)
    -> KVCacheInputs
step(batches) -> None
total_num_blocks(replica_idx=0) -> int
"""

COLLECTION = """
__init__(blocks, cache_lengths, lookup_table, max_seq_length, max_cache_length)
CacheType -> type
blocks -> ndarray
blocks_layout  refused: blocks.shape
blocks_shape -> tuple
blocks_tt_layout  refused: blocks.shape
blocks_tt_type  refused: blocks.shape
cache_length(bs_idx) -> int
cache_lengths -> ndarray
dtype -> str
get_key_cache(layer_idx) -> ContinuousBatchingKVCache
get_value_cache(layer_idx) -> ContinuousBatchingKVCache
kv_cache_dynamic_shape -> tuple
kv_cache_dynamic_strides -> tuple
kv_params -> KVCacheStaticParams
lookup_table -> ndarray
max_cache_length -> int
max_seq_length -> int
name_str -> str
scale_dtype -> None
"""

RECORDS = {
    "RaggedKVCacheInputs": "blocks, cache_lengths, lookup_table, max_lengths",
    "PaddedKVCacheInputs": "k_cache, v_cache, start_pos, null_op",
    "KVCacheInputsSequence": "kv_cache_inputs",
    "ContinuousBatchingKVCacheInputSymbols": "kv_blocks, cache_lengths, lookup_table, max_lengths",
}
INTERFACES = ["KVCacheParamInterface", "KVCacheInputsInterface", "KVCacheBufferInterface"]


# -- the lines


@dataclass
class Line:
    name: str
    parameters: list[str] | None  # None: an attribute
    keyword_only: list[str]
    returns: str
    refused: str


def lines(table: str) -> Iterator[Line]:
    for text in table.strip().replace("\n    ", " ").splitlines():
        call, _, refused = text.partition("refused:")
        call, _, returns = call.partition("->")
        call, returns, refused = call.strip(), returns.strip(), refused.strip()
        if "(" not in call:
            yield Line(call, None, [], returns, refused)
            continue
        (function,) = ast.parse(f"def {call}: ...").body
        assert isinstance(function, ast.FunctionDef)
        names = [argument.arg for argument in function.args.args]
        keyword_only = [argument.arg for argument in function.args.kwonlyargs]
        yield Line(function.name, names, keyword_only, returns, refused)


def cases(kinds: dict[Callable[..., Any], str]) -> list[Any]:
    return [
        pytest.param(kind, line, id=f"{kind.__name__}.{line.name}")
        for kind, table in kinds.items()
        for line in lines(table)
        if line.name != "__init__"
    ]


def construction(kind: Callable[..., Any]) -> dict[str, Any]:
    """A sample of each parameter of a constructor."""
    blocks = np.zeros((3, 2, 2, 5, 2, 4), np.float32)
    return {
        "params": make_params(),
        "max_batch_size": 4,
        "max_seq_len": 16,
        "num_layers": 2,
        "devices": make_params().devices,
        "session": None,
        "is_ragged": kind is ContinuousBatchingKVCacheManager,
        "available_cache_memory": 1 << 20,
        "page_size": 4,
        "total_num_pages": 10,
        "total_num_host_pages": 0,
        "enable_runtime_checks": True,
        "blocks": blocks,
        "cache_lengths": np.array([3, 1], np.int32),
        "lookup_table": np.array([2, 0], np.int32),
        "max_seq_length": 1,
        "max_cache_length": 3,
    }


def constructor(table: str) -> Line:
    return next(line for line in lines(table) if line.name == "__init__")


def make(kind: Callable[..., Any], table: str, *, by_keyword: bool) -> Any:
    line, values = constructor(table), construction(kind)
    return invoke(kind, line, values, by_keyword=by_keyword)


def invoke(
    function: Callable[..., Any], line: Line, values: dict[str, Any], *, by_keyword: bool
) -> Any:
    assert line.parameters is not None
    keywords = line.keyword_only + (line.parameters if by_keyword else [])
    by_position = [] if by_keyword else [values[name] for name in line.parameters]
    return function(*by_position, **{name: values[name] for name in keywords})


def samples(manager: Any, name: str) -> dict[str, Any]:
    """A value of each parameter for a manager on which a request runs."""
    if isinstance(manager, ContinuousBatchingKVCacheCollection):
        return {"layer_idx": 1, "bs_idx": 1}
    if isinstance(manager, NullKVCacheManager) or type(manager) is PagedKVCacheManager:
        ctx = TextContext("a", range(5))
        manager.claim("a")
    else:
        ctx = TextContext(*manager.claim_slots(1), range(5))
    manager.alloc(ctx)
    new = name in ("claim", "alloc_dummy")
    return construction(type(manager)) | {
        "request_id": "new" if new else ctx.request_id,
        "seq_id": ctx.request_id,
        "seq_ids": [2, 3],
        "n": 3,
        **dict.fromkeys(("data", "ctx", "context"), ctx),
        "batch": [ctx],
        "batches": [[ctx]],
        "replica_batches": [[TextContext("new", [1])]],
        "replica_idx": 0,
        "num_steps": 2,
        "kv_cache_inputs": manager.fetch([ctx], num_steps=2),
        "prev_model_inputs": np.array([0, 5]),
        "max_cache_length": 12,
        "batch_characteristics": kvgraph.BatchCharacteristics(1, 5, 12),
    }


TABLES: dict[Callable[..., Any], str] = {
    OwnManager: BASE,
    ContinuousBatchingKVCacheManager: BASE,
    PaddedKVCacheManager: BASE,
    NullKVCacheManager: NULL,
    PagedKVCacheManager: PAGED,
    ContinuousBatchingKVCacheCollection: COLLECTION,
}


@pytest.mark.parametrize("by_keyword", [True, False], ids=["keywords", "positions"])
@pytest.mark.parametrize(("kind", "line"), cases(TABLES))
def test_every_line_of_the_pages(kind: Callable[..., Any], line: Line, by_keyword: bool) -> None:
    subject = make(kind, TABLES[kind], by_keyword=by_keyword)
    values = samples(subject, line.name)

    def call() -> Any:
        member = getattr(subject, line.name)
        if line.parameters is None:
            return member
        return invoke(member, line, values, by_keyword=by_keyword)

    if line.refused:
        with pytest.raises((RequestError, AttributeError)) as caught:
            call()
        assert line.refused in str(caught.value)
    else:
        found = call()
        assert not line.returns or is_a(found, line.returns), found


def is_a(value: Any, returns: str) -> bool:
    public = getattr(kvgraph, returns, None)
    if public is not None:
        return isinstance(value, public)
    return returns == ("None" if value is None else type(value).__name__)


@pytest.mark.parametrize(("name", "fields"), RECORDS.items())
def test_every_record_of_the_pages(name: str, fields: str) -> None:
    kind = getattr(kvgraph, name)
    values = dict.fromkeys(fields.split(", "), host(1))
    if name == "KVCacheInputsSequence":
        values = {"kv_cache_inputs": [RaggedKVCacheInputs(*[host(1)] * 4)]}
    for record in (kind(**values), kind(*values.values())):
        assert {field: getattr(record, field) for field in values} == values
    assert issubclass(kind, KVCacheInputSymbols if name.endswith("Symbols") else KVCacheInputs)


@pytest.mark.parametrize("name", INTERFACES)
def test_interfaces_are_public(name: str) -> None:
    assert name in kvgraph.__all__


def test_annotations_of_the_pages_evaluate() -> None:
    for kind in (KVCacheInputs, kvgraph.KVCacheInputsInterface):
        assert kind[Buffer, Buffer].__origin__ is kind
