"""How many tokens of prompts a step may carry, from what the steps before it took.

The scheduler asks before a step, the engine tells after it. No clock is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SMALLEST_CHUNK = 8
FIRST_CHUNK = 48
"""Tokens, before any step was measured."""

LEARNING_RATE = 0.1
ROWS, TOKENS = 16.0, 64.0
"""Rows, and tokens of prompts, that weigh in learning as much as what all of a step shares."""


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

    The seconds of a step, `a + b * rows + c * tokens` of prompts, are learned by normalised least
    mean squares (Haykin, Adaptive Filter Theory, chapter 7), which keep what they know of rows and
    tokens that do not vary for long. A step counts for at most twice the expected time, so that a
    pause of the machine is soon forgotten.
    """

    def __init__(self) -> None:
        self._weights: tuple[float, float, float] | None = None
        """Seconds of what all shares, of ROWS rows, and of TOKENS tokens."""

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        inputs = (1.0, rows / ROWS, tokens / TOKENS)
        old = self._weights or (0.0, 0.0, 0.0)
        expected = sum([weight * x for weight, x in zip(old, inputs, strict=True)])
        error = seconds - expected
        if self._weights is not None:
            error = LEARNING_RATE * min(error, expected)
        error /= sum([x * x for x in inputs])
        a, b, c = (max(0.0, weight + error * x) for weight, x in zip(old, inputs, strict=True))
        self._weights = (a, b, c)

    def prompt_tokens(self, rows: int, waiting: int) -> int | None:
        if not rows:
            return None
        if self._weights is None:
            return FIRST_CHUNK
        shared, row, token = self._weights
        seconds = (shared + row * rows / ROWS) * (rows + waiting) / rows
        return max(SMALLEST_CHUNK, int(seconds * TOKENS / token)) if token else None
