"""What a replica knows about a claimed request, and about a batch of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvgraph.kv.requests import RequestID, TextContext

if TYPE_CHECKING:
    from kvgraph.kv.replica import Replica
    from kvgraph.kv.tiering import Loading

UNBOUNDED = sys.maxsize


class Row:
    """A claimed request: its row of the lookup tables, its pages, and the marks of the hot loops.

    - `index`: row of the lookup tables; `position`: row of the batch resolved last
    - `pages[leaf]`: page ids in the order of tokens, the null page where a window has passed
    - `capacity`: tokens that the pages hold; `limit`: alloc needs nothing up to this many tokens
      (0 while prefill tokens are still to be counted)
    - `wake`: step needs nothing below this many processed tokens
    - `digests`: of the pages hashed so far, after `root`; `committed`: pages offered to the index
    - `prefill_end`, `counted`: tokens that are prefill, and how many of them metrics have seen
    - `loading`: while first pages are on their way from a tier; until then `capacity` is 0
    """

    __slots__ = (
        "capacity",
        "committed",
        "counted",
        "digests",
        "index",
        "is_dummy",
        "limit",
        "loading",
        "pages",
        "passed",
        "position",
        "prefill_end",
        "replica",
        "request_id",
        "root",
        "wake",
    )

    def __init__(self, request_id: RequestID, replica: Replica, index: int, leaves: int) -> None:
        self.request_id = request_id
        self.replica = replica
        self.index = index
        self.is_dummy = False
        self.position = 0
        self.pages: list[list[int]] = [[] for _ in range(leaves)]
        self.passed = [0] * leaves  # pages that the leaf's window has left behind
        self.capacity = self.limit = self.wake = 0
        self.root = b""
        self.digests: list[bytes] = []
        self.committed = 0
        self.prefill_end = self.counted = 0
        self.loading: Loading | None = None

    def become_dummy(self, null_pages: Sequence[int]) -> None:
        """Every call on it does nothing from now on; its lookup row is all null pages."""
        self.is_dummy = True
        self.pages = [[null] for null in null_pages]
        self.passed = [1] * len(null_pages)
        self.capacity = self.limit = self.wake = UNBOUNDED

    @property
    def num_pages(self) -> int:
        return len(self.pages[0])


class Resolved:
    """A batch whose requests are known to be claimed here: contexts and rows, side by side."""

    __slots__ = ("_indices", "contexts", "rows")

    def __init__(self, contexts: list[TextContext], rows: list[Row]) -> None:
        self.contexts = contexts
        self.rows = rows
        self._indices: npt.NDArray[np.intp] | None = None

    @property
    def indices(self) -> npt.NDArray[np.intp]:
        """Rows of the lookup tables, `[batch_size]`."""
        if self._indices is None:
            self._indices = np.array([row.index for row in self.rows], np.intp)
        return self._indices
