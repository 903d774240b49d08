"""How far a long task is: told to the listener of this context; without one it costs nothing.

    with task("hashing", total, "bytes") as advance:
        advance(len(piece))         # from any thread

`kvgraph.show_progress` is a listener (bars.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeAlias

Advance: TypeAlias = Callable[[int], object]
"""Called with what was done since the last call, in the task's unit."""


class Listener(Protocol):
    def task(self, what: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        """A scope in which `total` of `unit` ("bytes", "tokens", ...) are done."""
        ...


def _to_nobody(count: int) -> None:
    pass


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_innermost: ContextVar[Advance] = ContextVar("innermost", default=_to_nobody)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def is_followed() -> bool:
    """Whether anybody listens: what is to be told may cost something."""
    return _listener.get() is not None


@contextmanager
def task(what: str, total: int, unit: str) -> Iterator[Advance]:
    """A scope in which `total` of `unit` are done; gives what is called as they are."""
    listener = _listener.get()
    if listener is None:
        yield _to_nobody
        return
    with listener.task(what, total, unit) as advance:
        token = _innermost.set(advance)
        try:
            yield advance
        finally:
            _innermost.reset(token)


def advance(count: int = 1) -> None:
    """Of the innermost task of this context, where its steps do not see it."""
    _innermost.get()(count)
