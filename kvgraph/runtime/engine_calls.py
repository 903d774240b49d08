"""Calls of an AsyncEngine from tasks of its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvgraph.errors import RequestError
from kvgraph.runtime.engine import Engine

T = TypeVar("T")


def running_loop(call: str) -> asyncio.AbstractEventLoop:
    """The event loop of the caller. RequestError, for AsyncEngine's method `call`, outside one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise RequestError(
            f"AsyncEngine.{call}: expected a running event loop of asyncio, got none; call it in "
            "a task of asyncio, as `asyncio.run` makes one"
        ) from error


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
