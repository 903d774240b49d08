"""HeldLines: lines of a log that wait for its reader, or on their way from an ingress."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

MOST_CHARACTERS = 16 << 20
"""Most characters of the lines that wait; the newest line is always held."""


class HeldLines:
    """Lines that wait until they are taken. If they are too many, the oldest ones are dropped."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._length = self._num_dropped = 0

    def add(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._lines.append(line)
            self._length += len(line)
            while self._length > MOST_CHARACTERS and len(self._lines) > 1:
                self._length -= len(self._lines.popleft())
                self._num_dropped += 1

    def take(self) -> list[str]:
        """The lines, oldest first; a line about those that were dropped comes before them."""
        lines = list(self._lines)
        if self._num_dropped:
            said = f"log: {self._num_dropped} lines were dropped, as nothing took them"
            lines.insert(0, f'{{"event":"warning","message":"{said}"}}')
        self._lines.clear()
        self._length = self._num_dropped = 0
        return lines
