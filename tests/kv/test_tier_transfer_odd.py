"""Messages of a sender or receiver that does not follow the protocol: one sentence, and no wait."""

from __future__ import annotations

from multiprocessing.connection import Pipe

import pytest

from kvgraph.errors import TransferError
from kvgraph.kv.tiers import transfer


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
