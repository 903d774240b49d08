"""Calls that fail once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any


def failing(call: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    """`call`, but for its call number `at`, which raises `error`."""
    numbers = count()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == at:
            raise error
        return call(*args, **kwargs)

    return wrapper
