"""Bounds the prompt tokens of a step, from the measured times of earlier steps.

The scheduler asks before a step, `Batch.update` reports after it. No clock is read here.
"""

from __future__ import annotations

import math
from typing import Protocol

SMALLEST_CHUNK = 8
FIRST_CHUNK = 48
"""Size in tokens of the first chunks, before times were measured."""

WARM_UP = 2
"""First steps, not learned from: they compile and allocate what later steps reuse."""

PROBE = 16
"""Most steps in a row that decode and carry prompts; the next carries none, to be measured."""

LEARNING_RATE = 0.2
ROWS = 16.0
"""Scale of the row count in learning: this many rows weigh as much as the fixed time."""

MANY = 1024
"""Prompt tokens assumed to take at least one fastest step, so that a time of 0 can grow again."""

NEW_ROWS = 1.5
"""A step with more than this many times as many rows as any measured one carries no prompt, to be
measured."""

BURST_SECONDS = 0.5
"""Least time for prompts in a step of a burst, of which only the burst's own rows wait."""

BURST_END = 8
"""A burst ends when there are this many times as many rows that decode as prompts that wait."""

FORGETTING = 0.9
"""Factor by which each later chunk reduces the remembered largest chunk."""


class Pace(Protocol):
    """Policy that bounds prompt tokens: the scheduler queries it, the end of a step informs it."""

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn that a step of `rows` decode rows and `tokens` prompt tokens took `seconds`."""

    def prompt_tokens(self, rows: int, waiting: int) -> int | None:
        """Most prompt tokens of a step with `rows` decode rows. `waiting`: prompts that wait or are
        partly processed. None: no bound, such as when no row decodes."""


class Burst:
    """Prompts that come while no row decodes: they start together, and only they wait for it."""

    def __init__(self) -> None:
        self._is_on = False

    def lasts(self, rows: int, waiting: int) -> bool:
        """Whether most of a burst is to be started still. Call it at every step; the same numbers
        give the same answer again within a step."""
        self._is_on = waiting * BURST_END > rows and (self._is_on or not rows)
        return self._is_on


class FixedPace:
    """The same bound in every step, except of a burst."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._burst = Burst()

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        pass

    def prompt_tokens(self, rows: int, waiting: int) -> int | None:
        return None if self._burst.lasts(rows, waiting) else self._most


class StepPace:
    """Gives prompts the time `decode * (rows + waiting) / rows`, with the decode time of the step.

    So one waiting prompt among many rows gets about as much time as the decode rows. Prompts of a
    burst get at least BURST_SECONDS of a step, so that its rows soon decode in full batches.

    The seconds of a step without prompts, `fixed + row * rows`, are learned by normalised least
    mean squares (Haykin, Adaptive Filter Theory, chapter 7). Many more rows than before are
    measured at once, and taken as measured: else their time would be ascribed to prompts. The
    seconds per prompt token are a moving average of the extra time of steps with prompts. A step at
    most doubles either, so that a pause of the machine is soon forgotten. Chunks at most double
    too, so that a chunk that costs more than was learned stays short.
    """

    def __init__(self) -> None:
        self._fixed: float | None = None
        self._row = 0.0
        self._most_rows = 0  # of a measured step without prompts
        self._token: float | None = None
        self._fastest = math.inf
        self._chunk = 0.0
        self._in_a_row = self._steps = 0
        self._burst = Burst()

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
        in_burst = self._burst.lasts(rows, waiting)
        if not rows:
            return None
        if self._in_a_row >= PROBE or 0 < NEW_ROWS * self._most_rows < rows:
            return 0
        if self._fixed is None or self._token is None:
            return FIRST_CHUNK
        most = max(FIRST_CHUNK, int(2 * self._chunk))
        seconds = self._decode_seconds(rows) * (rows + waiting) / rows
        if in_burst:
            seconds = max(seconds, BURST_SECONDS)
        wanted = min(most, seconds / self._token) if self._token else most
        return max(SMALLEST_CHUNK, int(wanted))

    def _learn_decode(self, rows: int, seconds: float) -> None:
        self._fastest = min(self._fastest, seconds)
        most = self._most_rows
        self._most_rows = max(most, rows)
        if self._fixed is None:
            self._fixed = seconds
            return
        if rows > NEW_ROWS * most:  # the time grows at most as the number of rows does
            seconds = min(seconds, self._decode_seconds(most) * rows / most)
            self._row = max(0.0, seconds - self._fixed) / rows
            return
        expected, scaled = self._decode_seconds(rows), rows / ROWS
        error = LEARNING_RATE * min(seconds - expected, expected) / (1 + scaled * scaled)
        fixed, row = self._fixed + error, self._row + error * scaled / ROWS
        # Neither part may be negative: the other part takes the excess.
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
        """Expected seconds of a step with `rows` decode rows; at least the fastest step's."""
        if not rows or self._fixed is None:
            return 0.0
        return max(self._fastest, self._fixed + self._row * rows)
