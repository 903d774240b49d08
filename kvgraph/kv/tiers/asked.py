"""What the tiers were asked for a request, and how long the answer serves."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from kvgraph.kv.tiers.connector import Lookup

ANSWER_SECONDS = 0.25
"""How long an answer serves before it is asked for again: a request may wait, and tiers change."""

PATIENCE_SECONDS = 0.25
"""How long a request waits for a look-up; it is computed if the tiers are slower."""


class Asked:
    """One look-up for a request of `length` tokens.

    - `epoch`: of the cache when it was asked; a reset makes the answer invalid
    - `digests`: of its pages, of which the device had the first `hit` then
    - `keys`: per leaf, the digest of each page that was asked for, by its key
    - `renewal`: the same asked again; until it is answered the old answer serves
    """

    __slots__ = (
        "_asked_at",
        "_until",
        "digests",
        "epoch",
        "hit",
        "keys",
        "length",
        "lookup",
        "renewal",
    )

    def __init__(
        self,
        epoch: object,
        length: int,
        digests: Sequence[bytes],
        hit: int,
        keys: Sequence[Mapping[bytes, bytes]],
    ) -> None:
        self.epoch = epoch
        self.length = length
        self.digests = digests
        self.hit = hit
        self.keys = keys
        self.lookup = Lookup()
        self.renewal: Asked | None = None
        self._asked_at = time.monotonic()
        self._until = math.inf

    @classmethod
    def nothing(cls, epoch: object, length: int, leaves: int) -> Asked:
        """An answer until the next reset: there is nothing."""
        return cls(epoch, length, (), 0, [{}] * leaves)

    def wanted(self, sizes: Sequence[int]) -> list[tuple[bytes, int]]:
        """What to look up; `sizes` are bytes of a record of each leaf."""
        return [(key, size) for keys, size in zip(self.keys, sizes, strict=True) for key in keys]

    def present(self) -> list[set[bytes]]:
        """Per leaf, digests of the pages that the tiers hold."""
        found = self.lookup.present
        return [{keys[key] for key in keys.keys() & found} for keys in self.keys]

    def is_valid(self, epoch: object) -> bool:
        """Whether the look-up is done, and no reset came after it was asked."""
        return self.lookup.done and self.epoch is epoch

    def newest(self) -> Asked:
        """This, or its renewal where that is answered."""
        return self.renewal if self.renewal is not None and self.renewal.lookup.done else self

    def is_answered(self) -> bool:
        """Whether the look-up is done, or has taken so long that its answer is: nothing."""
        if not self.lookup.done and time.monotonic() > self._asked_at + PATIENCE_SECONDS:
            self.lookup = Lookup()
        return self.lookup.done

    def is_old(self) -> bool:
        """Whether it is time to ask again; counted from when the answer was first seen."""
        if not self.lookup.done or not self.lookup.keys or self.renewal is not None:
            return False
        if self._until == math.inf:
            self._until = time.monotonic() + ANSWER_SECONDS
        return time.monotonic() > self._until
