"""What a user's signal handler raises, a time limit's error say, while a library is at work.

Python calls handlers wherever the main thread is, so mostly within a call of a library. Code that
gives a library's errors another class must not take the handler's error for one of them.
"""

from __future__ import annotations

from inspect import CO_VARARGS
from itertools import pairwise
from types import FrameType


def let_pass(error: BaseException) -> None:
    """Raises `error` again if a Python handler of a signal has raised it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        if _handles(place.tb_next.tb_frame, place.tb_frame):
            raise error
        place = place.tb_next


def _handles(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether `frame` runs a handler: its arguments are a signal's number and the frame that the
    signal has interrupted."""
    code, held = frame.f_code, frame.f_locals
    given = [held.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        others = held.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += others if isinstance(others, tuple) else ()
    return any(isinstance(a, int) and b is interrupted for a, b in pairwise(given))
