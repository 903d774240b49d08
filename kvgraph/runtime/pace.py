"""How many tokens of prompts a step may carry, from what the steps before it took.

The scheduler asks before a step, the engine tells after it. No clock is read here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

SMALLEST_CHUNK = 8
FIRST_CHUNK = 48
"""Tokens, before steps were measured."""

WARM_UP = 2
"""Steps that are not learned: they make what later ones find made."""

PROBE = 16
"""Steps with prompts in a row, behind which comes one without, to be measured."""

LEARNING_RATE = 0.2
ROWS = 16.0
"""Rows that weigh in learning as much as what all of a step shares."""

MANY = 1024
"""Tokens of a prompt that take at least as long as a step: where one cost nothing, it may then."""

FORGETTING = 0.9
"""Of the largest chunk, with each later one."""


class Pace(Protocol):
    """What the scheduler asks, and what a step's end tells."""

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """A step in which `rows` decoded and that carried `tokens` of prompts took `seconds`."""

    def prompt_tokens(self, rows: int, waiting: int) -> int | None:
        """Tokens of prompts for a step in which `rows` decode, while `waiting` prompts wait or are
        begun; None: no bound, as where no row decodes."""


@dataclass(frozen=True, slots=True)
class FixedPace:
    """The same number of tokens in every step, unless more prompts wait than rows decode: a burst
    begins together."""

    most: int

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        pass

    def prompt_tokens(self, rows: int, waiting: int) -> int | None:
        return None if waiting > rows else self.most


class StepPace:
    """Prompts take as much time of a step as the rows that decode, and more by as many as wait for
    each of those: a step takes about twice its time without prompts, and a burst begins together.

    The seconds of a step without prompts, `fixed + row * rows`, are learned by normalised least
    mean squares (Haykin, Adaptive Filter Theory, chapter 7); those of a token of a prompt are a
    moving average of what steps with prompts take in addition. Both at most double with a step, so
    that a pause of the machine is soon forgotten, and so do chunks, so that one that costs more
    than was learned is not long.
    """

    def __init__(self) -> None:
        self._fixed: float | None = None
        self._row = 0.0
        self._token: float | None = None
        self._fastest = math.inf
        self._chunk = 0.0
        self._in_a_row = self._steps = 0

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        if rows:
            self._in_a_row = self._in_a_row + 1 if tokens else 0
            self._chunk = max(tokens, FORGETTING * self._chunk) if tokens else self._chunk
        self._steps += 1
        if self._steps <= WARM_UP:
            return
        if not tokens:
            self._learn_decode(rows, seconds)
        elif not rows or self._fixed is not None:
            self._learn_token(max(0.0, seconds - self._decode_seconds(rows)) / tokens)

    def prompt_tokens(self, rows: int, waiting: int) -> int | None:
        if not rows:
            return None
        if self._in_a_row >= PROBE:
            return 0
        if self._fixed is None or self._token is None:
            return FIRST_CHUNK
        most = max(FIRST_CHUNK, int(2 * self._chunk))
        seconds = self._decode_seconds(rows) * (rows + waiting) / rows
        wanted = int(seconds / self._token) if self._token else most
        return max(SMALLEST_CHUNK, min(most, wanted))

    def _learn_decode(self, rows: int, seconds: float) -> None:
        self._fastest = min(self._fastest, seconds)
        if self._fixed is None:
            self._fixed = seconds
            return
        expected, scaled = self._decode_seconds(rows), rows / ROWS
        error = LEARNING_RATE * min(seconds - expected, expected) / (1 + scaled * scaled)
        fixed, row = self._fixed + error, self._row + error * scaled / ROWS
        # What one part cannot take, as it is no less than nothing, the other one does.
        self._fixed = max(0.0, fixed + min(0.0, row) * rows)
        self._row = max(0.0, row + min(0.0, fixed) / rows)

    def _learn_token(self, seconds: float) -> None:
        old = self._token
        if old is None:
            self._token = seconds
        else:
            most = max(old, self._fastest / MANY)
            self._token = old + LEARNING_RATE * min(seconds - old, most)

    def _decode_seconds(self, rows: int) -> float:
        """At least those of the fastest step."""
        if not rows or self._fixed is None:
            return 0.0
        return max(self._fastest, self._fixed + self._row * rows)
