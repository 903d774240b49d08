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
    KVCacheManager,
    NullKVCacheManager,
    PaddedKVCacheManager,
    PagedKVCacheManager,
    RaggedKVCacheInputs,
    TensorType,
    TextContext,
    virtual_devices,
)
from kvgraph.contract.devices import HOST
from kvgraph.errors import BindingError, ParamsError, RequestError, UnsupportedError
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


# -- what a user of the base page wrote


@dataclass
class OwnSymbols(KVCacheInputSymbols):
    kv_blocks: TensorType
    cache_lengths: TensorType
    lookup_table: TensorType
    max_lengths: TensorType


@dataclass
class OwnInputs(KVCacheInputs):
    blocks: Buffer
    cache_lengths: Buffer
    lookup_table: Buffer
    max_lengths: Buffer


def host(*values: Any) -> Buffer:
    array = np.array(values, np.int32)
    return Buffer("int32", array.shape, HOST, array)


class OwnManager(KVCacheManager):
    """One slot for each sequence, as the page describes it."""

    def fetch(self, batch: Any, num_steps: int = 1) -> Any:
        lengths = [ctx.processed_length for ctx in batch]
        slots = [self.get_req_blocks(ctx.request_id)[0] for ctx in batch]
        maxima = host(*[[1, length] for length in range(num_steps)])
        return [OwnInputs(host(0), host(*lengths), host(*slots), maxima)]

    def input_symbols(self) -> list[OwnSymbols]:
        return [OwnSymbols(*kvgraph.KVCacheParams.get_symbolic_inputs(self.params)[0])]


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


# -- what the pages mean to be subclassed


def test_a_subclass_of_the_base_page_needs_fetch_and_input_symbols() -> None:
    manager = OwnManager(make_params(), 3, 16, 2, make_params().devices, None, is_ragged=True)
    assert (manager.is_ragged, manager.num_layers, manager.max_seq_len) == (True, 2, 16)
    assert manager.claim_slots(2) == [0, 1]
    manager.claim("by name")
    assert manager.slots_remaining == set()
    a, b = TextContext(1, range(5)), TextContext("by name", range(3))
    manager.alloc_batch([[a, b]])
    inputs = manager.runtime_inputs([[a, b]], num_steps=2)
    assert [np.asarray(value).tolist() for value in inputs.flatten()[1:3]] == [[0, 0], [1, 2]]
    (record,) = manager.increment_cache_lengths(inputs, np.array([0, 5, 8])).inputs
    assert type(record) is OwnInputs
    assert np.asarray(record.cache_lengths).tolist() == [5, 3]
    assert record.max_lengths.shape == (1, 2)
    manager.step([a, b])
    manager.release("by name")
    manager.release(seq_id=0)
    manager.external_claim([2])
    assert manager.slots_remaining == {0}
    with pytest.raises(RequestError, match="max_seq_len=16 tokens, got 17"):
        manager.alloc_batch([[a, TextContext(2, range(17))]])
    with pytest.raises(UnsupportedError, match=r"no max_cache_length .* override runtime_inputs"):
        manager.runtime_inputs([[a]], max_cache_length=8)
    with pytest.raises(UnsupportedError, match=r"from OwnManager.* override get_symbolic_inputs"):
        manager.get_symbolic_inputs(num_layers=3)
    manager.rebuild()
    assert manager.slots_remaining == {0, 1, 2}
    with pytest.raises(TypeError, match="fetch"):
        KVCacheManager(make_params(), 3, 16)  # type: ignore[abstract]


def test_a_subclass_says_how_many_inputs_it_has() -> None:
    class Wider(OwnManager):
        def num_kv_inputs(self) -> int:
            return 7

    assert OwnManager(make_params(), 1, 16).num_kv_inputs() == 4
    assert Wider(make_params(), 1, 16).num_kv_inputs() == 7


def test_records_of_a_users_own() -> None:
    record = OwnInputs(host(0), host(1), host(2), host([1, 5], [1, 6]))
    assert record.inputs == [record]
    both = KVCacheInputs([record, record])
    assert len(both.flatten()) == 8
    values = [host(i) for i in range(8)]
    rebuilt = both.unflatten(values)
    assert [type(each) for each in rebuilt.inputs] == [OwnInputs] * 2
    assert rebuilt.flatten() == values

    @dataclass
    class Fewer(KVCacheInputs):
        blocks: Buffer
        scales: Buffer | None = None

    assert len(Fewer(host(0)).flatten()) == 1
    assert Fewer(host(0)).unflatten([host(3)]) == Fewer(host(3))

    class Plain(KVCacheInputs):
        def __init__(self) -> None:
            self.blocks = host(0)

    with pytest.raises(BindingError, match=r"Plain: expected a dataclass .* decorate it"):
        Plain().flatten()
    with pytest.raises(UnsupportedError, match=r"with cache_lengths, got Fewer; override"):
        OwnManager(make_params(), 1, 16).increment_cache_lengths([Fewer(host(0))], np.array([0]))


def test_symbols_of_a_users_own() -> None:
    symbols = make_params().get_symbolic_inputs()[0]
    own = OwnSymbols(*symbols)
    assert (list(own), len(own), own[0]) == (list(symbols), 4, symbols[0])
    assert [info.name for info in own.to_onnx()] == [symbol.name for symbol in symbols]

    class Plain(KVCacheInputSymbols):
        """No dataclass."""

    with pytest.raises(BindingError, match=r"Plain: expected a dataclass .* decorate it"):
        list(Plain())


# -- what the pages say differently from each other


@pytest.mark.parametrize("kind", [ContinuousBatchingKVCacheManager, PaddedKVCacheManager])
@pytest.mark.parametrize("number", [3, np.int64(3), True])
def test_a_number_is_no_request(kind: Callable[..., Any], number: Any) -> None:
    manager = kind(make_params(), 4, 16)
    text = rf"expected the id of a request, got the number {number}; claim_slots\({number}\)"
    for call in (lambda: manager.claim(number), lambda: manager.claim(n=number)):
        with pytest.raises(RequestError, match=text):
            call()
    assert manager.slots_remaining == {0, 1, 2, 3}


@pytest.mark.parametrize("number", [0, 5])
def test_slots_of_a_padded_cache_are_claimed_all_or_none(number: int) -> None:
    manager = PaddedKVCacheManager(make_params(), 4, 16)
    with pytest.raises((RequestError, RuntimeError), match="claim_slots: expected"):
        manager.claim_slots(number)
    with pytest.raises(RequestError, match=r"free slots of \[0, 1, 2, 3\], got \[0, 4\]"):
        manager.external_claim([0, 4])
    assert manager.claim_slots(2) == [0, 1]
    manager.external_claim([3])
    assert manager.slots_remaining == {2}
    manager.release(0)
    manager.claim("a")
    assert manager.get_req_blocks("a") == [0]


def test_managers_of_pages_have_no_slots() -> None:
    paged = PagedKVCacheManager(make_params(), None, 4, max_batch_size=1)
    for manager in (paged, NullKVCacheManager(make_params(), 1, 16)):
        calls: list[Callable[[], Any]] = [
            lambda m=manager: m.claim_slots(1),  # type: ignore[misc]
            lambda m=manager: m.external_claim([0]),  # type: ignore[misc]
            lambda m=manager: m.slots_remaining,  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(UnsupportedError, match=rf"got {type(manager).__name__}; claim a"):
                call()


def test_the_second_argument_of_alloc() -> None:
    ctx = TextContext("a", range(5))
    null = NullKVCacheManager(make_params(), 1, 16)
    null.claim("a")
    null.alloc(ctx, 3)
    paged = PagedKVCacheManager(make_params(), None, 4, max_batch_size=1)
    paged.claim("a")
    with pytest.raises(RequestError, match=r"replica_idx below .*=1, got 3; give .* as num_steps="):
        paged.alloc(ctx, 3)
    paged.alloc(ctx, 0, num_steps=3)


def test_the_class_says_whether_a_batch_is_ragged() -> None:
    params = make_params()
    for kind, is_ragged in (
        (ContinuousBatchingKVCacheManager, True),
        (PaddedKVCacheManager, False),
    ):
        assert kind(params, 1, 16, is_ragged=is_ragged).is_ragged is is_ragged
        with pytest.raises(UnsupportedError, match=f"is_ragged: expected {is_ragged} .*got"):
            kind(params, 1, 16, is_ragged=not is_ragged)


@pytest.mark.parametrize(
    "kind", [NullKVCacheManager, ContinuousBatchingKVCacheManager, PaddedKVCacheManager]
)
def test_what_params_say_is_not_asked_for_again(kind: Callable[..., Any]) -> None:
    params = make_params(tp=2)
    manager = kind(params, 2, 16)
    assert (manager.devices, manager.num_layers) == (params.devices, params.num_layers)
    assert len(manager.input_symbols()) == 2
    other = kind(params, 2, 16, devices=make_params().devices)
    assert (len(other.devices), len(other.input_symbols())) == (1, 1)
    sizes = (kind.estimated_memory_size, (2, 16)), (kind.infer_optimal_batch_size, (16,))
    for figure, lengths in sizes:
        given = figure(params, *lengths, params.num_layers, 1 << 20, params.devices)
        assert figure(params, *lengths, None, 1 << 20) == given


def test_a_page_size_that_is_given_must_agree() -> None:
    assert NullKVCacheManager(make_params(), 2, 16).page_size == 4
    with pytest.raises(ParamsError, match="page_size: expected 4 from params, got 128"):
        NullKVCacheManager(make_params(), 2, 16, page_size=128)


def test_virtual_devices_win_over_those_of_params() -> None:
    null = NullKVCacheManager(make_params(), 2, 16, devices=virtual_devices("cuda:sm_90", 2))
    assert [str(record.kv_blocks.device) for record in null.input_symbols()] == ["cuda:0", "cuda:1"]


def test_a_parameter_under_two_names_at_once() -> None:
    with pytest.raises(TypeError, match="expected kv_blocks once, got blocks too"):
        RaggedKVCacheInputs(*[host(0)] * 0, kv_blocks=host(0), blocks=host(0))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values"):
        RaggedKVCacheInputs(*[host(0)] * 4, blocks=host(0))  # type: ignore[call-arg]
