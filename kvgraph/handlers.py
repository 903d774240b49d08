"""What a user's signal handler raises, a time limit's error say, while a library is at work.

Python calls handlers wherever the main thread is, so mostly within a call of a library. Code that
gives a library's errors another class must not take the handler's error for one of them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from types import CodeType


def let_pass(error: BaseException) -> None:
    """Raises `error` again if a Python handler of a signal has raised it."""
    place, codes = error.__traceback__, frozenset(_codes())
    while place is not None and codes:
        if place.tb_frame.f_code in codes:
            raise error
        place = place.tb_next


def _codes() -> Iterator[CodeType]:
    """The code of each signal's handler, as far as it is written in Python."""
    for number in signal.valid_signals():
        handler: object = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        for function in (handler, getattr(handler, "__call__", None)):  # noqa: B004, for its code
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                yield code
