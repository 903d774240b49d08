"""Nouns behind their counts."""

from __future__ import annotations


def plural(noun: str, count: int) -> str:
    """`noun` as it is said of `count` things."""
    return noun if count == 1 else f"{noun}s"
