"""Identities of pages: a chain of hashes over token prefixes, the same in every process.

root = sha256("kvgraph-page-1", identity, adapter, hash_seed, cache_salt), each length-prefixed;
digest_i = sha256(digest_{i-1}, tokens of page i as int32 little-endian).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from hashlib import sha256

import numpy as np
import numpy.typing as npt

_DOMAIN = b"kvgraph-page-1"


def chain_root(identity: bytes, adapter: str, hash_seed: bytes | None, cache_salt: bytes) -> bytes:
    """What the chain of a request starts from; 32 bytes."""
    return digest_of(_DOMAIN, identity, adapter.encode(), hash_seed or b"", cache_salt)


def digest_of(*parts: bytes) -> bytes:
    """SHA-256 of the parts, each length-prefixed; 32 bytes."""
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def chain(
    digest: bytes, tokens: npt.NDArray[np.int32], page_size: int, start: int, stop: int
) -> list[bytes]:
    """Digests of pages `[start, stop)`, where `digest` is that of page `start - 1`, or the root."""
    data = tokens[start * page_size : stop * page_size].astype("<i4", copy=False).tobytes()
    step = 4 * page_size
    digests = []
    for offset in range(0, len(data), step):
        digest = sha256(digest + data[offset : offset + step]).digest()
        digests.append(digest)
    return digests


class Either:
    """What one of two indexes holds."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Container[bytes], second: Container[bytes]) -> None:
        self._first, self._second = first, second

    def __contains__(self, digest: object) -> bool:
        return digest in self._first or digest in self._second


def longest_run(digests: Sequence[bytes], index: Container[bytes]) -> int:
    """Pages from the root that `index` holds without a gap."""
    for count, digest in enumerate(digests):
        if digest not in index:
            return count
    return len(digests)


def deepest_window(digests: Sequence[bytes], index: Container[bytes], window_pages: int) -> int:
    """Deepest point whose last `window_pages` pages `index` holds, or all of them to the root."""
    point, run = len(digests), 0
    for i in reversed(range(len(digests))):
        if run == window_pages:
            return point
        if digests[i] in index:
            run += 1
        else:
            point, run = i, 0
    return point
