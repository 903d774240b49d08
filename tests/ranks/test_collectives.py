"""all_reduce and all_gather of several ranks, each a thread of this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgraph.errors import KernelError, RankError
from kvgraph.ops import ALL_GATHER, ALL_REDUCE, native
from kvgraph.ops.group import Group, shared_bytes

Array = np.ndarray[Any, Any]
SHAPES = [(1, 8), (3, 100), (0, 16), (5, 0), (70, 1000), (1, 200_000)]
"""The last two are several pieces."""


def groups(size: int, timeout: float = 30.0, exits: Sequence[int] = ()) -> list[Group]:
    memory = np.zeros(shared_bytes(size), np.uint8)
    given = [-1] * size
    return [
        Group(memory, rank, size, list(map(os.dup, exits)) or given, timeout)
        for rank in range(size)
    ]


def together(own: list[Group], work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` gives, or raises, in a thread of each rank."""
    found: list[Any] = [None] * len(own)

    def run(rank: int) -> None:
        own[rank].enter()
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(own))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def values(rank: int, shape: tuple[int, int], dtype: Any) -> Array:
    return np.random.default_rng(rank).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_sum_of_all_ranks_and_a_residual(size: int, dtype: Any) -> None:
    residuals = [values(100, shape, dtype) for shape in SHAPES]

    def work(rank: int) -> list[Array]:
        return [
            native.run(ALL_REDUCE, values(rank, shape, dtype), residual, ranks=size)
            for shape, residual in zip(SHAPES, residuals, strict=True)
        ]

    found = together(groups(size), work)
    for index, (shape, residual) in enumerate(zip(SHAPES, residuals, strict=True)):
        total = np.zeros(shape, np.float32)
        for rank in range(size):
            total += values(rank, shape, dtype).astype(np.float32)
        total += residual.astype(np.float32)
        for rank in range(size):
            assert found[rank][index].tobytes() == total.astype(dtype).tobytes()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_columns_of_all_ranks(size: int) -> None:
    def work(rank: int) -> list[Array]:
        return [
            native.run(ALL_GATHER, values(rank, shape, "f4"), ranks=size, out_width=size * shape[1])
            for shape in SHAPES
        ]

    found = together(groups(size), work)
    for index, shape in enumerate(SHAPES):
        whole = np.concatenate([values(rank, shape, "f4") for rank in range(size)], axis=1)
        for rank in range(size):
            np.testing.assert_array_equal(found[rank][index], whole)


def test_references_are_of_one_rank() -> None:
    x, residual = values(0, (3, 8), "f4"), values(1, (3, 8), "f4")
    (alone,) = groups(1)
    alone.enter()
    np.testing.assert_array_equal(
        ALL_REDUCE.reference(x, residual, ranks=1), native.run(ALL_REDUCE, x, residual, ranks=1)
    )
    np.testing.assert_array_equal(
        ALL_GATHER.reference(x, ranks=1, out_width=8),
        native.run(ALL_GATHER, x, ranks=1, out_width=8),
    )
    with pytest.raises(KernelError, match=r"all_reduce: ranks: expected 1 .* got 2"):
        ALL_REDUCE.reference(x, ranks=2)


def test_a_thread_without_a_group_is_refused() -> None:
    def outside() -> None:
        with pytest.raises(KernelError, match="expected one of 2 ranks on this thread, got no"):
            native.run(ALL_REDUCE, np.ones((1, 4), np.float32), ranks=2)

    thread = threading.Thread(target=outside)
    thread.start()
    thread.join()


def test_a_group_of_another_size_is_refused() -> None:
    groups(3)[0].enter()
    with pytest.raises(KernelError, match="a group of 2 ranks from the graph, got one of 3"):
        native.run(ALL_REDUCE, np.ones((1, 4), np.float32), ranks=2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rank": 5}, "rank: expected 0 to 1, got 5"),
        ({"rank": -1}, "rank: expected 0 to 1, got -1"),
        ({"memory": None}, "memory: expected data, got a null pointer"),
        ({"size": 65}, "expected a group of 2 ranks from the graph, got one of 65"),
    ],
)
def test_a_group_that_is_not_whole_is_refused(
    changes: dict[str, int | None], sentence: str
) -> None:
    """Not read, nor said to have failed."""
    group = groups(2)[0]
    for field, value in changes.items():
        setattr(group._group, field, value)
    x = np.ones((1, 8), np.float32)
    (error,) = together([group], lambda rank: native.run(ALL_REDUCE, x, ranks=2))
    assert str(error) == f"all_reduce: {sentence}"
    group.abort()
    group.require_whole()


@pytest.mark.parametrize("ranks", [0, 65])
def test_a_graph_of_more_ranks_than_meet_is_refused(ranks: int) -> None:
    sentence = f"all_reduce: ranks: expected 1 to 64, got {ranks}"
    with pytest.raises(KernelError, match=sentence):
        native.run(ALL_REDUCE, np.ones((1, 8), np.float32), ranks=ranks)


def test_no_group_has_no_bytes_and_nothing_to_say() -> None:
    assert [shared_bytes(size) for size in (-1, 0, 65)] == [0, 0, 0]
    assert shared_bytes(64) > shared_bytes(1) > 0
    dll = native.library().dll
    dll.kvg_cpu_abort_group(None)
    assert dll.kvg_cpu_group_broken(None) == 0


def test_a_width_that_does_not_fit_is_refused() -> None:
    groups(2)[0].enter()
    with pytest.raises(KernelError, match=r"out_width: expected 8.* got 9"):
        native.run(ALL_GATHER, np.ones((1, 4), np.float32), ranks=2, out_width=9)


def test_ranks_of_different_steps_are_refused() -> None:
    def work(rank: int) -> Array:
        found: Array = native.run(ALL_REDUCE, np.ones((1, 4 + rank), np.float32), ranks=2)
        return found

    found = together(groups(2), work)
    assert all(isinstance(error, KernelError) for error in found)
    assert "expected 16 bytes from rank 1 as of this one, got 20" in str(found[0])


def test_a_rank_that_does_not_come_is_named() -> None:
    own = groups(3, timeout=1.0)

    def work(rank: int) -> Array | None:
        if rank == 1:
            return None
        found: Array = native.run(ALL_REDUCE, np.ones((1, 4), np.float32), ranks=3)
        return found

    found = together(own, work)
    for rank in (0, 2):
        assert "expected rank 1 of 3 within 1 s (--collective-timeout)" in str(found[rank])
    for group in own:
        with pytest.raises(RankError, match=r"rank 1: .* got nothing from it in 1 s"):
            group.require_whole()


def test_a_negative_timeout_is_refused() -> None:
    group = groups(2)[0]
    group._group.timeout_ms = -1
    group.enter()
    with pytest.raises(KernelError, match="all_reduce: timeout_ms: expected at least 0, got -1"):
        native.run(ALL_REDUCE, np.ones((1, 4), np.float32), ranks=2)


@pytest.mark.parametrize("timeout_ms", [2**63 // 10**6, 2**63 - 1])
def test_the_longest_timeouts_wait(timeout_ms: int) -> None:
    """Such times in nanoseconds do not fit 64 bits."""
    own = groups(2)
    for group in own:
        group._group.timeout_ms = timeout_ms

    def work(rank: int) -> Array:
        time.sleep(0.2 * rank)
        found: Array = native.run(ALL_REDUCE, np.ones((1, 4), np.float32), ranks=2)
        return found

    for found in together(own, work):
        np.testing.assert_array_equal(found, np.full((1, 4), 2))


def test_a_rank_that_fails_fails_all_at_once() -> None:
    own = groups(2)

    def work(rank: int) -> Array | None:
        if rank == 1:
            own[1].abort()
            return None
        found: Array = native.run(ALL_REDUCE, np.ones((1, 4), np.float32), ranks=2)
        return found

    found = together(own, work)
    assert "expected rank 1 of 2 to take part, got its failure" in str(found[0])
    with pytest.raises(RankError, match=r"rank 1: .* got its failure"):
        own[0].require_whole()


def test_a_process_that_has_ended_is_not_waited_for() -> None:
    exit, end = os.pipe()
    os.write(end, b"x")  # readable, as a pidfd is once its process has ended
    own = groups(2, exits=(exit, exit))
    own[0].enter()
    with pytest.raises(KernelError, match="rank 1 of 2 to take part, got the end of its process"):
        native.run(ALL_REDUCE, np.ones((1, 4), np.float32), ranks=2)
    os.close(exit)
    os.close(end)
