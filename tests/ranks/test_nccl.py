"""Ranks on GPUs wait for each other, where there is no GPU: streams and NCCL are stand-ins."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch.distributed is what waits")

import torch.distributed as dist  # noqa: E402

from kvgraph.errors import RankError  # noqa: E402
from kvgraph.ops.group import Group, _entered, entered, shared_bytes  # noqa: E402
from kvgraph.runtime.sessions import nccl  # noqa: E402
from tests.ranks.test_collectives import groups  # noqa: E402


class Stream:
    """Its work has run after so many looks; None: never."""

    def __init__(self, looks: int | None) -> None:
        self.looks, self.asked, self.synchronized = looks, 0, 0

    def record_event(self) -> Any:
        return types.SimpleNamespace(query=self._query)

    def _query(self) -> bool:
        self.asked += 1
        return self.looks is not None and self.asked > self.looks

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture(autouse=True)
def _no_group_stays() -> Iterator[None]:
    before = entered()
    yield
    _entered.group = before


def test_nccls_own_deadline_is_behind_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgraph.runtime.ranks.sessions import COLLECTIVE_TIMEOUT

    given: dict[str, Any] = {}
    monkeypatch.setattr(nccl, "_register", lambda: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more))
    nccl.join(1, 2)
    assert COLLECTIVE_TIMEOUT < given.pop("timeout").total_seconds() < 600
    assert given == {"rank": 1, "world_size": 2, "device_id": torch.device("cuda", 1)}


def test_one_rank_waits_for_its_stream_alone() -> None:
    """Though the thread may have run a rank of another artifact before."""
    groups(2)[0].enter()
    entered().abort()  # type: ignore[union-attr]
    stream: Any = Stream(None)
    nccl.settle(stream, 1)
    assert (stream.synchronized, stream.asked) == (1, 0)


def test_a_step_that_ends_is_waited_for() -> None:
    groups(2)[0].enter()
    stream: Any = Stream(3)
    nccl.settle(stream, 2)
    assert (stream.synchronized, stream.asked) == (0, 4)


@pytest.mark.parametrize(
    ("happens", "sentence"),
    [
        ("ended", "rank 1: expected it to take part, got the end of its process; start all"),
        ("failed and ended", "rank 1: .* got its failure; its own message says why; start all"),
        ("late", r"rank 0: .* of 2 ranks in 0\.2 s \(--collective-timeout\), got none; start all"),
    ],
)
def test_a_rank_that_does_not_come_is_not_waited_for(happens: str, sentence: str) -> None:
    exit, end = os.pipe()
    memory = np.zeros(shared_bytes(2), np.uint8)
    own, other = (Group(memory, rank, 2, [-1, os.dup(exit)], 0.2) for rank in range(2))
    own.enter()
    if "failed" in happens:
        other.abort()
    if "ended" in happens:
        os.write(end, b"x")  # readable, as a pidfd is once its process has ended
    stream: Any = Stream(None)
    with pytest.raises(RankError, match=f"^{sentence}"):
        nccl.settle(stream, 2)
    os.close(exit)
    os.close(end)
