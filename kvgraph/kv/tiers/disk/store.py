"""Store of pages in a folder that processes share and that outlives them: slot files and an index.

    FOLDER/kvgraph-1.<generation>/index.sqlite    which slot holds which page   (`index.py`)
                                  <stride>.pages  slots of one size             (`slabs.py`)
                                  <token>.owner   locked by a live process      (`owners.py`)

A page is written to a slot that this process claimed, then published with its checksum. A kill
leaves only a claim, which the next process frees. A reader copies first and checks afterwards: a
slot that was reused, truncated or damaged is a miss. A damaged index is abandoned with its
generation. Nothing is synced to disk; pages lost in a power cut fail their checksum.

Reason against one embedded store for bytes and index: `benchmarks/stores.py` on ext4 (two cores,
busy with other work; MiB/s of pages of 64 KiB / 1 MiB / 16 MiB, medians of 5 rounds, all with the
same checksum except the raw file, which is read and written page by page):

                    write              read, cached          open    half of a file cut off
    raw file        2464  489 1654     9500 8517 3827
    this            646   655 1162     1423 7893 3835        35 ms   misses
    file per page   167   665 1361     1846 2879 1957        (none)  misses
    SQLite blobs    344   703 386      2539 3516 1376        22 ms   an error for everything
    LMDB            939   313 157      10201 8199 4715       1 ms    SIGBUS: the process is dead
    RocksDB         333   425 118      593  607  223         712 ms  an error for everything

`open`: 10,000 pages after SIGKILL. RocksDB serves one process only. LMDB is fastest for small
pages, but a damaged file kills the engine (10 of 10 truncations), and its file never shrinks. A
file per page costs a journal entry of the file system for each small page.

Speed relative to the raw file, in pairs, 9 rounds, 4 and 16 MiB: written 83 and 83 % on tmpfs, 79
and 68 % on ext4; read from the cache 73 and 78 %, 69 and 79 %; read from the disk 132 and 100 %.
1 MiB: written 88 % on tmpfs, read from the cache 69 and 49 %. 64 KiB is far below 70 %: there the
index takes 57 us of CPU a page, and a raw write 28.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.errors import StoreError
from kvgraph.kv.tiers.checksum import checksum
from kvgraph.kv.tiers.disk.damage import BusyError, is_full
from kvgraph.kv.tiers.disk.folder import DamagedError, make_top
from kvgraph.kv.tiers.disk.generation import Generation, open_newest, other_versions
from kvgraph.kv.tiers.disk.index import HeldPage, NewPage
from kvgraph.kv.tiers.disk.slabs import Slot, stride_of
from kvgraph.kv.tiers.store import StoreStats
from kvgraph.signal_handlers import reraise_if_signalled

BATCH_PAGES, BATCH_BYTES, BATCH_SHARE = 64, 16 << 20, 8
"""Bounds of slots claimed, and pages published, at once: a number, bytes, and 1/8 of the limit."""

PAUSE_SECONDS = 10.0
"""Time for which a store misses after a failure (disk full, I/O error, locked)."""

RECOUNT_SECONDS = 1.0
"""Greatest age, at a `flush`, of figures that depend on other processes."""

MISTAKES = (
    errno.EACCES,
    errno.EPERM,
    errno.EINVAL,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
"""Error numbers due to the folder's name or permissions; all others are due to the disk."""

LOST = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
"""Errors after which the files are opened again."""

log = logging.getLogger("kvgraph.tiers")


class DiskStore(NotCopyable):
    """A `PageStore` (see there) in `folder`, which need not exist and serves one user.

    `limit`: most bytes of the pages of all models and processes there; the index adds about 300 per
    page. A call waits for another process's transaction for at most `index.LOCK_SECONDS`; then the
    store pauses, or only its writes if the index can be read. StoreError for a limit below one
    page, and for a `folder` that the user must change: no folder, a link, another user's, or not
    writable. Failures of the disk, such as a full one, are in `stats().problem`, and the store
    tries again every `PAUSE_SECONDS`.
    """

    name = "disk"

    def __init__(self, folder: Path, limit: int, fingerprint: bytes, page_bytes: int) -> None:
        if limit < stride_of(page_bytes):
            raise StoreError(
                f"disk tier {folder}: expected a size limit of at least one page, "
                f"{stride_of(page_bytes)} bytes, got {limit}"
            )
        self._folder, self._limit, self._fingerprint = folder, limit, fingerprint
        self._usable_at = self._writable_at = self._counted_at = 0.0
        self._stats = StoreStats(num_pages=limit // stride_of(page_bytes))
        self._pending: dict[bytes, NewPage] = {}
        self._spare: dict[int, list[Slot]] = {}  # claimed
        self._used: dict[bytes, int] = {}  # to tell the index
        self._files: Generation | None = None
        self._damaged: os.stat_result | None = None
        self._was_open = self._is_closed = self._to_clear = self._is_busy = False
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            reraise_if_signalled(error)
            if isinstance(error, OSError) and error.errno in MISTAKES:
                raise StoreError(
                    f"disk tier {folder}: expected a folder that can be written, "
                    f"got {error.strerror!r}"
                ) from error
            self._pause(error, is_write=False)

    # -- the protocol

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._degrading() as files:
            if files is not None:
                pending = () if self._writable_at else self._pending  # a read must publish first
                return [key in pending or files.index.find(key) is not None for key in keys]
        return [False] * len(keys)

    def read(self, key: bytes, out: memoryview) -> bool:
        found = False
        with self._degrading() as files:
            if files is not None and self._read(files, key, out):
                found = True  # even if the index cannot record the use
                self._stats.read += 1
                self._use(files, [key])
        self._stats.missed += not found
        return found

    def write(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        size = sum(part.nbytes for part in parts)
        is_kept = False
        with self._degrading(is_write=True) as files:
            if files is not None and self._write(files, key, parts, size):
                is_kept = True  # even if publishing fails
                if len(self._pending) >= self._batch(stride_of(size)):
                    self._publish(files)
        self._stats.dropped += not is_kept
        return is_kept

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._degrading() as files:
            if files is not None:
                self._use(files, keys)

    def flush(self) -> None:
        with self._degrading() as files:
            if files is not None:
                if self._may_change:
                    self._publish(files)
                    self._tell_used(files)
                if time.monotonic() > self._counted_at + RECOUNT_SECONDS:
                    self._recount(files)
                self._measure(files)

    def clear(self) -> None:
        self._to_clear = True
        with self._ending_errors(is_write=False):
            self._ready(is_write=False)

    def stats(self) -> StoreStats:
        return replace(self._stats)

    def close(self) -> None:
        self._writable_at = 0.0  # the last try does not wait for the end of a pause
        if self._to_clear:
            self._usable_at = 0.0
        try:
            self.flush()
            with self._degrading() as files:
                if files is not None:
                    files.index.release([files.owner.token])
        except BaseException:
            self._let_go()
            raise
        if self._to_clear and not self._is_closed:
            log.warning(
                "disk tier %s: could not be emptied: its pages from before are still there, and "
                "the next engine finds them; run kvgraph cache clear %s",
                self._folder,
                self._folder,
            )
        self._let_go()
        self._is_closed = True

    # -- pages

    def _read(self, files: Generation, key: bytes, out: memoryview) -> bool:
        if key in self._pending and self._may_change:
            self._publish(files)
        held = files.index.find(key)
        if held is None:
            return False
        if held.size != out.nbytes:
            self._stats.foreign += 1
            return False
        if self._is_whole(files, held, key, out):
            return True
        try:
            if files.index.remove(key, held):  # not evicted meanwhile
                self._stats.damaged += 1
                self._stats.num_used_pages -= 1
        except BusyError:
            pass  # the next reader removes the page
        return False

    def _is_whole(self, files: Generation, held: HeldPage, key: bytes, out: memoryview) -> bool:
        arrived = files.slabs.read(held.at, out)
        return arrived and checksum(self._fingerprint, key, [out]) == held.sum

    def _write(self, files: Generation, key: bytes, parts: Sequence[memoryview], size: int) -> bool:
        if key in self._pending or files.index.find(key) is not None:
            self._use(files, [key])
            return True
        stride = stride_of(size)
        if not self._spare.get(stride) and not self._claim(files, stride):
            return False
        spare = self._spare[stride]
        digest = checksum(self._fingerprint, key, parts)
        files.slabs.write(spare[-1], parts)
        self._pending[key] = NewPage(spare.pop(), key, size, digest, time.time_ns())
        self._stats.written += 1
        return True

    def _claim(self, files: Generation, stride: int) -> bool:
        """Claim slots for a write; False if other processes claim all the room."""
        if stride > self._limit:
            return False
        self._publish(files)
        self._tell_used(files)
        if not self._claim_batch(files, stride):
            for spare in self._spare.values():
                spare.clear()
            files.index.release([files.owner.token])
            files.remove_dead_owners()
            return self._claim_batch(files, stride)
        return True

    def _claim_batch(self, files: Generation, stride: int) -> bool:
        slots, evicted = files.index.claim(
            stride, self._batch(stride), self._limit, files.owner.token
        )
        slots.reverse()  # taken from the end: written in ascending order
        self._spare.setdefault(stride, []).extend(slots)
        self._stats.evicted += len(evicted)
        self._stats.num_used_pages -= evicted.count(self._fingerprint)
        return bool(slots)

    def _batch(self, stride: int) -> int:
        share = self._limit // stride // BATCH_SHARE
        return max(1, min(BATCH_PAGES, BATCH_BYTES // stride, share))

    def _publish(self, files: Generation) -> None:
        """Publish the pending pages; if the index fails, none is published and all stay pending."""
        if self._pending:
            published, spare = files.index.publish(self._pending.values(), files.owner.token)
            written_by_others = len(spare)
            self._stats.dropped += len(self._pending) - published - written_by_others
            self._pending.clear()
            self._stats.num_used_pages += published
            for slot in spare:
                self._spare.setdefault(slot.stride, []).append(slot)

    def _use(self, files: Generation, keys: Sequence[bytes]) -> None:
        now = time.time_ns()
        for i, key in enumerate(keys):
            self._used.pop(key, None)  # it is the last now
            self._used[key] = now + i
        if len(self._used) >= BATCH_PAGES and self._may_change:
            self._tell_used(files)

    def _tell_used(self, files: Generation) -> None:
        used, self._used = self._used, {}
        if used:
            files.index.touch(used)

    # -- the folder

    def _open(self) -> None:
        self._begin()
        if not self._was_open:  # a folder that vanished later is not made again
            make_top(self._folder)
        self._files = open_newest(
            self._folder, self._fingerprint, self._take_up, damaged=self._damaged
        )
        self._was_open, self._damaged = True, None

    def _take_up(self, files: Generation) -> None:
        self._stats.evicted += files.index.shrink(self._limit)
        self._stats.foreign += self._recount(files) + len(other_versions(self._folder))

    def _begin(self) -> None:
        """Forget claimed slots, unpublished pages and unreported uses."""
        self._pending.clear()
        self._spare.clear()
        self._used.clear()

    def _recount(self, files: Generation) -> int:
        """Refresh the figures; return the number of pages of other models."""
        self._stats.num_used_pages, others = files.index.counts()
        self._counted_at = time.monotonic()
        self._measure(files)
        return others

    def _measure(self, files: Generation) -> None:
        spare = sum(stride * len(slots) for stride, slots in self._spare.items())
        self._stats.nbytes = files.index.taken - spare

    @property
    def _may_change(self) -> bool:
        """Whether the index may be changed: no pause because others change it."""
        return not self._is_busy or time.monotonic() >= self._writable_at

    @contextmanager
    def _degrading(self, is_write: bool = False) -> Iterator[Generation | None]:
        """Yield the files, or None while the store is closed or pauses; failures end here."""
        files = None
        with self._ending_errors(is_write):
            files = self._ready(is_write)
        with self._ending_errors(is_write):
            yield files
            if files is not None and (is_write or not self._writable_at):
                self._stats.problem, self._writable_at = "", 0.0

    @contextmanager
    def _ending_errors(self, is_write: bool) -> Iterator[None]:
        try:
            yield
        except DamagedError as error:  # or another process abandoned the generation
            log.warning("disk tier %s: %s", self._folder, error)
            self._stats.damaged += 1
            self._damaged = self._files.status() if self._files else None
            self._let_go()
        except (OSError, sqlite3.Error, StoreError) as error:
            reraise_if_signalled(error)
            before = self._stats.problem
            self._pause(error, is_write)
            if self._stats.problem != before:
                log.warning("%s; pauses for %.0f s", self._stats.problem, PAUSE_SECONDS)

    def _ready(self, is_write: bool) -> Generation | None:
        ready_at = max(self._usable_at, self._writable_at) if is_write else self._usable_at
        if self._is_closed or time.monotonic() < ready_at:
            return None
        if self._files is None:
            self._open()
        if self._to_clear and self._files is not None:
            self._remove_all(self._files)
        return self._files

    def _remove_all(self, files: Generation) -> None:
        self._begin()
        files.index.release([files.owner.token])
        files.index.clear()
        self._recount(files)
        self._to_clear = False

    def _let_go(self) -> None:
        self._stats.dropped += len(self._pending)
        self._begin()
        files, self._files = self._files, None
        if files is not None:
            files.close()

    def _pause(self, error: Exception, is_write: bool) -> None:
        """Miss, or only drop, for PAUSE_SECONDS; lost files are opened again after that."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CANTOPEN)
        is_moved = code == sqlite3.SQLITE_READONLY_DBMOVED
        why = repr(getattr(error, "strerror", None) or str(error))
        self._stats.problem = (
            f"disk tier {self._folder}: expected files to read and write, got "
            f"{'an index that was removed or replaced' if is_moved else why}"
        )
        self._is_busy = isinstance(error, BusyError)
        is_change = self._is_busy or is_full(error)
        can_read = is_write or (is_change and self._files is not None and not self._to_clear)
        if can_read and not is_moved:
            self._writable_at = time.monotonic() + PAUSE_SECONDS
            return
        self._usable_at = time.monotonic() + PAUSE_SECONDS
        if code & 0xFF in LOST or is_moved:
            self._let_go()
