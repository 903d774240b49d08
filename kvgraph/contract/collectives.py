"""Collective operations between the ranks of an artifact, as its manifest records them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`count` calls of `op` in a step; in each call a rank sends `bytes` bytes per row.

    `rows`: the rows of a call: the "tokens" of the step, or the "logits" that it computes.
    """

    op: str
    count: int
    rows: str
    bytes: int
