"""Numbers and booleans that callers give, and values as error messages show them."""

from __future__ import annotations

import operator
from collections.abc import Collection
from contextlib import suppress
from typing import SupportsIndex

import numpy as np

from kvgraph.errors import KVGraphError

BOOLEANS = (bool, np.bool_)


def as_integer(value: object) -> int | None:
    """`value`, of Python or NumPy, as an int; None if it is no integer. A boolean is none."""
    if type(value) is int:  # isinstance of a protocol takes 2 us
        return value
    if isinstance(value, SupportsIndex) and not isinstance(value, BOOLEANS):
        with suppress(TypeError):  # an array of several, say
            return operator.index(value)
    return None


def require_integer(
    name: str,
    value: object,
    refusal: type[KVGraphError],
    *,
    least: int | None = None,
    most: int | None = None,
    or_else: str = "",
) -> int:
    """Return `value` as an int from `least` to `most`; raise `refusal`, with `name`, otherwise.

    `or_else`: other values that the caller allows, for the error.
    """
    found = as_integer(value)
    if found is None:
        bound = "" if least is None else f" >= {least}"
        raise refusal(f"{name}: expected an integer{bound}{or_else}, got {shown(value)}")
    if least is not None and found < least:
        raise refusal(f"{name}: expected >= {least}{or_else}, got {found}")
    if most is not None and found > most:
        raise refusal(f"{name}: expected at most {most}{or_else}, got {found}")
    return found


def require_number(name: str, value: object, refusal: type[KVGraphError]) -> float:
    """Return `value`, of Python or NumPy, as a float; raise `refusal`, with `name`, otherwise."""
    kinds = int | float | np.integer | np.floating
    if isinstance(value, BOOLEANS) or not isinstance(value, kinds):
        raise refusal(f"{name}: expected a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise refusal(f"{name}: expected a number, got {shown(value)}") from error


def require_boolean(name: str, value: object, refusal: type[KVGraphError]) -> bool:
    """Return `value`, of Python or NumPy, as a bool; raise `refusal`, with `name`, otherwise."""
    if not isinstance(value, BOOLEANS):
        raise refusal(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def is_one_of(value: object, allowed: Collection[str]) -> bool:
    """Whether `value` is text in `allowed`. An array, of which `in` has no answer, is not."""
    return isinstance(value, str) and value in allowed


def shown(value: object) -> str:
    """`value` as an error message shows it: its type, and its repr cut to 40 characters."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def brief(value: object) -> str:
    """The first 100 characters of a value's repr; its type if it nests too deeply."""
    try:
        return repr(value)[:100]
    except RecursionError:
        return f"a {type(value).__name__} that nests deeply"
