"""Mixtures of experts in a graph: their sizes, and the bytes that a step reads of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """`layers` layers of `experts` experts each, of which a token uses `active`.

    `parameters`: number of parameters without padding. `bytes`: stored size, with padding. Both
    count all experts, or the experts that one of several ranks holds.
    """

    layers: int
    experts: int
    active: int
    parameters: int
    bytes: int

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses."""
        return self.parameters * self.active // self.experts

    def read(self, rows: int) -> int:
        """Bytes that a step of `rows` tokens reads, if tokens choose evenly and independently.

        No row uses an expert with probability `(1 - active / experts) ** rows`.
        """
        share = 1 - (1 - self.active / self.experts) ** rows
        return round(self.bytes * share)


def joined(layers: Iterable[Mixture]) -> list[Mixture]:
    """Merge mixtures with equal `experts` and `active`, in order of their first occurrence."""
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
