"""Stop strings: where a request's text ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Ends one request's text at the first of its stop strings that is complete.

    If one character completes two, the longer counts. Matching is by character, so the borders of
    tokens do not matter. No match counts before the request has `least` tokens.
    `held`: end of the text that may be the start of a stop string; it is not returned yet.
    """

    __slots__ = ("_borders", "_firsts", "_includes", "_least", "_matched", "_stops", "held")

    def __init__(self, stops: Sequence[str], *, includes: bool = False, least: int = 0) -> None:
        self._stops = stops
        self._includes = includes
        self._least = least
        self._firsts = {stop[0] for stop in stops}
        self._borders = [borders(stop) for stop in stops]
        self.rewind()

    def rewind(self) -> None:
        """Forget all text."""
        self.held = ""
        self._matched = [0] * len(self._stops)  # per stop: length of its prefix that ends the text

    def step(self, piece: str, count: int, *, ends: bool = False) -> tuple[str, str | None]:
        """Add `piece`, the text of token number `count`. Return the text that is safe to show, and
        the stop string that ends it, if any. If the request `ends` here, no text is held back.
        """
        if not self.held and self._firsts.isdisjoint(piece):
            return piece, None
        text = self.held + piece
        for end, character in enumerate(piece, len(self.held) + 1):
            stop = self._match(character)
            if stop is not None and count >= self._least:
                return text[: end if self._includes else end - len(stop)], stop
        cut = len(text) if ends else len(text) - max(self._matched)
        self.held = text[cut:]
        return text[:cut], None

    def _match(self, character: str) -> str | None:
        """The longest stop string that this character completes (Knuth, Morris and Pratt)."""
        longest = ""
        for i, stop in enumerate(self._stops):
            matched, of_stop = self._matched[i], self._borders[i]
            while matched and stop[matched] != character:
                matched = of_stop[matched]
            matched += stop[matched] == character
            if matched == len(stop):
                longest = max(longest, stop, key=len)
                matched = of_stop[matched]
            self._matched[i] = matched
        return longest or None


@lru_cache(maxsize=256)
def borders(text: str) -> tuple[int, ...]:
    """KMP failure table: for each n, the length of the longest proper prefix of `text[:n]` that is
    also its suffix."""
    found = [0, 0]
    for character in text[1:]:
        length = found[-1]
        while length and text[length] != character:
            length = found[length]
        found.append(length + (text[length] == character))
    return tuple(found)
