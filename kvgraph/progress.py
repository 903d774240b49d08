"""Reports the progress of long tasks to this context's listener; without one it costs nothing.

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
"""Called with the amount that was done since the last call, in the task's unit."""

Progress: TypeAlias = Callable[[str], None]
"""Called with the name of each stage."""


class Listener(Protocol):
    def task(self, what: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        """Return a scope in which `total` of `unit` ("bytes", "tokens", ...) are done."""
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
    """Whether a listener is set, so that reports may cost some work."""
    return _listener.get() is not None


@contextmanager
def task(what: str, total: int, unit: str) -> Iterator[Advance]:
    """Open a scope in which `total` of `unit` are done; yield the function that reports them."""
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
    """Report `count` for this context's innermost task, where the caller has no `Advance`."""
    _innermost.get()(count)
