"""What all replicas of a manager share."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.kv.prefix import chain, chain_root
from kvgraph.kv.requests import TextContext


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in tokens and rows; `identity` is of model and layout."""

    page_size: int
    max_batch_size: int
    max_seq_len: int
    prefix_caching: bool
    has_tiers: bool
    identity: bytes
    hash_seed: bytes | None

    def identities(self, ctx: TextContext) -> tuple[bytes, list[bytes]]:
        """Root, and digests of all full pages that do not hold the last token."""
        root = chain_root(self.identity, ctx.adapter, self.hash_seed, ctx.cache_salt)
        full = (ctx.current_length - 1) // self.page_size
        return root, chain(root, ctx.tokens, self.page_size, 0, full)
