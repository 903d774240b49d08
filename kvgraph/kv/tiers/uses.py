"""Keys of used pages that are still to be reported to the stores."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MOST_KEYS = 8000
"""Most keys that are kept; of more keys the last used ones stay."""

KEYS_AT_ONCE = 1000
"""Most keys of one call to the stores, so that a look-up waits for at most one such call."""


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
        """Remove and return up to KEYS_AT_ONCE keys, the least recently used first."""
        count = min(len(self._keys), KEYS_AT_ONCE)
        return [self._keys.popitem(last=False)[0] for _ in range(count)]

    def clear(self) -> None:
        self._keys.clear()
