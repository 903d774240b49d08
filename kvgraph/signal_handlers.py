"""Keeps exceptions of the user's signal handlers, such as a time limit's, apart from others.

Python calls signal handlers wherever the main thread is, so often inside a library call. Code
that converts a library's errors to another class must not convert an exception of a handler.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from inspect import CO_VARARGS
from itertools import pairwise
from types import CodeType, FrameType


def reraise_if_signalled(error: BaseException) -> None:
    """Raise `error` again if a Python signal handler raised it."""
    place, installed = error.__traceback__, frozenset(_installed())
    while place is not None and place.tb_next is not None:
        frame = place.tb_next.tb_frame
        if frame.f_code in installed or _handles(frame, place.tb_frame):
            raise error
        place = place.tb_next


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
