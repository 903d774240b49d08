"""Mixtures of experts in a graph: how many there are, and what a step reads of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """`layers` layers of `experts` experts each, of which a token takes `active`.

    Of all of them: `parameters` without padding, `bytes` as they are stored, with it.
    """

    layers: int
    experts: int
    active: int
    parameters: int
    bytes: int

    @property
    def active_parameters(self) -> int:
        """Those that work on a token."""
        return self.parameters * self.active // self.experts

    def read(self, rows: int) -> int:
        """Bytes that a step of `rows` tokens reads, if tokens choose evenly and on their own.

        An expert is left out by all rows with probability `(1 - active / experts) ** rows`.
        """
        share = 1 - (1 - self.active / self.experts) ** rows
        return round(self.bytes * share)
