"""Memory planning: how many pages fit, and what they are good for."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.params import KVCacheParamInterface
from kvgraph.errors import ParamsError


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pages of one replica. The null page is extra: a pool has `num_pages + 1` page slots.

    `bytes_per_page` counts all shards of the replica; `pages_per_request` is what a request of
    `max_seq_len` tokens needs.
    """

    num_pages: int
    bytes_per_page: int
    page_size: int
    pages_per_request: int
    available: int

    @property
    def nbytes(self) -> int:
        """Bytes of the `num_pages` usable pages."""
        return self.num_pages * self.bytes_per_page

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def max_concurrent_requests(self) -> int:
        """Requests of maximum length that fit at once; 0 if not even one does."""
        return self.num_pages // self.pages_per_request


def plan_memory(
    params: KVCacheParamInterface,
    available: int,
    max_batch_size: int,
    max_seq_len: int,
    *,
    require_max_seq_len: bool = False,
) -> MemoryPlan:
    """Pages that `available` bytes of one replica hold, at most what the batch can ever use.

    `num_pages = min(available // bytes_per_page, ceil(max_seq_len / page_size) * max_batch_size)`.
    ParamsError (a ValueError) if that is zero, or, with `require_max_seq_len`, if one request of
    `max_seq_len` tokens does not fit; the message holds the arithmetic.
    """
    for name, value in (("max_batch_size", max_batch_size), ("max_seq_len", max_seq_len)):
        if value < 1:
            raise ParamsError(f"{name}: expected >= 1, got {value}")
    bytes_per_page = params.bytes_per_page
    pages_per_request = ceildiv(max_seq_len, params.page_size)
    fitting = available // bytes_per_page
    if fitting < 1:
        raise ParamsError(
            f"available memory: expected at least one page of {bytes_per_page} bytes, "
            f"got {available} bytes ({available} // {bytes_per_page} = {fitting} pages)"
        )
    if require_max_seq_len and fitting < pages_per_request:
        raise ParamsError(
            f"available memory: expected {pages_per_request} pages for one request of max_seq_len "
            f"{max_seq_len} (ceil({max_seq_len} / {params.page_size})), "
            f"got {fitting} pages ({available} // {bytes_per_page})"
        )
    num_pages = min(fitting, pages_per_request * max_batch_size)
    return MemoryPlan(num_pages, bytes_per_page, params.page_size, pages_per_request, available)
