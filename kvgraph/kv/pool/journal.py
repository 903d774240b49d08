"""Events of a pool's committed pages, for callers that follow them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class PageStored(NamedTuple):
    """A page was committed. `parent`: digest of the page before it, None for the first page of a
    prefix. `tokens`: its tokens. If they are not known, `parent` is None and `tokens` is empty."""

    digest: bytes
    parent: bytes | None
    tokens: list[int]


class PageRemoved(NamedTuple):
    """A committed page no longer holds its content."""

    digest: bytes


class PagesCleared(NamedTuple):
    """All pages were un-committed."""


Event: TypeAlias = PageStored | PageRemoved | PagesCleared
