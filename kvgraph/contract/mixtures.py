"""Mixtures of experts in a graph: how many there are, and what a step reads of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """`layers` layers of `experts` experts each, of which a token takes `active`.

    `parameters` without padding, `bytes` as they are stored, with it: of all of them, or of those
    that one of several ranks holds.
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


def joined(layers: Iterable[Mixture]) -> list[Mixture]:
    """Those with as many experts, of which a token takes as many, in one; in order of the first."""
    found: dict[tuple[int, int], Mixture] = {}
    for each in layers:
        kind = each.experts, each.active
        before = found.get(kind)
        found[kind] = each if before is None else _sum(before, each)
    return list(found.values())


def _sum(a: Mixture, b: Mixture) -> Mixture:
    return Mixture(
        layers=a.layers + b.layers,
        experts=a.experts,
        active=a.active,
        parameters=a.parameters + b.parameters,
        bytes=a.bytes + b.bytes,
    )
