"""What the pages of the API mean to be subclassed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvgraph import (
    Buffer,
    KVCacheInputs,
    KVCacheInputSymbols,
    KVCacheManager,
    TextContext,
)
from kvgraph.errors import BindingError, ParamsError, RequestError, UnsupportedError
from kvgraph.kv.paged import PagedKVCacheManager
from tests.kv.own_manager import OwnInputs, OwnManager, OwnSymbols, host
from tests.support.builders import make_params


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
    other = host(3)
    assert Fewer(host(0)).unflatten([other]) == Fewer(other)

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


class OwnSession:
    """A session of one's own, as `SessionInterface` describes it, with mistakes."""

    def __init__(self, memory: object, identity: object = b"own") -> None:
        self.memory, self.identity = memory, identity

    def allocate(self, symbol: object, sizes: object) -> object:
        return self.memory


@pytest.mark.parametrize("memory", [None, np.zeros(3)])
def test_a_session_that_allocates_no_buffers(memory: object) -> None:
    session: Any = OwnSession(memory)
    got = type(memory).__name__
    message = f"^kv_blocks: expected a Buffer from OwnSession.allocate, got {got}$"
    with pytest.raises(BindingError, match=message):
        PagedKVCacheManager(make_params(), session, 8, max_batch_size=1)


def test_an_identity_is_bytes() -> None:
    session: Any = OwnSession(None, "own")
    with pytest.raises(ParamsError, match=r"^identity: expected bytes, got str$"):
        PagedKVCacheManager(make_params(), session, 8, max_batch_size=1)
