"""Memory planning: how many pages fit, and how many requests they serve."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.params import KVCacheParamInterface, KVCacheParams
from kvgraph.contract.values import require_integer
from kvgraph.errors import ParamsError

DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS = 64, 2048
"""Rows and new tokens of an engine's step where nothing says otherwise."""

ONNX_BATCH_TOKENS = 768
"""New tokens of a step on ONNX Runtime's CPU session, which says why."""

DEVICE_CACHE_SHARE = 0.9
"""Share of the GPU memory left after weights and the largest step that the cache gets. The rest is
for captured graphs, copies between tiers, and libraries."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pages of one replica. The null page is extra: a pool has `num_pages + 1` page slots.

    `bytes_per_page`: over all shards of the replica. `pages_per_request`: pages of a request of
    `max_seq_len` tokens.
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
        """Requests of maximum length that fit at once; 0 if not even one fits."""
        return self.num_pages // self.pages_per_request


SCORED_TOKENS = 128
"""Tokens of prompts that get logits in a step: 16 MB at a vocabulary of 32,000."""


def most_logits(rows: int, tokens: int) -> int:
    """Most rows of logits of a step with at most `tokens` new tokens: one for each of `rows`
    requests, and SCORED_TOKENS of scored prompts. A token has one row at most."""
    return min(rows + SCORED_TOKENS, tokens)


def most_pages(leaf: KVCacheParams, tokens: int, chunk: int) -> int:
    """Pages of `leaf` that one request of `tokens` tokens can hold at once.

    A leaf without a window holds all pages; a leaf with one holds the pages that the queries of a
    chunk of `chunk` tokens see.
    """
    whole = ceildiv(tokens, leaf.page_size)
    if leaf.window_size is None:
        return whole
    return min(whole, ceildiv(leaf.window_size - 1 + chunk, leaf.page_size) + 1)


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """Pages of each leaf of one replica, by path, and the number of requests of maximum length that
    they hold: 0 to `max_batch_size`."""

    pages: dict[str, int]
    nbytes: int
    max_concurrent_requests: int


def plan_leaves(
    params: KVCacheParamInterface,
    available: int,
    max_batch_size: int,
    max_seq_len: int,
    chunk: int,
) -> LeafPlan:
    """Divide `available` bytes of one replica among the leaves of `params`.

    A step has at most `chunk` new tokens in all. A leaf with a window gets the pages that the
    requests that fit (at most `max_batch_size`) can hold in it. The leaves without a window share
    the rest, at most `ceil(max_seq_len / page_size) * max_batch_size` pages each. Without any
    window the result is that of `plan_memory`. ParamsError if one request of maximum length would
    not fit into a leaf with a window, or if a leaf would get no page.
    """
    leaves = params.leaves
    if all(leaf.window_size is None for leaf in leaves.values()):
        plan = plan_memory(params, available, max_batch_size, max_seq_len)
        pages = dict.fromkeys(leaves, plan.num_pages)
        return LeafPlan(pages, plan.nbytes, plan.max_concurrent_requests)
    steady = {path: _steady_pages(leaf, max_seq_len) for path, leaf in leaves.items()}
    extra = {
        path: 0 if leaf.window_size is None else ceildiv(chunk, leaf.page_size)
        for path, leaf in leaves.items()
    }
    request = sum(steady[path] * leaf.bytes_per_page for path, leaf in leaves.items())
    common = sum(extra[path] * leaf.bytes_per_page for path, leaf in leaves.items())
    requests = max(1, min((available - common) // request, max_batch_size))
    whole = ceildiv(max_seq_len, params.page_size) * max_batch_size
    pages = {
        path: min(steady[path] * requests + extra[path], whole)
        for path, leaf in leaves.items()
        if leaf.window_size is not None
    }
    rest = available - sum(n * leaves[path].bytes_per_page for path, n in pages.items())
    full = [path for path in leaves if path not in pages]
    if full:
        share = rest // sum(leaves[path].bytes_per_page for path in full)
        pages |= dict.fromkeys(full, min(share, whole))
    if rest < 0 or min(pages.values()) < 1:
        raise ParamsError(
            f"available memory: expected one page of each cache and the windows of one request "
            f"({common} + {request} bytes at {max_seq_len} tokens hold all of it), "
            f"got {available} bytes"
        )
    return LeafPlan(
        {path: pages[path] for path in leaves},
        sum(n * leaves[path].bytes_per_page for path, n in pages.items()),
        min(
            # At `whole`, a leaf holds all that the batch can have: it limits nothing.
            max_batch_size if n >= whole else max(0, (n - extra[path]) // steady[path])
            for path, n in pages.items()
        ),
    )


def _steady_pages(leaf: KVCacheParams, tokens: int) -> int:
    """Pages of a request between chunks; its window can touch one more page at each end."""
    whole = ceildiv(tokens, leaf.page_size)
    if leaf.window_size is None:
        return whole
    return min(whole, ceildiv(leaf.window_size - 1, leaf.page_size) + 2)


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
    available = require_integer("available", available, ParamsError)
    max_batch_size = require_integer("max_batch_size", max_batch_size, ParamsError, least=1)
    max_seq_len = require_integer("max_seq_len", max_seq_len, ParamsError, least=1)
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
