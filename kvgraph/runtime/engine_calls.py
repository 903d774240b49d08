"""Calls of tasks that run in the thread of an AsyncEngine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvgraph.runtime.engine import Engine

T = TypeVar("T")


def answer(found: Future[T], function: Callable[[Engine], T], engine: Engine) -> None:
    """Give `found` the result of `function`, or its error, unless the caller was cancelled."""
    if not found.set_running_or_notify_cancel():
        return
    try:
        value = function(engine)
    except BaseException as error:
        told: BaseException = error
        if isinstance(error, StopIteration | GeneratorExit):  # a task cannot be given these
            kind = type(error).__name__
            told = RuntimeError(f"AsyncEngine.call: the function raised {kind}")
            told.__cause__ = error
        found.set_exception(told)
    else:
        found.set_result(value)
