"""Collectives of ranks that share no memory: by gloo between threads, and what they say."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from kvgraph.errors import KernelError, RankError
from kvgraph.ops import ALL_GATHER, ALL_REDUCE, native
from kvgraph.ops.group import Group, shared_bytes
from kvgraph.runtime.ranks.gloo import Gloo
from tests.ranks.test_collectives import SHAPES, together, values
from tests.ranks.test_collectives import groups as in_shared_memory

HERE = "127.0.0.1"


@pytest.fixture
def joined() -> Iterator[Callable[..., list[Group]]]:
    """`joined(size, timeout)`: groups of as many ranks, each a thread, over gloo."""
    made: list[Group] = []

    def join(size: int, timeout: float = 30.0) -> list[Group]:
        store = dist.HashStore()
        gathers: list[Gloo | None] = [None] * size

        def meet(rank: int) -> None:
            gathers[rank] = Gloo(store, rank, size, HERE, timeout)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        exits = [[-1] * size for _ in range(size)]
        for a, b in itertools.combinations(range(size), 2):
            ends = socket.socketpair()
            exits[a][b], exits[b][a] = (end.detach() for end in ends)
        made.extend(
            Group(np.zeros(shared_bytes(size), np.uint8), r, size, exits[r], timeout, gathers[r])
            for r in range(size)
        )
        return made

    yield join
    for group in made:
        group.close()


@pytest.mark.parametrize("size", [2, 3])
def test_bits_are_those_of_shared_memory(size: int, joined: Callable[..., list[Group]]) -> None:
    residuals = [values(100, shape, "f4") for shape in SHAPES]

    def work(rank: int) -> list[bytes]:
        found = []
        for shape, residual in zip(SHAPES, residuals, strict=True):
            x = values(rank, shape, "f4")
            found.append(native.run(ALL_REDUCE, x, residual, ranks=size).tobytes())
            joint = native.run(ALL_GATHER, x, ranks=size, out_width=size * shape[1])
            found.append(joint.tobytes())
        return found

    expected = together(in_shared_memory(size), work)
    assert together(joined(size), work) == expected
    assert isinstance(expected[0], list)


def reduced(rank: int, size: int) -> Any:
    return native.run(ALL_REDUCE, np.ones((1, 4), np.float32), ranks=size)


def test_a_rank_that_does_not_come_is_named(joined: Callable[..., list[Group]]) -> None:
    """The others tell each other that they wait, so that none takes another for it."""
    own = joined(4, 2.0)
    found = together(own, lambda rank: None if rank == 2 else reduced(rank, 4))
    for rank in (0, 1, 3):
        assert "expected rank 2 of 4 within 2 s (--collective-timeout)" in str(found[rank])
        with pytest.raises(RankError, match=r"rank 2: .* got nothing from it in 2 s"):
            own[rank].require_whole()
    with pytest.raises(RankError, match=r"rank 2: .* got nothing from it"):
        own[2].require_whole()  # it was told


def test_a_rank_that_fails_fails_all_at_once(joined: Callable[..., list[Group]]) -> None:
    own = joined(3)

    def work(rank: int) -> Any:
        return own[1].abort() if rank == 1 else reduced(rank, 3)

    found = together(own, work)
    for rank in (0, 2):
        assert "expected rank 1 of 3 to take part, got its failure" in str(found[rank])


def test_the_end_of_a_rank_is_told_of_by_those_who_saw_it(
    joined: Callable[..., list[Group]],
) -> None:
    """Rank 2 hears of it from rank 0, which ends because of it."""
    own = joined(3)

    def work(rank: int) -> Any:
        if rank == 1:
            with socket.socket(fileno=os.dup(own[1]._exits[0])) as lifeline:
                lifeline.shutdown(socket.SHUT_RDWR)
            return None
        if rank == 2:
            time.sleep(0.5)
        return reduced(rank, 3)

    found = together(own, work)
    for rank in (0, 2):
        assert "rank 1 of 3 to take part, got the end of its process" in str(found[rank])


class Carrier:
    """Carries zeros after `waits` waits, or raises an error."""

    def __init__(self, error: BaseException | None, waits: int = 5) -> None:
        self.error, self.waits = error, waits

    def start(self, parts: Sequence[Any]) -> None:
        if self.error is not None:
            raise self.error

    def wait(self, seconds: float) -> bool:
        self.waits -= 1
        return self.waits < 0

    def close(self) -> None:
        pass


@pytest.fixture
def alone() -> Iterator[Callable[[BaseException | None], Group]]:
    """`alone(error)`: rank 0 of two, with a Carrier; the other rank says nothing."""
    near, far = socket.socketpair()

    def enter(error: BaseException | None) -> Group:
        memory = np.zeros(shared_bytes(2), np.uint8)
        group = Group(memory, 0, 2, [-1, near.detach()], 30.0, Carrier(error))
        group.enter()
        return group

    with near, far:
        yield enter


@pytest.mark.parametrize("timeout_ms", [2**63 // 10**6, 2**63 - 1])
def test_the_longest_timeouts_wait(
    timeout_ms: int, alone: Callable[[BaseException | None], Group]
) -> None:
    alone(None)._group.timeout_ms = timeout_ms
    assert native.run(ALL_REDUCE, np.ones((1, 4), np.float32), ranks=2).tolist() == [[1] * 4]


def test_what_carries_pieces_fails(alone: Callable[[BaseException | None], Group]) -> None:
    group = alone(RuntimeError("no route to host"))
    with pytest.raises(KernelError, match="rank 0 of 2 to reach all others, got a failure of what"):
        reduced(0, 2)
    sentence = (
        r"rank 0: .*got a failure of what carries it between the machines \(no route to host\)"
    )
    with pytest.raises(RankError, match=sentence):
        group.require_whole()


def test_an_interrupt_in_a_collective_is_not_lost(
    alone: Callable[[BaseException | None], Group],
) -> None:
    group = alone(KeyboardInterrupt())
    with pytest.raises(KernelError):
        reduced(0, 2)
    with pytest.raises(KeyboardInterrupt):
        group.require_whole()
    with pytest.raises(RankError, match=r"rank 0: .*got a failure of what carries it"):
        group.require_whole()


class Late:
    """Work of gloo that is done in the moment in which a wait for it ends."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waits = error, 0

    def wait(self, *limit: Any) -> None:
        self.waits += 1
        if self.waits == 1 or self.error:
            raise RuntimeError(self.error if self.waits > 1 else "Operation timed out!")

    def is_completed(self) -> bool:
        return self.waits > 0


def test_closing_does_not_wait_for_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure its threads may wait for a rank until its own deadline."""
    may_end, has_ended = threading.Event(), threading.Event()

    class Waiting:
        def __del__(self) -> None:
            may_end.wait(20)
            has_ended.set()

    monkeypatch.setattr("kvgraph.runtime.ranks.gloo.CLOSING_SECONDS", 0.1)
    gloo = object.__new__(Gloo)
    gloo._work, gloo._group = None, Waiting()  # type: ignore[assignment]
    gloo.close()
    gloo.close()
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(20)


def test_pieces_that_come_as_a_wait_ends() -> None:
    gloo = object.__new__(Gloo)
    gloo._work = Late()  # type: ignore[assignment]
    assert gloo.wait(0.1)
    gloo._work = Late("Connection closed")  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="Connection closed"):
        gloo.wait(0.1)
