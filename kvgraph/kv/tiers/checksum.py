"""Checksum over a record's key, model and bytes."""

from __future__ import annotations

from collections.abc import Iterable

from kvgraph.contract.loading import importing

with importing("xxhash", "needed by the disk and remote tiers", "pip install 'kvgraph[tiers]'"):
    import xxhash

DIGEST_BYTES = 16


def checksum(fingerprint: bytes, key: bytes, parts: Iterable[memoryview]) -> bytes:
    """XXH3-128 over a record's fingerprint, key, bytes and size; detects damage, not attacks.

    Measured over 16 MiB on one core: XXH3 15 to 41 GiB/s, CRC-32 5.9, SHA-256 1.7, BLAKE2b 1.2;
    a file system's cache copies 3 to 17.
    """
    state = xxhash.xxh3_128(fingerprint + key)
    size = 0
    for part in parts:
        state.update(part)
        size += part.nbytes
    state.update(size.to_bytes(8, "little"))
    return state.digest()
