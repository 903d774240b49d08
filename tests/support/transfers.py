"""Pages that one manager sends and another receives, each in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from kvgraph.errors import TransferError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers.transfer import PageTransfer, Way


def transfer(
    sender: PagedKVCacheManager, ctx: TextContext, receiver: PagedKVCacheManager, way: Way
) -> tuple[Any, Any]:
    """What `send` and `receive` returned, or the text of their TransferError."""

    def told(result: Any) -> Any:
        if isinstance(result, TransferError):
            return str(result)
        if isinstance(result, Exception):
            raise result
        return result

    sent, received = exchange(sender, ctx, receiver, Pipe(), way)
    return told(sent), told(received)


def exchange(
    sender: PagedKVCacheManager,
    ctx: TextContext,
    receiver: PagedKVCacheManager,
    ends: tuple[Connection, Connection],
    way: Way = "connection",
) -> list[Any]:
    """What `send` and `receive` returned or raised."""
    nixl, results = way == "nixl", [None, None]

    def keep(side: int, call: Callable[[], Any]) -> None:
        try:
            results[side] = call()
        except Exception as error:
            results[side] = error

    def send() -> None:
        keep(0, lambda: PageTransfer(sender, nixl=nixl).send(ctx, ends[0], way=way))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    keep(1, lambda: PageTransfer(receiver, nixl=nixl).receive(ends[1]))
    sending.join(30)
    assert not sending.is_alive()
    return results
