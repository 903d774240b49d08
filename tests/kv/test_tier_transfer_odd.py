"""Messages of a sender or receiver that does not follow the protocol, or fails within it: one
sentence, and no wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest

from kvgraph.errors import DeviceError, TransferError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers import transfer
from kvgraph.kv.tiers.leaf_pools import LeafPools
from kvgraph.kv.tiers.transfer import PageTransfer
from tests.kv.test_tier_transfer import compute, manager


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"taken": Infinity}', "ValueError a count of pages that is none: inf"),
        (b'{"taken": -1}', "ValueError a count of pages that is none: -1"),
        (b'{"taken": 1.0}', "ValueError a count of pages that is none: 1.0"),
    ],
)
def test_a_count_that_is_none(answer: bytes, said: str) -> None:
    near, far = Pipe()
    far.send_bytes(answer)
    with pytest.raises(TransferError, match=said), transfer._unbroken(near):
        transfer._count(transfer._receive(near))
    assert near.closed


def test_a_page_that_is_too_long_is_not_in_the_sentence() -> None:
    near, far = Pipe()
    far.send_bytes(bytes(100))
    message = r"got a message that is too long$"
    with pytest.raises(TransferError, match=message) as caught, transfer._unbroken(near):
        near.recv_bytes_into(bytearray(10))
    assert caught.value.__cause__ is None
    assert near.closed


# -- a side that fails


def failing_once(call: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """`call`, but its second call raises."""
    numbers = count()

    def wrapper(*args: Any) -> Any:
        if next(numbers) == 1:
            raise error
        return call(*args)

    return wrapper


def exchange(
    sender: PagedKVCacheManager,
    ctx: TextContext,
    receiver: PagedKVCacheManager,
    ends: tuple[Connection, Connection],
) -> list[Any]:
    """What `send` and `receive` returned or raised."""
    results: list[Any] = [None, None]

    def keep(side: int, call: Callable[[], int]) -> None:
        try:
            results[side] = call()
        except Exception as error:
            results[side] = error

    sending = threading.Thread(
        target=keep, args=(0, lambda: PageTransfer(sender).send(ctx, ends[0])), daemon=True
    )
    sending.start()
    keep(1, lambda: PageTransfer(receiver).receive(ends[1]))
    sending.join(30)
    assert not sending.is_alive()
    return results


def test_a_page_that_cannot_be_copied_in_leaves_the_connection_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender, receiver, ends = manager(), manager(), Pipe()
    ctx = compute(sender)
    copy_in = failing_once(LeafPools.copy_in, DeviceError("no copy"))
    monkeypatch.setattr(LeafPools, "copy_in", lambda *args: copy_in(*args))
    refused = exchange(sender, ctx, receiver, ends)
    assert [str(error) for error in refused] == ["transfer: no copy"] * 2
    assert receiver.num_free_blocks() == receiver.total_num_blocks()
    assert exchange(sender, ctx, receiver, ends) == [7, 7]


@pytest.mark.parametrize("copy", ["copy_in", "copy_out"])
@pytest.mark.parametrize("error", [RuntimeError("no copy"), DeviceError("no copy")])
def test_no_side_waits_for_one_that_fails(
    error: Exception, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver, ends = manager(), manager(), Pipe()
    ctx = compute(sender)
    failing = failing_once(getattr(LeafPools, copy), error)
    monkeypatch.setattr(LeafPools, copy, lambda *args: failing(*args))
    failed = exchange(sender, ctx, receiver, ends)
    mine, other = failed if copy == "copy_out" else reversed(failed)
    assert "no copy" in str(mine)
    assert isinstance(other, TransferError)
    assert receiver.num_free_blocks() == receiver.total_num_blocks()
    is_refused = copy == "copy_in" and isinstance(error, DeviceError)
    assert [end.closed for end in ends] == [not is_refused] * 2
