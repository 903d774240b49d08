"""What the pages of the API say differently from each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgraph import (
    ContinuousBatchingKVCacheManager,
    KVCacheManager,
    NullKVCacheManager,
    PaddedKVCacheManager,
    PagedKVCacheManager,
    RaggedKVCacheInputs,
    TextContext,
    virtual_devices,
)
from kvgraph.errors import ParamsError, RequestError, UnsupportedError
from tests.kv.own_manager import OwnManager, host
from tests.support.builders import make_params


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


ALL_KINDS = [
    PaddedKVCacheManager,
    PagedKVCacheManager,
    ContinuousBatchingKVCacheManager,
    NullKVCacheManager,
    OwnManager,
]


def make_kind(kind: Any) -> Any:
    if kind is PagedKVCacheManager:
        return kind(make_params(), None, 4, max_batch_size=2)
    return kind(make_params(), 2, 16)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_manager_takes_the_bases_parameters(kind: Any) -> None:
    for name, method in inspect.getmembers(KVCacheManager, inspect.isroutine):
        if name.startswith("_"):
            continue
        expected, found = (
            [(each.name, each.kind) for each in inspect.signature(one).parameters.values()]
            for one in (method, getattr(kind, name))
        )
        assert found[: len(expected)] == expected, name


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_manager_takes_the_bases_other_names(kind: Any) -> None:
    manager, ctx = make_kind(kind), TextContext("a", [1])
    manager.claim("a")
    manager.alloc(ctx)
    if kind is PagedKVCacheManager:  # every decode step calls it
        manager.step([ctx])
    else:
        manager.step(batch=[ctx])
    assert manager.contains(seq_id="a")
    manager.release(seq_id="a")
    assert not manager.contains(seq_id="a")
