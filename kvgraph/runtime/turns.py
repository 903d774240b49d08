"""Rejects overlapping calls on an object that is not thread-safe.

CPython checks for interrupts at function calls and at the end of loop iterations. So the first call
in a `try` takes the turn, and a `finally` without any call gives it back: no interrupt can keep it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from threading import get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from kvgraph.errors import RequestError

Call = tuple[str, int]
"""A running call: its name, and the thread that made it. Calls are compared by identity."""

OWNED = "AsyncEngine"
"""Name of the call that has the turn for as long as an AsyncEngine runs."""

FORKED: Call = ("fork", 0)
"""The call that has all turns in a forked child."""

CLOSED: Call = ("close", 0)
"""The call that has all turns of an object that was closed."""

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """Holds the call that runs on an object, if any. Usage:

    call = ("step", get_ident())
    try:
        if (running := turns.take(call)) is not call:
            raise turns.overlap(call, running)
        ...
    finally:
        if turns.running is call:
            del turns.running
    """

    running: Call | None = None

    is_ended = False
    """Whether the object was closed."""

    take: Callable[[Call], Call]
    """Take the turn unless another call has it; return the call that has it now.

    It is one atomic operation: it runs no Python code.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        attributes: dict[str, Call] = self.__dict__
        self.take = self._take = partial(attributes.setdefault, "running")
        _TURNS.add(self)

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Reject calls of all other threads: this thread runs the engine for them."""
        own, take = get_ident(), self._take
        self.take = lambda call: take(call) if call[1] == own else (OWNED, own)
        try:
            yield
        finally:
            if not self.is_ended:
                self.take = take

    def end(self) -> None:
        """Reject all calls from now on, except `close`."""
        self.is_ended, take = True, self._take
        self.take = lambda call: take(call) if call[0] == "close" else CLOSED

    def overlap(self, call: Call, running: Call) -> RequestError:
        """The error of `call` while another call runs, possibly in the same thread."""
        name, thread = running
        if running is FORKED:
            return RequestError(
                f"{self._owner}.{call[0]}: expected the process that opened it, got a fork of it; "
                "open another one in the child"
            )
        if running is CLOSED:
            return RequestError(
                f"{self._owner}.{call[0]}: expected an open one, got one that was closed; "
                "open another one"
            )
        if name == OWNED:
            return RequestError(
                f"{self._owner}.{call[0]}: expected no call while an AsyncEngine runs the engine, "
                "got one; use its own methods, or `await AsyncEngine.call(...)`"
            )
        other, advice = "another", "share it between threads in turn, with a lock"
        if thread == call[1]:
            other, advice = (
                "the same",
                "make it after that call, not in a signal handler or callback",
            )
        return RequestError(
            f"{self._owner}.{call[0]}: expected one call at a time, got one while `{name}` of "
            f"{other} thread runs; {advice}"
        )


_TURNS: WeakSet[Turns] = WeakSet()


def _refuse_in_child() -> None:
    """Refuse all calls but `close` in a forked child, which has none of its parent's threads: a
    step could wait for them for ever."""
    for turns in _TURNS:
        turns.take = lambda call: call if call[0] == "close" else FORKED


os.register_at_fork(after_in_child=_refuse_in_child)


class Owner(Protocol):
    _turns: Turns


T = TypeVar("T", bound=Owner)
Function = Callable[Concatenate[T, P], R]


def in_turn(name: str) -> Callable[[Function[T, P, R]], Function[T, P, R]]:
    """Decorate a function to hold the turn of its first argument, as call `name`, while it runs."""

    def decorated(function: Function[T, P, R]) -> Function[T, P, R]:
        @wraps(function)
        def alone(owner: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            turns = owner._turns
            call = (name, get_ident())
            try:
                if (running := turns.take(call)) is not call:
                    raise turns.overlap(call, running)
                return function(owner, *args, **kwargs)
            finally:
                if turns.running is call:
                    del turns.running

        return alone

    return decorated
