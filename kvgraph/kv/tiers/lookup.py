"""A request's look-up in the tiers, and how long its answer is valid."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping, Sequence

from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers.connector import Lookup

ANSWER_SECONDS = 0.25
"""Seconds until an answer is renewed: a request may wait for long, and the tiers change."""

PATIENCE_SECONDS = 0.25
"""Longest wait of a request for a look-up; pages of slower tiers are computed instead."""


class TierLookup:
    """One look-up for a request of `length` tokens, with the connector's `answer`.

    - `ctx`: the request; None once its owner has dropped it
    - `epoch`: the cache's epoch at the look-up; a reset makes the answer invalid
    - `digests`: digests of the request's pages; `hit`: number of first pages on the device then
    - `keys`: per leaf, the digest of each page that was asked for, by its key
    - `renewal`: a repeated look-up; the old answer is used until the renewal is answered
    """

    __slots__ = (
        "_asked_at",
        "_ctx",
        "_until",
        "answer",
        "digests",
        "epoch",
        "hit",
        "keys",
        "length",
        "renewal",
    )

    def __init__(
        self,
        ctx: TextContext,
        epoch: object,
        digests: Sequence[bytes],
        hit: int,
        keys: Sequence[Mapping[bytes, bytes]],
    ) -> None:
        self._ctx = weakref.ref(ctx)
        self.length = ctx.current_length
        self.epoch = epoch
        self.digests = digests
        self.hit = hit
        self.keys = keys
        self.answer = Lookup()
        self.renewal: TierLookup | None = None
        self._asked_at = time.monotonic()
        self._until = math.inf

    @classmethod
    def nothing(cls, ctx: TextContext, epoch: object, leaves: int) -> TierLookup:
        """A look-up that found no page; it is valid until the next reset."""
        return cls(ctx, epoch, (), 0, [{}] * leaves)

    @property
    def ctx(self) -> TextContext | None:
        return self._ctx()

    def wanted(self, sizes: Sequence[int]) -> list[tuple[bytes, int]]:
        """Keys to look up, with record sizes. `sizes`: bytes of a record, per leaf."""
        return [(key, size) for keys, size in zip(self.keys, sizes, strict=True) for key in keys]

    def present(self) -> list[set[bytes]]:
        """Digests, per leaf, of the pages that the tiers hold."""
        found = self.answer.present
        return [{keys[key] for key in keys.keys() & found} for keys in self.keys]

    def is_valid(self, epoch: object) -> bool:
        """Whether the look-up is done and `epoch`, the cache's current one, is still the same."""
        return self.answer.done and self.epoch is epoch

    def newest(self) -> TierLookup:
        """The renewal if it is answered, otherwise this look-up."""
        return self.renewal if self.renewal is not None and self.renewal.answer.done else self

    def is_answered(self) -> bool:
        """Whether the look-up is done; PATIENCE_SECONDS end it with the keys found so far."""
        if not self.answer.done and time.monotonic() > self._asked_at + PATIENCE_SECONDS:
            self.answer = self.answer.so_far()
        return self.answer.done

    def is_old(self) -> bool:
        """Whether to ask again: ANSWER_SECONDS after the first call that found it done."""
        if not self.answer.done or not self.answer.keys or self.renewal is not None:
            return False
        if self._until == math.inf:
            self._until = time.monotonic() + ANSWER_SECONDS
        return time.monotonic() > self._until
