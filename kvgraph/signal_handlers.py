"""Signal handlers: those of commands, and exceptions of the user's.

Exceptions of the user's signal handlers, such as a time limit's, are kept apart from others.

Python calls signal handlers wherever the main thread is, so often inside a library call. Code
that converts a library's errors to another class must not convert an exception of a handler.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import CO_VARARGS
from itertools import pairwise
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType


@contextmanager
def end_at_signals(code: int | None = None) -> Iterator[None]:
    """A scope in which SIGTERM and SIGHUP end the process at once, with `code`, or by default with
    128 + the signal's number. A SIGHUP that is ignored (nohup) stays ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number if code is None else code)

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if is_heard(number)]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_heard(number: signal.Signals) -> bool:
    """Whether the process does not ignore a signal, as it does SIGHUP under nohup."""
    return signal.getsignal(number) is not signal.SIG_IGN


def reraise_if_signalled(error: BaseException) -> None:
    """Raise what a Python signal handler raised: `error` again, or the exception that a library
    replaced by it."""
    found = _signalled(error)
    if found is not None:
        try:
            raise found
        finally:  # this frame is in its traceback, and would keep it until the next collection
            del error, found


class ignoring(suppress):  # noqa: N801, named as suppress is
    """`contextlib.suppress`, which lets through what a Python signal handler raised."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> bool:
        try:
            if error is not None:
                reraise_if_signalled(error)
            return super().__exit__(kind, error, place)
        finally:  # as in reraise_if_signalled
            del error, place


def _signalled(error: BaseException) -> BaseException | None:
    """`error`, or the exception that a library replaced by it, if a signal handler raised it."""
    installed = frozenset(_installed())
    found: BaseException | None = error
    while found is not None:
        frames = _frames(found)
        if any(b.f_code in installed or _handles(b, a) for a, b in pairwise(frames)):
            return found
        found = found.__context__
        if found is not None and not {*frames[1:]} & {*_frames(found)[:1]}:
            return None  # it was handled before the call that raised `error`
    return None


def _frames(error: BaseException) -> list[FrameType]:
    """Frames through which `error` passed, from the one that caught it inwards."""
    return [frame for frame, _ in walk_tb(error.__traceback__)]


def _installed() -> Iterator[CodeType]:
    """Code objects of all installed signal handlers that are written in Python."""
    for number in signal.valid_signals():
        handler: object = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        for function in (handler, getattr(handler, "__call__", None)):  # noqa: B004, for its code
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                yield code


def _handles(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether `frame` runs a signal handler, even one that is no longer installed: its arguments
    are a signal number and the interrupted frame."""
    code, held = frame.f_code, frame.f_locals
    given = [held.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        others = held.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += others if isinstance(others, tuple) else ()
    return any(isinstance(a, int) and b is interrupted for a, b in pairwise(given))
