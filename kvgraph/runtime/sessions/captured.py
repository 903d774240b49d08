"""Steps that a session has captured as CUDA graphs."""

from __future__ import annotations

from typing import TypeVar

Step = TypeVar("Step")

MAX_CAPTURED = 256
"""Most captured steps; the least recently used one is dropped first. An engine of 64 rows and
131,072 tokens has steps of 81 sizes."""


class CapturedSteps(dict[tuple[object, ...], Step]):
    """Captured steps by what they were captured for; the most recently used one is last."""

    def used(self, key: tuple[object, ...]) -> Step | None:
        """The step of `key`, now the most recently used one; None if there is none."""
        step = self.pop(key, None)
        if step is not None:
            self[key] = step
        return step

    def make_room(self) -> None:
        """Drop the least recently used step if there is no room for one more."""
        if len(self) >= MAX_CAPTURED:
            del self[next(iter(self))]
