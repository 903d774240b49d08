"""The memory of pages is touched some steps before requests take them."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine, SamplingParams
from kvgraph.kv.pool import first_touch
from kvgraph.kv.pool.first_touch import HUGE, SMALL, FirstTouch
from tests.support.artifacts import Compiled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's mincore")

PAGE = 1 << 20
PAGE_SIZE = 128
AROUND = 2 * HUGE
"""Bytes that are touched beyond what was asked: the system gives huge pages as a whole."""


def pool_of(pages: int) -> np.ndarray:
    """Zeros in memory of the system; `np.zeros` may give memory that was in use before."""
    memory = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8).reshape(pages, PAGE)


def resident(memory: np.ndarray) -> int:
    """Bytes of an array that the system has given."""
    first = -(-memory.ctypes.data // SMALL) * SMALL
    count = (memory.ctypes.data + memory.nbytes - first) // SMALL
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * SMALL), found)
    assert not failed, ctypes.get_errno()
    return sum(each & 1 for each in found) * SMALL


def require_populate() -> None:
    touch = FirstTouch(pool_of(8), PAGE_SIZE)
    touch.step(0, 8)
    if not touch.end:
        pytest.skip("needs Linux 5.14")


def test_pages_are_touched_a_part_at_a_time() -> None:
    require_populate()
    memory = pool_of(256)
    touch = FirstTouch(memory, PAGE_SIZE)
    before = resident(memory)
    assert before <= AROUND
    touch.step(0, 32)
    assert HUGE - SMALL <= touch.touched <= HUGE
    assert HUGE - SMALL <= resident(memory) <= touch.touched + AROUND
    for _ in range(PAGE_SIZE // 2):
        touch.step(0, 32)
    assert 32 * PAGE - SMALL <= touch.touched <= 32 * PAGE + HUGE
    assert 32 * PAGE - SMALL <= resident(memory) <= 32 * PAGE + AROUND
    touch.step(200, 1)  # pages before it were taken: requests touched them
    assert resident(memory[100:199]) <= AROUND
    assert resident(memory[200:201]) >= PAGE - SMALL


def test_no_byte_changes() -> None:
    require_populate()
    memory = pool_of(64)
    memory[::3] = 7
    touch = FirstTouch(memory, PAGE_SIZE)
    for _ in range(100):
        touch.step(0, 64)
    assert touch.touched == memory.nbytes - PAGE
    assert (memory[::3] == 7).all()
    assert not memory[1::3].any()
    assert not memory[2::3].any()


@pytest.mark.parametrize(("page", "rows"), [(64, 5), (0, 0), (63, 9), (0, 10_000)])
def test_nothing_is_touched_beyond_the_pool(page: int, rows: int) -> None:
    require_populate()
    memory = pool_of(256)
    touch = FirstTouch(memory[:64], PAGE_SIZE)
    for _ in range(200):
        touch.step(page, rows)
    assert touch.touched <= 64 * PAGE
    assert resident(memory[64:]) <= AROUND


def test_a_system_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(first_touch, "_madvise", lambda *given: asked.append(given) or -1)
    touch = FirstTouch(pool_of(64), PAGE_SIZE)
    for _ in range(3):
        touch.step(0, 8)
    assert len(asked) == 1
    monkeypatch.setattr(first_touch, "_madvise", None)
    FirstTouch(pool_of(64), PAGE_SIZE).step(0, 8)


def test_an_engine_touches_its_next_page(compiled: Compiled) -> None:
    require_populate()
    engine = Engine(kvgraph.load(compiled("tiny-llama")), num_pages=8000)
    buffers = engine.kv.get_device_buffer().all_buffers
    memory = buffers[0].handle
    size = memory[0].nbytes
    before = resident(memory[len(memory) // 2 :])
    engine.submit("The import statement", SamplingParams(max_new_tokens=200, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert resident(memory[1:2]) >= size - 2 * SMALL, "no request has the second page"
    assert resident(memory[len(memory) // 2 :]) <= before + AROUND
    engine.close()


def test_the_null_page_is_not_touched() -> None:
    """A full pool has no next page."""
    require_populate()
    memory = pool_of(65)
    touch = FirstTouch(memory, PAGE_SIZE)
    touch.step(64, 8)
    assert resident(memory) == 0
