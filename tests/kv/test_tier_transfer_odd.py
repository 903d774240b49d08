"""Messages of a sender or receiver that does not follow the protocol, or fails within it: one
sentence, and no wait."""

from __future__ import annotations

from multiprocessing.connection import Pipe

import pytest

from kvgraph.errors import DeviceError, TransferError
from kvgraph.kv.tiers import transfer
from kvgraph.kv.tiers.leaf_pools import LeafPools
from tests.kv.test_tier_transfer import compute, manager
from tests.support.faults import failing
from tests.support.transfers import exchange


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


def test_a_page_that_cannot_be_copied_in_leaves_the_connection_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender, receiver, ends = manager(), manager(), Pipe()
    ctx = compute(sender)
    copy_in = failing(LeafPools.copy_in, 1, DeviceError("no copy"))
    monkeypatch.setattr(LeafPools, "copy_in", copy_in)
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
    monkeypatch.setattr(LeafPools, copy, failing(getattr(LeafPools, copy), 1, error))
    failed = exchange(sender, ctx, receiver, ends)
    mine, other = failed if copy == "copy_out" else reversed(failed)
    assert "no copy" in str(mine)
    assert isinstance(other, TransferError)
    assert receiver.num_free_blocks() == receiver.total_num_blocks()
    is_refused = copy == "copy_in" and isinstance(error, DeviceError)
    assert [end.closed for end in ends] == [not is_refused] * 2
