"""Identities of pages: a chain of hashes over token prefixes, the same in every process.

root = sha256("kvgraph-page-1", identity, adapter, hash_seed, cache_salt), each length-prefixed;
digest_i = sha256(digest_{i-1}, tokens of page i as int32 little-endian).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from kvgraph.kv.requests import PageChain, TextContext

_DOMAIN = b"kvgraph-page-1"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings that all replicas share: sizes in tokens and rows. `identity`: model and layout."""

    page_size: int
    max_batch_size: int
    max_seq_len: int
    prefix_caching: bool
    identity: bytes
    hash_seed: bytes | None

    def identities(self, ctx: TextContext) -> tuple[bytes, list[bytes]]:
        """Root, and digests of all full pages that do not hold the last token.

        A private request has no digests: no page is looked up for it. A page is hashed once: the
        request keeps its identities, since admission asks for them several times.
        """
        source = (self, ctx.adapter, ctx.cache_salt)
        known = ctx.page_chain
        if known is None or known.source != source:
            root = chain_root(self.identity, ctx.adapter, self.hash_seed, ctx.cache_salt)
            known = ctx.page_chain = PageChain(source, root, [])
        full = 0 if ctx.is_private else (ctx.current_length - 1) // self.page_size
        hashed = len(known.digests)
        if hashed < full:
            last = known.digests[-1] if hashed else known.root
            more = chain(last, ctx.tokens, self.page_size, hashed, full)
            known = ctx.page_chain = known._replace(digests=known.digests + more)
        return known.root, known.digests[:full]


def chain_root(identity: bytes, adapter: str, hash_seed: bytes | None, cache_salt: bytes) -> bytes:
    """The 32-byte digest from which a request's chain starts."""
    return digest_of(_DOMAIN, identity, adapter.encode(), hash_seed or b"", cache_salt)


def digest_of(*parts: bytes) -> bytes:
    """SHA-256 of the parts, each length-prefixed; 32 bytes."""
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def chain(
    digest: bytes, tokens: npt.NDArray[np.int32], page_size: int, start: int, stop: int
) -> list[bytes]:
    """Digests of pages `[start, stop)`. `digest`: that of page `start - 1`, or the root."""
    data = tokens[start * page_size : stop * page_size].astype("<i4", copy=False).tobytes()
    step = 4 * page_size
    digests = []
    for offset in range(0, len(data), step):
        digest = sha256(digest + data[offset : offset + step]).digest()
        digests.append(digest)
    return digests
