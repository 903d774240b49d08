"""Plural forms of nouns."""

from __future__ import annotations


def plural(noun: str, count: int) -> str:
    """`noun`, in the plural unless `count` is 1."""
    return noun if count == 1 else f"{noun}s"
