"""State of a claimed request in a replica."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum

from kvgraph.errors import RequestError
from kvgraph.kv.pool.identity import PoolSettings
from kvgraph.kv.requests import RequestID, require_key

UNBOUNDED = sys.maxsize


class Phase(Enum):
    """State of a row between `claim` and `release`.

    CLAIMED --alloc--> ALLOCATED
       | ^                 ^
    alloc| load failed     | landed
       v |                 |
      LOADING -------------'
    """

    CLAIMED = "it owns no page"
    LOADING = "its first pages are being loaded: it cannot run"
    ALLOCATED = "it owns the pages of its tokens"
    DUMMY = "it points at the null page for life"


CLAIMED, LOADING, ALLOCATED, DUMMY = Phase
"""Members of Phase for hot code: in Python 3.11 `Phase.CLAIMED` takes as long as a call."""


class Row:
    """A claimed request: its row of the lookup tables, its pages, and the marks of the hot loops.

    - `replica_idx`: the replica that it is claimed on
    - `index`: row of the lookup tables; `position`: row of the batch resolved last
    - `pages[leaf]`: page ids in the order of tokens, the null page where a window has passed
    - `capacity`: tokens that the pages hold; `limit`: alloc needs nothing up to this many tokens
      (0 while prefill tokens are still to be counted)
    - `wake`: step needs nothing below this many processed tokens
    - `digests`: digests of the pages hashed so far, after `root`; `committed`: number of pages that
      were committed to the index
    - `epoch`: epoch of the cache when the row got its first pages; in another epoch the row commits
      nothing; with None it never commits
    - `prefill_end`, `counted`: number of prefill tokens, and how many of them metrics have counted
    """

    __slots__ = (
        "capacity",
        "committed",
        "counted",
        "digests",
        "epoch",
        "index",
        "limit",
        "pages",
        "passed",
        "phase",
        "position",
        "prefill_end",
        "replica_idx",
        "request_id",
        "root",
        "wake",
    )

    def __init__(self, request_id: RequestID, replica_idx: int, index: int, leaves: int) -> None:
        self.request_id = request_id
        self.replica_idx = replica_idx
        self.index = index
        self.position = 0
        self.phase = CLAIMED
        self.pages: list[list[int]] = [[] for _ in range(leaves)]
        self.passed = [0] * leaves  # pages that the leaf's window has left behind
        self.capacity = self.limit = self.wake = 0
        self.root = b""
        self.digests: list[bytes] = []
        self.epoch: object = None
        self.committed = 0
        self.prefill_end = self.counted = 0

    def enter(self, phase: Phase, settings: PoolSettings) -> None:
        """Set the phase, for the pages that the row has now.

        Only this method sets `capacity` and `limit`, which hot loops read instead of the phase. It
        also sets the first `wake`.
        """
        self.phase = phase
        if phase is DUMMY:
            self.capacity = self.limit = self.wake = UNBOUNDED
        elif phase is ALLOCATED:
            self.capacity = len(self.pages[0]) * settings.page_size
            is_counted = 0 < self.prefill_end <= self.counted
            self.limit = min(self.capacity, settings.max_seq_len) if is_counted else 0
        else:
            self.capacity = self.limit = self.wake = 0

    def become_dummy(self, null_pages: Sequence[int], settings: PoolSettings) -> None:
        """Turn the row into a dummy: no call has an effect on it, and all its pages are null."""
        self.pages = [[null] for null in null_pages]
        self.passed = [1] * len(null_pages)
        self.enter(DUMMY, settings)

    @property
    def num_pages(self) -> int:
        return len(self.pages[0])


def row_of(
    request_id: RequestID, claimed: Mapping[RequestID, Row], replica_idx: int, call: str
) -> Row:
    """The request's row; RequestError if it is not claimed on this replica."""
    try:
        row = claimed.get(request_id)
    except TypeError:
        require_key(request_id)
        raise
    if row is None:
        raise RequestError(
            f"{call} of {request_id!r}: expected a request claimed on replica {replica_idx}, "
            "got one that is not claimed; call `claim` first"
        )
    if row.replica_idx != replica_idx:
        raise RequestError(
            f"{call} of {request_id!r}: expected a request claimed on replica {replica_idx}, "
            f"got one claimed on replica {row.replica_idx}"
        )
    return row
