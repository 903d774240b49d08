"""Sizes of memory, in bytes or as people write them."""

from __future__ import annotations

import operator
import re
from contextlib import suppress
from typing import SupportsIndex

import numpy as np

from kvgraph.errors import KVGraphError, RequestError

BOOLEANS = (bool, np.bool_)

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


MOST_DIGITS = 40
"""Bound on the digits of a size as text; a float overflows above 308 digits."""


def parse_bytes(name: str, size: int | str) -> int:
    """Bytes of a size such as 1073741824, "80GiB" or "512MB"; RequestError names `name`."""
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?i?B?)", size.strip())
        if match is not None and match[2] in UNITS and len(match[1]) < MOST_DIGITS:
            return int(float(match[1]) * UNITS[match[2]])
    elif (count := as_integer(size)) is not None and count >= 0:
        return count
    raise RequestError(f"{name}: expected a size such as 80GiB or 512MB, got {size!r}")


def as_integer(value: object) -> int | None:
    """`value`, of Python or NumPy, as an int; None if it is no integer. A boolean is none."""
    if isinstance(value, SupportsIndex) and not isinstance(value, BOOLEANS):
        with suppress(TypeError):  # an array of several, say
            return operator.index(value)
    return None


def whole(
    name: str,
    value: object,
    refusal: type[KVGraphError],
    *,
    least: int | None = None,
    most: int | None = None,
) -> int:
    """Return `value` as an int from `least` to `most`; raise `refusal`, with `name`, otherwise."""
    found = as_integer(value)
    if found is None:
        raise refusal(f"{name}: expected an integer, got {said(value)}")
    if least is not None and found < least:
        raise refusal(f"{name}: expected >= {least}, got {found}")
    if most is not None and found > most:
        raise refusal(f"{name}: expected at most {most}, got {found}")
    return found


def said(value: object) -> str:
    """`value` as an error message shows it: its type, and its repr cut to 40 characters."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def size_text(count: float) -> str:
    """`count` bytes as text in the largest unit that fits, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"
