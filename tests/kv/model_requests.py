"""Requests and params of the cache's state machines."""

from __future__ import annotations

import numpy as np

from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.kv.requests import TextContext
from tests.support.builders import make_params

STAMP = (1 << 16) - 1
"""Low bits of a cell: which run wrote it."""


class Request:
    """A context and the hashes of its prefixes."""

    def __init__(self, ctx: TextContext, replica: int) -> None:
        self.ctx = ctx
        self.replica = replica
        self.is_dummy = False
        self._hashes: list[int] = []

    def hashes(self, total: int) -> np.ndarray:
        """Hash of the prefix that ends at each position `[0, total)`."""
        tokens, hashes = self.ctx.tokens.tolist(), self._hashes
        for at in range(len(hashes), total):
            before = hashes[-1] if hashes else hash((self.ctx.cache_salt, self.ctx.adapter))
            hashes.append(hash((before, tokens[at])))
        return np.array(hashes[:total], np.int64) & ~STAMP

    def lengths(self) -> tuple[int, ...]:
        ctx = self.ctx
        return ctx.processed_length, ctx.active_length, ctx.current_length, ctx.cached_prefix_length


def params_of(
    replicas: int, page_size: int, windows: tuple[int | None, ...], caching: bool
) -> KVCacheParams | MultiKVCacheParams:
    """A single cache, or a tree with a leaf for each window."""
    leaves = [
        make_params(
            dp=replicas, page_size=page_size, window_size=window, enable_prefix_caching=caching
        )
        for window in windows
    ]
    tree = MultiKVCacheParams.from_params({f"leaf{i}": leaf for i, leaf in enumerate(leaves)})
    return leaves[0] if len(leaves) == 1 else tree
