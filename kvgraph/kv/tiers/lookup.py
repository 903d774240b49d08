"""What the tiers were asked for a request, and how long the answer serves."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping, Sequence

from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers.connector import Lookup

ANSWER_SECONDS = 0.25
"""How long an answer serves before it is asked for again: a request may wait, and tiers change."""

PATIENCE_SECONDS = 0.25
"""How long a request waits for a look-up; what slower tiers hold is computed."""


class TierLookup:
    """One look-up for a request of `length` tokens, with the connector's `answer` to it.

    - `ctx`: the request, None once its owner let go of it
    - `epoch`: of the cache when it was asked; a reset makes the answer invalid
    - `digests`: of its pages, of which the device had the first `hit` then
    - `keys`: per leaf, the digest of each page that was asked for, by its key
    - `renewal`: the same asked again; until it is answered the old answer serves
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
        """An answer until the next reset: there is nothing."""
        return cls(ctx, epoch, (), 0, [{}] * leaves)

    @property
    def ctx(self) -> TextContext | None:
        return self._ctx()

    def wanted(self, sizes: Sequence[int]) -> list[tuple[bytes, int]]:
        """What to look up; `sizes` are bytes of a record of each leaf."""
        return [(key, size) for keys, size in zip(self.keys, sizes, strict=True) for key in keys]

    def present(self) -> list[set[bytes]]:
        """Per leaf, digests of the pages that the tiers hold."""
        found = self.answer.present
        return [{keys[key] for key in keys.keys() & found} for keys in self.keys]

    def is_valid(self, epoch: object) -> bool:
        """Whether the look-up is done, and no reset came after it was asked."""
        return self.answer.done and self.epoch is epoch

    def newest(self) -> TierLookup:
        """This, or its renewal where that is answered."""
        return self.renewal if self.renewal is not None and self.renewal.answer.done else self

    def is_answered(self) -> bool:
        """Whether it is done, or has taken so long that what is known now is the answer."""
        if not self.answer.done and time.monotonic() > self._asked_at + PATIENCE_SECONDS:
            self.answer = self.answer.so_far()
        return self.answer.done

    def is_old(self) -> bool:
        """Whether it is time to ask again; counted from when the answer was first seen."""
        if not self.answer.done or not self.answer.keys or self.renewal is not None:
            return False
        if self._until == math.inf:
            self._until = time.monotonic() + ANSWER_SECONDS
        return time.monotonic() > self._until
