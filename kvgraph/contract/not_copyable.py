"""Base of objects that cannot be copied: a copy would share only a part of the state."""

from __future__ import annotations

from typing import NoReturn


class NotCopyable:
    """Base class of objects for which `copy`, `deepcopy` and `pickle` raise TypeError."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: expected one owner of what it holds, got a copy or a pickle "
            "of it; make another one"
        )
