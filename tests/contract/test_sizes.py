"""Sizes as people write them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvgraph.contract.sizes import parse_bytes, size_text
from kvgraph.errors import RequestError


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (1 << 40, 1 << 40),
        (np.int64(7), 7),
        ("7", 7),
        (" 7 B ", 7),
        ("2KiB", 2048),
        ("1.5 GiB", 3 << 29),
        ("512MB", 512_000_000),
        ("3TB", 3 * 10**12),
    ],
)
def test_sizes(size: Any, expected: int) -> None:
    assert parse_bytes("memory", size) == expected


@pytest.mark.parametrize(
    "size", ["", "many", "-1", "1 GiBs", "1iB", "1,5GiB", "1e9", -1, 1e9, True, None, b"1GiB"]
)
def test_what_is_no_size(size: Any) -> None:
    message = f"memory: expected a size such as 80GiB or 512MB, got {size!r}"
    with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
        parse_bytes("memory", size)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ("1023B", "1023 B"),
        ("1KiB", "1.0 KiB"),
        ("1.5MiB", "1.5 MiB"),
        ("1023GiB", "1023.0 GiB"),
        ("1TiB", "1.0 TiB"),
        ("5000TiB", "5000.0 TiB"),
        ("1048524", "1023.9 KiB"),
        ("1048575", "1.0 MiB"),
        (str((1 << 40) - 1), "1.0 TiB"),
    ],
)
def test_a_size_is_shown_in_its_own_unit(size: str, text: str) -> None:
    assert size_text(parse_bytes("memory", size)) == text
