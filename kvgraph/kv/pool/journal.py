"""What happened to the committed pages of a pool, in order, for those who follow it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Stored(NamedTuple):
    """A page was committed: its digest, that of the page before it (None: it is a prefix's first),
    and its tokens. Of a page whose tokens are not known: None, and no tokens."""

    digest: bytes
    parent: bytes | None
    tokens: list[int]


class Removed(NamedTuple):
    """A committed page holds another content from now on, or none."""

    digest: bytes


class Cleared(NamedTuple):
    """No page is committed any more."""


Event: TypeAlias = Stored | Removed | Cleared
