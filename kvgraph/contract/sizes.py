"""Sizes of memory, in bytes or as people write them."""

from __future__ import annotations

import re

from kvgraph.contract.values import as_integer
from kvgraph.errors import RequestError

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


def size_text(count: float) -> str:
    """`count` bytes as text in the largest unit that fits, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        digits = 0 if unit == "B" else 1
        if round(count, digits) < 1024:
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
