"""Synonyms of parameters: names that the API pages use where kvgraph has another name."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def also_named(**synonyms: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let callers write `synonym=` for the parameter `synonyms[synonym]`, by keyword only.

    A call that gives a parameter twice raises TypeError.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for synonym, own in synonyms.items() if kwargs else ():
                if synonym in kwargs and own in kwargs:
                    raise TypeError(f"{function.__name__}: expected {own} once, got {synonym} too")
                if synonym in kwargs:
                    kwargs[own] = kwargs.pop(synonym)
            return function(*args, **kwargs)

        return call

    return decorate
