"""Find registers that may be read before they are written, before a kernel runs.

Only these registers are watched while it runs. A write under a predicate may not happen, so it does
not count. Registers that no instruction writes are left out: compilers use them for values that do
not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Flow(Protocol):
    """The data of an instruction that the analysis needs."""

    reads: frozenset[int]
    writes: frozenset[int]
    kind: str
    target: int
    guard: int


def unassigned_reads(code: Sequence[Flow]) -> frozenset[int]:
    """Registers with a read that some path reaches without a write before."""
    starts = _starts(code)
    ends = [*starts[1:], len(code)]
    place = {start: index for index, start in enumerate(starts)}
    written = [_written(code[a:b]) for a, b in zip(starts, ends, strict=True)]
    every = (1 << 1 + max((max(op.writes | op.reads, default=0) for op in code), default=0)) - 1
    before = [every] * len(starts)
    before[0] = 0
    work, seen = [0], {0}
    while work:
        index = work.pop()
        after = before[index] | written[index]
        for following in _successors(code, ends[index], place):
            known = before[following] & after
            if known != before[following] or following not in seen:
                before[following] = known
                seen.add(following)
                work.append(following)
    doubtful: set[int] = set()
    anywhere = frozenset(slot for op in code for slot in op.writes)
    for index, start in enumerate(starts):
        known = before[index]
        for op in code[start : ends[index]]:
            doubtful.update(slot for slot in op.reads & anywhere if not known >> slot & 1)
            if op.guard < 0:
                for slot in op.writes:
                    known |= 1 << slot
    return frozenset(doubtful)


def _starts(code: Sequence[Flow]) -> list[int]:
    """Indices of the first instructions of basic blocks."""
    found = {0}
    for at, op in enumerate(code):
        if op.kind in ("bra", "ret") and at + 1 < len(code):
            found.add(at + 1)
        if op.kind == "bra":
            found.add(op.target)
    return sorted(start for start in found if start < len(code))


def _written(part: Sequence[Flow]) -> int:
    known = 0
    for op in part:
        if op.guard < 0:
            for slot in op.writes:
                known |= 1 << slot
    return known


def _successors(code: Sequence[Flow], end: int, place: dict[int, int]) -> list[int]:
    last = code[end - 1]
    found = [place[last.target]] if last.kind == "bra" and last.target in place else []
    if (last.kind not in ("bra", "ret") or last.guard >= 0) and end in place:
        found.append(place[end])
    return found
