"""Calls of the routing index's actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import GetTimeoutError

T = TypeVar("T")

ANSWER_SECONDS = 1.0
"""Time in which the index must answer. A process that hangs counts as one that restarts."""


async def answer_of(call: Awaitable[T]) -> T:
    """The index's answer. GetTimeoutError, a RayError as of an index that restarts, if it hangs."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await call
    except TimeoutError as error:
        raise GetTimeoutError(f"no answer of the index in {ANSWER_SECONDS:g} s") from error
