"""Keys of pages that were used, until the stores are told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MOST_KEYS = 8000
"""Of more, those used last are kept."""

KEYS_AT_ONCE = 1000
"""Keys that the stores are told in one call; a look-up that comes meanwhile waits for no more."""


class Uses:
    """Keys in the order of their last use. Not thread-safe: the connector's lock guards it."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MOST_KEYS:
            self._keys.popitem(last=False)

    def take(self) -> list[bytes]:
        """Remove and return those used longest ago, the last used of them last."""
        count = min(len(self._keys), KEYS_AT_ONCE)
        return [self._keys.popitem(last=False)[0] for _ in range(count)]

    def clear(self) -> None:
        self._keys.clear()
