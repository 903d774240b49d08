"""Interface of a tier below the host: a store of pages, as bytes by key.

A page is one record of one leaf: for each shard of the replica in turn, the bytes of
`kv_blocks[page]`, then those of `kv_scales[page]` if the pool is quantised. Its key is
`page_key(digest, leaf, shards)`, so one folder or server serves all leaves, and any number of
processes. Records of one leaf all have one size; leaves of a tree may have different ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Protocol
from weakref import ref

from kvgraph.kv.pool.identity import digest_of
from kvgraph.signal_handlers import reraise_if_signalled

KEY_BYTES = 32

log = logging.getLogger("kvgraph.tiers")


def page_key(digest: bytes, leaf: str, shards: str) -> bytes:
    """The 32-byte key of the page of leaf path `leaf` that ends the token prefix `digest`.

    `shards`: range of the record's shards and their total, such as "0-2/2".
    """
    return digest_of(b"kvgraph-tier-1", digest, leaf.encode(), shards.encode())


@dataclass(slots=True)
class StoreStats:
    """Figures of a store, as a copy. Counters are of this process, since the store was opened.

    - `num_pages`: pages of `page_bytes` that the size limit allows; `num_used_pages`: pages of
      this fingerprint that it holds now (in a shared store: at the last count); `nbytes`: bytes of
      all records, those of other fingerprints too
    - `read`, `written`: pages; touched pages do not count
    - `missed`: reads that found nothing; `damaged`: damaged records, which were removed;
      `foreign`: records found (at open or at a read) of another model, layout, format or size,
      which are ignored
    - `dropped`: pages not written: no room, too slow, dead, or larger than the limit
    - `evicted`: pages removed to make room
    - `problem`: one sentence why every call misses or drops now; empty if the store works
    """

    num_pages: int = 0
    num_used_pages: int = 0
    nbytes: int = 0
    read: int = 0
    written: int = 0
    missed: int = 0
    damaged: int = 0
    foreign: int = 0
    dropped: int = 0
    evicted: int = 0
    problem: str = ""

    def __add__(self, other: StoreStats) -> StoreStats:
        """Sum of two stores' figures, field by field, with both problems."""
        problem = "; ".join(filter(None, (self.problem, other.problem)))
        names = [field.name for field in fields(self) if field.name != "problem"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return StoreStats(**sums, problem=problem)


class PageStore(Protocol):
    """A bounded, synchronous store of pages.

    The constructor takes the store's place, `fingerprint` (32 bytes, of model, layout and page
    format) and `page_bytes` (size of the largest record). It raises StoreError for errors that the
    user must fix (a folder that cannot be written, a limit below one page, a malformed address,
    credentials that are refused). Damage, a full disk, and a server that does not answer or gives
    invalid answers are no errors: the store starts dead, says why in `stats().problem`, and
    recovers. No other call raises: a store that fails misses and drops.

    One worker thread makes all calls except the constructor's, before the others, and `close`,
    after them; other threads may make these two. Any thread may call `stats` at any time; it does
    no I/O. A call that may block for long needs a bound that the constructor takes (a time-out). A
    store known to be dead must answer at once, and try again from time to time.
    """

    @property
    def name(self) -> str:
        """Name of the tier in metrics and messages: "disk", "remote" or "prefix"."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether `read` would probably succeed; a cheap check that may be wrong.

        The answer is per key and not the length of a leading run: a leaf with a window needs only
        its last pages, and the pages before them may be gone.
        """

    def read(self, key: bytes, out: memoryview) -> bool:
        """Fill `out` (writable, contiguous, one record) with the record of `key`.

        False: a miss, and the content of `out` is undefined. A damaged or truncated record is
        removed and counted; a checksum over key, fingerprint and bytes is compared *after* the
        bytes were copied to `out`. A record of another size or fingerprint is kept and counted.
        The record of a key never changes: a key identifies its content.
        """

    def write(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Store the concatenation of `parts` (bytes, contiguous, valid during the call only).

        True if the record is held now, written by this call or before. False: dropped. Evicts the
        least recently used pages to make room. A record becomes visible only as a whole, even if
        the process is killed.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark pages as used, to evict them later. Ignores unknown keys; may be approximate."""

    def flush(self) -> None:
        """End batches and publish written pages; called when the worker has no work for now."""

    def clear(self) -> None:
        """Remove every page of this fingerprint; pages of other models stay.

        If that fails, the store misses and drops until it succeeds: no earlier page is read after
        the call.
        """

    def stats(self) -> StoreStats:
        """Figures, without I/O; from any thread."""

    def close(self) -> None:
        """Release files, connections and memory; written pages stay. Idempotent.

        A `clear` that failed is tried once more; a warning is logged if it fails again.
        """


def held_by_each(stores: Iterable[PageStore], keys: Iterable[bytes]) -> Iterator[set[bytes]]:
    """Yield, for each store in turn, the `keys` that it holds and that no earlier store holds."""
    missing = list(keys)
    for store in stores:
        if missing:
            answers = zip(missing, store.contains(missing), strict=True)
            held = {key for key, is_here in answers if is_here}
            missing = [key for key in missing if key not in held]
            yield held


class Closable(Protocol):
    """What has an end."""

    def close(self) -> None: ...


def close_alive(closable: ref[Closable]) -> None:
    """Close it as the interpreter ends, unless it is gone; threads that run keep it alive."""
    alive = closable()
    if alive is not None:
        alive.close()


def close_all(stores: Iterable[PageStore]) -> None:
    """Close all `stores`, also if one is interrupted; the errors of some are logged."""
    with ExitStack() as closing:
        for store in stores:
            closing.callback(_close, store)


def _close(store: PageStore) -> None:
    try:
        store.close()
    except Exception as error:
        reraise_if_signalled(error)
        log.exception("a tier failed")
