"""Objects of which a copy would share one half of its state, and have another half of its own."""

from __future__ import annotations

from typing import NoReturn


class Uncopied:
    """TypeError where `copy`, `deepcopy` or `pickle` would make another of it."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: expected one owner of its memory, got a copy or a pickle of "
            "it; make another one"
        )
