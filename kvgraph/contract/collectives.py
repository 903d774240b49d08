"""What the ranks of an artifact exchange in a step: a record of its manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`count` calls of `op` in a step; of each a rank gives `bytes` bytes per token.

    `rows`: "tokens" of the step, or the "logits" that it computes.
    """

    op: str
    count: int
    rows: str
    bytes: int
