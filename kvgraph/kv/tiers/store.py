"""What a tier below the host is to the rest: a keyed store of pages, as bytes.

A page is one record of one leaf: for each shard of the replica in turn, the bytes of
`kv_blocks[page]`, then those of `kv_scales[page]` where the pool is quantised. Its key is
`page_key(digest, leaf, shards)`, so one folder or server serves all leaves, and any number of
processes. Records of one leaf all have one size; leaves of a tree may have different ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from kvgraph.kv.pool.identity import digest_of

KEY_BYTES = 32


def page_key(digest: bytes, leaf: str, shards: str) -> bytes:
    """Key of the page that ends the token prefix `digest`: of leaf path `leaf`, 32 bytes.

    `shards` says which shards of how many the record holds, such as "0-2/2".
    """
    return digest_of(b"kvgraph-tier-1", digest, leaf.encode(), shards.encode())


@dataclass(slots=True)
class StoreStats:
    """Figures of a store, which hands out copies. Counters are this process's, since it was opened.

    - `num_pages`: pages of `page_bytes` that the size limit allows; `num_used_pages`: pages of
      this fingerprint that it holds now (of a shared store: as last seen); `nbytes`: what all
      records take, those of other fingerprints too
    - `read`, `written`: pages; `touched` ones not counted
    - `missed`: reads that found nothing; `damaged`: records found broken, and removed;
      `foreign`: records met (at open or at a read) that are of another model, layout, format or
      size: ignored
    - `dropped`: pages not written: full and not evictable, slow, dead, larger than the limit
    - `evicted`: pages removed to make room
    - `problem`: why the store misses or drops everything now, one sentence; empty if it does not
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
        """Of two stores: field by field, with both problems."""
        problem = "; ".join(filter(None, (self.problem, other.problem)))
        names = [field.name for field in fields(self) if field.name != "problem"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return StoreStats(**sums, problem=problem)


class PageStore(Protocol):
    """A bounded store of pages, synchronous.

    Built with what its place needs, and with `fingerprint` (32 bytes: of the model, the layout and
    the format of pages) and `page_bytes` (size of the largest record): the constructor raises
    StoreError for what a user has to change (a folder that cannot be written, a limit below one
    page, a malformed address, credentials that are refused). Damage, a full disk, a server that
    does not answer or answers oddly are no errors: the store starts dead, says why in
    `stats().problem`, and recovers. Nothing else ever raises: a store that fails is a store that
    misses and drops.

    One worker thread makes all calls but the constructor's, before it, and `close`, after it; these
    may come from other threads. `stats` any thread may call at any time; it does no I/O. No call
    may block for long without a bound that its constructor names (time-outs), and one that is
    known dead must answer at once (and try again now and then).
    """

    @property
    def name(self) -> str:
        """What metrics and messages call the tier: "disk", "remote", "prefix"."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether `read` would probably succeed: advisory, and cheap.

        Per key rather than the length of the leading run: a leaf with a window needs only its last
        pages, and the ones before them may be gone.
        """

    def read(self, key: bytes, out: memoryview) -> bool:
        """Fill `out` (writable, contiguous, one record) with the record of `key`.

        False: a miss, and what `out` holds is undefined. A record that is damaged or truncated
        (a checksum over key, fingerprint and bytes decides, *after* the bytes were copied to
        `out`) is removed and counted; one of another size or fingerprint is left and counted.
        A record once written under a key never changes: a key names its content.
        """

    def write(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Store the concatenation of `parts` (bytes, contiguous, valid during the call only).

        True if the record is held now, written by this call or found to be there already. False:
        dropped. Makes room by evicting the least recently used pages. A record becomes visible
        only as a whole, whatever kills the process.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """The pages were used: evict them later. Unknown keys are ignored. May be approximate."""

    def flush(self) -> None:
        """The worker has nothing more to do for now: end batches, publish what was written."""

    def clear(self) -> None:
        """Remove every page of this fingerprint; those of other models stay.

        Where that fails now, the store misses and drops until it has been done: no page from
        before is read after the call.
        """

    def stats(self) -> StoreStats:
        """Figures, without I/O; from any thread."""

    def close(self) -> None:
        """Release files, connections and memory; what was written stays. Idempotent.

        A `clear` that failed is tried once more; a warning says where it fails again.
        """


def held_by_each(stores: Iterable[PageStore], keys: Iterable[bytes]) -> Iterator[set[bytes]]:
    """For each store in turn, those of `keys` that it holds and none before it does."""
    missing = list(keys)
    for store in stores:
        if missing:
            answers = zip(missing, store.contains(missing), strict=True)
            held = {key for key, is_here in answers if is_here}
            missing = [key for key in missing if key not in held]
            yield held
