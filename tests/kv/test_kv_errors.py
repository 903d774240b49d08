"""Every error line of the spec: its type, both values in the text, and an unchanged manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgraph.contract.devices import Device
from kvgraph.contract.inputs import BatchCharacteristics
from kvgraph.errors import (
    CapacityError,
    InsufficientPagesError,
    KVGraphError,
    ParamsError,
    RequestError,
)
from kvgraph.kv.continuous import ContinuousBatchingKVCacheManager
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from tests.support.builders import make_manager, make_params, snapshot, start


def fails(
    manager: PagedKVCacheManager, call: Callable[[], Any], kind: type[Exception], text: str
) -> Exception:
    """The call raises `kind` with a text that matches, and leaves the manager as it was."""
    before = snapshot(manager)
    with pytest.raises(kind, match=text) as caught:
        call()
    assert isinstance(caught.value, KVGraphError)
    assert "\n" not in str(caught.value)
    assert snapshot(manager) == before
    return caught.value


@pytest.fixture(params=[False, True], ids=["plain", "prefix caching"])
def manager(request: pytest.FixtureRequest) -> PagedKVCacheManager:
    return make_manager(pages=6, rows=3, dp=2, enable_prefix_caching=request.param)


def test_claim_twice_names_the_replica(manager: PagedKVCacheManager) -> None:
    manager.claim("a", 1)
    for replica in (0, 1):
        text = r"claim of 'a': expected .*not claimed, got one claimed on replica 1"
        fails(manager, lambda r=replica: manager.claim("a", r), ValueError, text)
        fails(manager, lambda r=replica: manager.alloc_dummy("a", r), ValueError, text)


def test_no_row_left(manager: PagedKVCacheManager) -> None:
    for name in "abc":
        manager.claim(name)
    fails(manager, lambda: manager.claim("d"), RuntimeError, "'d'.*max_batch_size=3.*got none")
    manager.claim("d", 1)


@pytest.mark.parametrize("call", ["alloc", "alloc_batch", "runtime_inputs", "step", "release"])
@pytest.mark.parametrize("where", ["nowhere", "on the other replica", "released"])
def test_use_of_a_request_that_is_not_claimed_here(
    manager: PagedKVCacheManager, call: str, where: str
) -> None:
    ctx = TextContext("a", [1, 2])
    if where != "nowhere":
        manager.claim("a", 1)
        manager.alloc(ctx, 1)
    if where == "released":
        manager.release("a", 1)
    calls = {
        "alloc": lambda: manager.alloc(ctx, 0),
        "alloc_batch": lambda: manager.alloc_batch([[ctx], []]),
        "runtime_inputs": lambda: manager.runtime_inputs([[ctx], []]),
        "step": lambda: manager.step([[ctx], []]),
        "release": lambda: manager.release("a", 0),
    }
    got = "claimed on replica 1" if where == "on the other replica" else "not claimed"
    text = f"{call} of 'a': expected a request claimed on replica 0, got one .*{got}"
    fails(manager, calls[call], ValueError, text)
    fails(manager, lambda: manager.get_req_blocks("a", 0), ValueError, got)


def test_too_few_free_pages(manager: PagedKVCacheManager) -> None:
    start(manager, "a", range(14))
    b = TextContext("b", range(9))
    manager.claim("b")
    text = r"'b'.*expected 3 free pages on replica 0, got 2 \(4 used of 6"
    error = fails(manager, lambda: manager.alloc(b), RuntimeError, text)
    assert isinstance(error, InsufficientPagesError)
    assert (error.needed, error.free, error.used, error.total) == (3, 2, 4, 6)
    fails(manager, lambda: manager.alloc_batch([[b], []]), InsufficientPagesError, text)
    assert (b.processed_length, b.active_length) == (0, 9)


def test_a_batch_is_allocated_as_a_whole(manager: PagedKVCacheManager) -> None:
    batches = []
    for replica in (0, 1):
        ctx = TextContext(f"r{replica}", range(8 + 20 * replica))
        manager.claim(ctx.request_id, replica)
        batches.append([ctx])
    text = "expected a request of at most the whole pool of 6 pages, got one that needs 7"
    fails(manager, lambda: manager.alloc_batch(batches), InsufficientPagesError, text)


def test_tables_are_widened_once_all_replicas_have_pages() -> None:
    """A table has 16 columns at first: the first request widens it, and the second fails."""
    manager = make_manager(pages=20, rows=1, dp=2)
    batches = [[TextContext("a", range(17 * 4))], [TextContext("b", range(21 * 4))]]
    manager.claim("a", 0)
    manager.claim("b", 1)
    fails(manager, lambda: manager.alloc_batch(batches), InsufficientPagesError, "needs 21")
    batches[1][0].active_length = 4
    manager.alloc_batch(batches)
    assert [leaf.table.shape[1] for leaf in manager._replicas[0].leaves] == [20]


def test_larger_than_the_whole_pool(manager: PagedKVCacheManager) -> None:
    ctx = TextContext("a", range(25))
    manager.claim("a")
    text = "'a'.*whole pool of 6 pages, got one that needs 7"
    fails(manager, lambda: manager.alloc(ctx), InsufficientPagesError, text)


def test_runtime_inputs_before_alloc(manager: PagedKVCacheManager) -> None:
    ctx = TextContext("a", range(5))
    manager.claim("a")
    text = "'a': expected pages for 5 tokens, got 0 for 0; call `alloc` first"
    fails(manager, lambda: manager.runtime_inputs([[ctx], []]), CapacityError, text)
    manager.alloc(ctx)
    ctx.update(*range(4))
    text = "'a': expected pages for 9 tokens, got 2 for 8; call `alloc` first"
    fails(manager, lambda: manager.runtime_inputs([[ctx], []]), RuntimeError, text)
    manager.alloc(ctx)
    text = "'a': expected pages for 13 tokens, got 3 for 12"
    fails(manager, lambda: manager.runtime_inputs([[ctx], []], num_steps=5), RuntimeError, text)


@pytest.mark.parametrize("call", ["alloc_batch", "runtime_inputs", "step"])
def test_batches_of_the_wrong_size(manager: PagedKVCacheManager, call: str) -> None:
    function = getattr(manager, call)
    contexts = [start(manager, name, [1]) for name in "abc"]
    text = f"{call}: expected 2 replica batches .*got"
    fails(manager, lambda: function([contexts]), ValueError, text + " 1")
    fails(manager, lambda: function([contexts, [], []]), ValueError, text + " 3")
    four = [*contexts, TextContext("d", [1])]
    text = f"{call}: expected at most max_batch_size=3 rows for replica 0, got 4"
    fails(manager, lambda: function([four, []]), ValueError, text)
    twice = [contexts[0], contexts[1], contexts[0]]
    fails(manager, lambda: function([twice, []]), ValueError, "'a' twice")


def test_max_cache_length(manager: PagedKVCacheManager) -> None:
    ctx = start(manager, "a", range(9))
    for given, text in (
        (0, "expected at least 9 tokens .*got 0"),
        (8, "expected at least 9 tokens .*got 8"),
        (25, "at most the 6 pages of the pool, got 25 tokens in 7 pages"),
    ):
        fails(
            manager,
            lambda given=given: manager.runtime_inputs([[ctx], []], max_cache_length=given),
            ValueError,
            f"max_cache_length: .*{text}",
        )


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ((0, 9, 9), "batch_size: expected at least 1 .*got 0"),
        ((1, 8, 9), "max_prompt_length: expected at least 9 .*got 8"),
        ((1, 9, 8), "max_cache_valid_length: expected at least 9 .*got 8"),
        ((1, 9, 25), "lookup_table: expected at most 6 pages .*got 7"),
    ],
)
def test_batch_characteristics(
    manager: PagedKVCacheManager, bounds: tuple[int, int, int], text: str
) -> None:
    ctx = start(manager, "a", range(9))
    given = BatchCharacteristics(*bounds)
    fails(
        manager,
        lambda: manager.runtime_inputs([[ctx], []], batch_characteristics=given),
        ValueError,
        text,
    )


def test_max_seq_len() -> None:
    manager = make_manager(pages=6, max_seq_len=10)
    ctx = TextContext("a", range(9))
    manager.claim("a")
    text = r"max_seq_len=10 tokens, got 11 \(processed 0 \+ active 9 \+ further steps 2\)"
    fails(manager, lambda: manager.alloc(ctx, num_steps=3), ValueError, text)
    manager.alloc(ctx, num_steps=2)
    ctx.update(1, 2)
    fails(manager, lambda: manager.alloc_batch([[ctx]]), ValueError, "max_seq_len=10.*got 11")


def test_numbers_out_of_range(manager: PagedKVCacheManager) -> None:
    ctx = start(manager, "a", range(5))
    fails(manager, lambda: manager.alloc(ctx, num_steps=0), ValueError, "num_steps: .*got 0")
    fails(manager, lambda: manager.alloc(ctx, lookahead=-1), ValueError, "lookahead: .*got -1")
    text = "replica_idx below data_parallel_degree=2, got"
    fails(manager, lambda: manager.claim("b", 2), ValueError, text + " 2")
    fails(manager, lambda: manager.num_free_blocks(-1), ValueError, text + " -1")
    ctx.processed_length = 4
    fails(manager, lambda: manager.alloc(ctx), ValueError, "active_length.*0 to 1 .*got 5")


def test_a_released_request_must_be_rewound(manager: PagedKVCacheManager) -> None:
    ctx = start(manager, "a", range(5))
    ctx.update(1)
    manager.release("a")
    manager.claim("a")
    text = "processed_length 0 of a request that owns no page, got 5; call `rewind`"
    fails(manager, lambda: manager.alloc(ctx), RequestError, text)
    ctx.rewind()
    manager.alloc(ctx)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"total_num_pages": 0}, "total_num_pages: expected >= 1, got 0"),
        ({"total_num_pages": 1 << 31}, "total_num_pages: expected at most 2147483646, got"),
        ({"max_batch_size": 0}, "max_batch_size: expected >= 1, got 0"),
        ({"max_seq_len": 0}, "max_seq_len: expected >= 1, got 0"),
        ({"total_num_pages": 2.5}, "total_num_pages: expected an integer >= 1, got float 2.5"),
        ({"total_num_pages": None}, "total_num_pages: expected an integer >= 1, got NoneType None"),
        (
            {"total_num_pages": {"": 2.5}},
            "total_num_pages: expected an integer >= 1, got float 2.5",
        ),
        (
            {"total_num_host_pages": "8"},
            "total_num_host_pages: expected an integer >= 0, got str '8'",
        ),
        ({"max_batch_size": 2.5}, "max_batch_size: expected an integer >= 1, got float 2.5"),
        ({"max_seq_len": 2.5}, "max_seq_len: expected an integer >= 1, got float 2.5"),
    ],
)
def test_construction(changes: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"total_num_pages": 1, "max_batch_size": 1}
    with pytest.raises(ParamsError, match=text):
        PagedKVCacheManager(make_params(), None, **(arguments | changes))


@pytest.mark.parametrize("kind", [ContinuousBatchingKVCacheManager, PaddedKVCacheManager])
def test_other_managers_refuse_what_they_lack(kind: Any) -> None:
    params = make_params(enable_prefix_caching=True)
    with pytest.raises(ValueError, match=r"enable_prefix_caching: expected False .*got True"):
        kind(params, 2, 16, 2, params.devices, None)


def test_numbers_of_numpy_are_numbers() -> None:
    eight = np.int64(8)
    manager = PagedKVCacheManager(make_params(), None, eight, max_batch_size=eight)
    assert (manager.total_num_pages, manager.max_batch_size) == (8, 8)
    assert type(manager.max_batch_size) is int


@pytest.mark.parametrize("kind", [ContinuousBatchingKVCacheManager, PaddedKVCacheManager])
@pytest.mark.parametrize("name", ["max_batch_size", "max_seq_len"])
def test_sizes_of_managers_of_slots(kind: Any, name: str) -> None:
    for value, text in ((0, ">= 1, got 0"), (-8, ">= 1, got -8"), (2.5, "an integer >= 1, got")):
        with pytest.raises(ParamsError, match=f"^{name}: expected {text}"):
            kind(make_params(), **({"max_batch_size": 2, "max_seq_len": 8} | {name: value}))


def test_more_memory_than_there_is_is_one_sentence() -> None:
    text = r"^k_cache: expected .* [GT]iB of host memory for \[2, 2, 10+, 2, 8\], which the system"
    with pytest.raises(CapacityError, match=text):
        PaddedKVCacheManager(make_params(), 2, 10**15)


def test_a_key_that_cannot_be_hashed(manager: PagedKVCacheManager) -> None:
    key: Any = ["x"]
    text = r"request_id: expected a hashable key, got \['x'\]"
    fails(manager, lambda: manager.claim(key), RequestError, text)
    with pytest.raises(RequestError, match=text):
        PaddedKVCacheManager(make_params(), 2, 8).claim(key)


@pytest.mark.parametrize("kind", ["paged", "continuous", "padded"])
@pytest.mark.parametrize("call", ["release", "contains"])
def test_a_key_that_no_request_can_have(manager: PagedKVCacheManager, kind: str, call: str) -> None:
    one: Any = manager if kind == "paged" else one_of_slots(kind)
    with pytest.raises(RequestError, match=r"^request_id: expected a hashable key, got \['x'\]$"):
        getattr(one, call)(["x"])


@pytest.mark.parametrize("value", [1.5, "1", None, True])
def test_numbers_of_calls_are_whole(manager: PagedKVCacheManager, value: Any) -> None:
    ctx = start(manager, "a", range(5))
    batches = [[ctx], []]
    calls: dict[str, Callable[[], Any]] = {
        "num_steps": lambda: manager.alloc(ctx, num_steps=value),
        "lookahead": lambda: manager.alloc_batch(batches, lookahead=value),
        "claim: replica_idx": lambda: manager.claim("z", value),
        "alloc: replica_idx": lambda: manager.alloc(ctx, value),
        "release: replica_idx": lambda: manager.release("a", value),
        "num_free_blocks: replica_idx": lambda: manager.num_free_blocks(value),
        "batch_characteristics.batch_size": lambda: BatchCharacteristics(value, 5, 5),
    }
    if value is not None:
        calls["max_cache_length"] = lambda: manager.runtime_inputs(batches, max_cache_length=value)
    said = f"expected an integer, got {type(value).__name__} {value!r}"
    for name, call in calls.items():
        fails(manager, call, RequestError, f"^{name}: {said}$")
    with pytest.raises(RequestError, match=f"^num_steps: {said}$"):
        manager.runtime_inputs(batches, num_steps=value)


def test_numpys_numbers_are_whole(manager: PagedKVCacheManager) -> None:
    ctx = start(manager, "a", range(5))
    one = np.int64(1)
    manager.alloc(ctx, num_steps=one, lookahead=one)  # type: ignore[arg-type]
    assert BatchCharacteristics(one, 2, 3) == BatchCharacteristics(1, 2, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ContinuousBatchingKVCacheManager, PaddedKVCacheManager])
def test_numbers_of_slots_are_whole(kind: Any) -> None:
    manager = kind(make_params(), 2, 8)
    with pytest.raises(
        RequestError, match=r"^claim_slots: expected an integer >= 1, got float 1\.0$"
    ):
        manager.claim_slots(1.0)
    with pytest.raises(RequestError, match=r"free slots of \[0, 1\], got \[0\.0\]"):
        manager.external_claim([0.0])
    with pytest.raises(RequestError, match=r"free slots of \[0, 1\], got \[True\]"):
        manager.external_claim([True])
    assert manager.slots_remaining == {0, 1}


@pytest.mark.parametrize("call", ["alloc_batch", "runtime_inputs", "step"])
@pytest.mark.parametrize("kind", ["paged", "continuous", "padded"])
def test_what_is_no_batch(kind: str, call: str) -> None:
    manager: Any = make_manager(pages=6)
    if kind != "paged":
        manager = one_of_slots(kind)
    function = getattr(manager, call)
    for given in (None, 5, [None], [5], {"a": 1}):
        with pytest.raises(RequestError, match=f"^{call}: expected a list of TextContexts for"):
            function(given)
    with pytest.raises(RequestError, match=f"^{call}: expected a TextContext, got str 'a'$"):
        function([["a"]])
    if call == "alloc_batch":
        with pytest.raises(RequestError, match=r"^alloc: expected a TextContext, got int 5$"):
            manager.alloc(5)


@pytest.mark.parametrize("call", ["alloc_batch", "runtime_inputs", "step"])
@pytest.mark.parametrize("kind", ["paged", "continuous", "padded"])
def test_an_empty_list_is_an_empty_batch(kind: str, call: str) -> None:
    """Of the only replica; two replicas have two batches."""
    manager: Any = make_manager() if kind == "paged" else one_of_slots(kind)
    getattr(manager, call)([])
    two: Any = make_manager(dp=2)
    with pytest.raises(RequestError, match=f"^{call}: expected 2 replica batches .* got 0$"):
        getattr(two, call)([])


def one_of_slots(kind: str) -> ContinuousBatchingKVCacheManager | PaddedKVCacheManager:
    kinds = {"continuous": ContinuousBatchingKVCacheManager, "padded": PaddedKVCacheManager}
    return kinds[kind](make_params(), 3, 24)


def test_a_part_of_a_request_that_is_none(manager: PagedKVCacheManager) -> None:
    ctx = start(manager, "a", range(9))
    ctx.processed_length = 1
    text = "^active_length of 'a': expected 0 to 8 tokens, the rest of 9, got 9$"
    fails(manager, lambda: manager.runtime_inputs([[ctx], []]), RequestError, text)


def test_bounds_that_are_none(manager: PagedKVCacheManager) -> None:
    ctx = start(manager, "a", range(9))
    bounds: Any = (1, 9, 9)
    text = r"^batch_characteristics: expected BatchCharacteristics, got tuple \(1, 9, 9\)$"
    call = lambda: manager.runtime_inputs([[ctx], []], batch_characteristics=bounds)  # noqa: E731
    fails(manager, call, RequestError, text)


@pytest.mark.parametrize(
    ("strategy", "manager"),
    [("continuous", "ContinuousBatchingKVCacheManager"), ("padded", "PaddedKVCacheManager")],
)
def test_a_paged_manager_refuses_other_caches(strategy: str, manager: str) -> None:
    text = (
        f"^cache_strategy: expected paged for PagedKVCacheManager, got {strategy}; use {manager}$"
    )
    with pytest.raises(ParamsError, match=text):
        PagedKVCacheManager(make_params(cache_strategy=strategy), None, 8, max_batch_size=1)


@pytest.mark.parametrize("kind", [ContinuousBatchingKVCacheManager, PaddedKVCacheManager])
def test_one_device_is_no_sequence(kind: Any) -> None:
    with pytest.raises(ParamsError, match=r"^devices: expected a sequence of Devices, got Device "):
        kind(make_params(), 2, 8, devices=Device("cpu"))
