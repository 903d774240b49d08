"""Index of the slots and their pages: a SQLite database that processes share.

    free     no key, no owner     takes no room; its blocks were given back
    claimed  owner                a live process writes to it, or its process died
    held     model, key           a page, if the bytes still have its checksum

All changes are transactions: even if the process is killed, a slot is in one of these states. Only
on a full disk can a kill during a change damage the index. A page is used only if its bytes have
the checksum in the index, so a stale or damaged index only loses hits.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvgraph.kv.tiers.disk.damage import (
    has_schema,
    is_full,
    out_of_range,
    raising_busy,
    raising_damage,
    slot_at,
    typed_rows,
)
from kvgraph.kv.tiers.disk.folder import DamagedError, PrivateFolder
from kvgraph.kv.tiers.disk.slabs import BLOCK, Slot

INDEX = "index.sqlite"

LOCK_SECONDS = 1.0
"""Longest wait for another process's transaction; then the call misses or drops."""

# No shared memory, as WAL uses: if another process truncates a file, that must be an error and not
# a SIGBUS. Nothing is synced to disk: the kernel keeps the writes of a killed process, and
# checksums detect losses of a power cut.
PRAGMAS = "PRAGMA journal_mode=TRUNCATE; PRAGMA synchronous=OFF; PRAGMA trusted_schema=OFF;"
SCHEMA = """
CREATE TABLE IF NOT EXISTS slots (
  stride INTEGER, slot INTEGER, model BLOB, key BLOB, size INTEGER, sum BLOB, used INTEGER,
  owner TEXT, PRIMARY KEY (stride, slot)
) WITHOUT ROWID, STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS pages ON slots (model, key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS ages ON slots (used) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS free ON slots (stride) WHERE key IS NULL AND owner IS NULL;
CREATE INDEX IF NOT EXISTS claims ON slots (owner) WHERE owner IS NOT NULL;
CREATE TABLE IF NOT EXISTS taken (nbytes INTEGER) STRICT;
"""
OUT_OF_RANGE = f"""
  stride < 1 OR slot < 0 OR slot >= (1 << 62) / stride - 1 OR key IS NOT NULL AND (
    model IS NULL OR sum IS NULL OR used IS NULL OR used NOT BETWEEN 0 AND 1 << 62
    OR stride IS NOT max(1, (size + {BLOCK - 1}) / {BLOCK}) * {BLOCK})
"""


class HeldPage(NamedTuple):
    """Slot, size in bytes and checksum of a page."""

    at: Slot
    size: int
    sum: bytes


class NewPage(NamedTuple):
    """A page that was written but is not published yet."""

    at: Slot
    key: bytes
    size: int
    sum: bytes
    used: int


class Index:
    """The index in `folder`. Calls raise DamagedError, or sqlite3.Error for temporary failures:
    BusyError from changes.

    `model`: fingerprint of the pages of all calls. Times are in ns. `give_back` frees the blocks of
    a slot that becomes free, before another process can claim it. `is_trusted`, called while no
    other process can change the index: whether it need not be checked.
    """

    def __init__(
        self,
        folder: PrivateFolder,
        model: bytes,
        give_back: Callable[[Slot], None],
        is_trusted: Callable[[], bool],
    ) -> None:
        self._model = model
        self._give_back = give_back
        self._is_trusted = is_trusted
        self.taken = 0
        """Bytes of all slots that are not free, as last seen."""
        self._has_no_room = False
        self._gave_back = False  # whether this transaction freed blocks
        require_index(folder)
        with raising_damage():
            self._db = sqlite3.connect(
                folder.path / INDEX,
                timeout=LOCK_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._open()
                folder.take_over(INDEX)
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> None:
        self._db.executescript(PRAGMAS)
        try:
            self._prepare()
        except sqlite3.OperationalError as error:
            if not is_full(error):
                raise
            self._prepare()  # now without a journal on disk: the existing index can be read

    def _prepare(self) -> None:
        with self._transaction():
            has_schema(self._db, SCHEMA)
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            is_counted = self._db.execute("SELECT * FROM taken").fetchone() is not None
            if not (is_counted and self._is_trusted()):
                self._check()

    def _check(self) -> None:
        problems = self._db.execute("PRAGMA integrity_check(1)").fetchall()
        if problems != [("ok",)]:
            raise DamagedError(str(problems))
        row = self._db.execute(
            f"SELECT stride, slot, size, used FROM slots WHERE {OUT_OF_RANGE} LIMIT 1"
        ).fetchone()
        if row is not None:
            raise out_of_range(*row)
        self._db.execute("DELETE FROM taken")
        self._db.execute(
            "INSERT INTO taken SELECT ifnull(sum(stride), 0) FROM slots "
            "WHERE key IS NOT NULL OR owner IS NOT NULL"
        )

    # -- questions

    def find(self, key: bytes) -> HeldPage | None:
        with raising_damage():
            row = self._db.execute(
                "SELECT stride, slot, size, sum FROM slots WHERE model = ? AND key = ?",
                (self._model, key),
            ).fetchone()
        if row is None:
            return None
        at, (size, sum_) = slot_at(*row[:2]), row[2:]
        if not (type(size) is int and 0 <= size <= at.stride and type(sum_) is bytes):
            raise DamagedError(f"page of {size!r} bytes in a slot of {at.stride}, sum {sum_!r}")
        return HeldPage(at, size, sum_)

    def counts(self) -> tuple[int, int]:
        """Number of pages of this model, and of other models."""
        with raising_damage():
            own, all_ = self._db.execute(
                "SELECT count(CASE WHEN model = ? THEN 1 END), count(*) FROM slots "
                "WHERE key IS NOT NULL",
                (self._model,),
            ).fetchone()
            self.taken = self._taken()
        return own, all_ - own

    def all_keys(self) -> list[bytes]:
        with raising_damage():
            rows = self._db.execute(
                "SELECT key FROM slots WHERE model = ? AND key IS NOT NULL", (self._model,)
            ).fetchall()
        return [key for (key,) in typed_rows((bytes,), rows)]

    def owners(self) -> list[str]:
        """Tokens of the processes that claim slots, dead or alive."""
        with raising_damage():
            rows = self._db.execute(
                "SELECT DISTINCT owner FROM slots WHERE owner IS NOT NULL"
            ).fetchall()
        return [owner for (owner,) in typed_rows((str,), rows)]

    # -- changes

    def publish(self, pages: Iterable[NewPage], owner: str) -> tuple[int, list[Slot]]:
        """Publish pages in slots that `owner` claims.

        Returns how many were published, and the slots that are still claimed, since another process
        published the same pages.
        """
        published = 0
        spare = []
        with self._transaction():
            last = self._in_future()
            for page in pages:
                last = max(page.used, last + 1)
                done = self._db.execute(
                    "UPDATE OR IGNORE slots SET model = ?, key = ?, size = ?, sum = ?, used = ?, "
                    "owner = NULL WHERE stride = ? AND slot = ? AND owner = ?",
                    (self._model, page.key, page.size, page.sum, last, *page.at, owner),
                )
                published += done.rowcount
                if not done.rowcount and self._is_claimed(page.at, owner):
                    spare.append(page.at)
        return published, spare

    def claim(
        self, stride: int, count: int, limit: int, owner: str
    ) -> tuple[list[Slot], Sequence[bytes]]:
        """Claim up to `count` slots for `owner`; all slots together take at most `limit` bytes.

        Returns the slots, fewer than `count` if other processes claim the rest, and the models of
        the pages that were evicted for them.
        """
        claimed: list[Slot] = []
        evicted: list[bytes] = []
        warm: list[Slot] = []  # evicted slots that still have their blocks: claimed first
        with self._transaction():
            taken = self._taken()
            while len(claimed) < count:
                if taken + stride <= limit:
                    claimed.append(self._claim(stride, owner, warm))
                    taken += stride
                    continue
                victim = self._evict(warm, stride)
                if victim is None:
                    break
                taken -= victim[0].stride
                evicted.append(victim[1])
            for slot in warm:
                self._hand_back(slot)
            self._take(taken)
        return claimed, evicted

    def shrink(self, limit: int) -> int:
        """Evict pages until at most `limit` bytes are taken; return the number of evicted pages."""
        evicted = 0
        with self._transaction():
            taken = self._taken()
            while taken > limit and (victim := self._evict([])) is not None:
                taken -= victim[0].stride
                evicted += 1
            self._take(taken)
        return evicted

    def touch(self, used: Mapping[bytes, int]) -> None:
        """Record when this process last used pages; `used` is in the order of use."""
        rows = []
        with self._transaction():
            last = self._in_future()
            for key, at in used.items():
                last = max(at, last + 1)
                rows.append((last, self._model, key))
            self._db.executemany(
                "UPDATE slots SET used = max(used, ?) WHERE model = ? AND key = ?", rows
            )

    def remove(self, key: bytes, held: HeldPage) -> int:
        """Free a damaged page's slot; 0 if the page is not there any more."""
        where = "stride = ? AND slot = ? AND sum = ? AND model = ? AND key = ?"
        return self._free(where, (*held.at, held.sum, self._model, key))

    def release(self, owners: Iterable[str]) -> None:
        """Free the slots that these owners claim."""
        for owner in owners:
            self._free("owner = ?", (owner,))

    def clear(self) -> int:
        """Free the model's pages; return their number."""
        return self._free("model = ? AND key IS NOT NULL", (self._model,))

    def close(self) -> None:
        self._db.close()

    # -- within a transaction

    def _taken(self) -> int:
        row = self._db.execute("SELECT nbytes FROM taken").fetchone()
        if row is None or type(row[0]) is not int:
            raise DamagedError(f"{row!r} bytes taken")
        return row[0]

    def _in_future(self) -> int:
        """Latest use if it is in the future, because the clock was set back: new uses come after
        it. Otherwise -1."""
        row = self._db.execute(
            "SELECT used FROM slots INDEXED BY ages WHERE key IS NOT NULL AND used > ? "
            "ORDER BY used DESC LIMIT 1",
            (time.time_ns(),),
        ).fetchone()
        return -1 if row is None else int(row[0])

    def _claim(self, stride: int, owner: str, warm: list[Slot]) -> Slot:
        """Claim a slot of `warm`, or a free slot, or a new slot."""
        at = warm.pop() if warm else self._free_slot(stride)
        self._db.execute(
            "INSERT INTO slots (stride, slot, owner) VALUES (?, ?, ?) "
            "ON CONFLICT DO UPDATE SET owner = excluded.owner",
            (*at, owner),
        )
        return at

    def _free_slot(self, stride: int) -> Slot:
        row = self._db.execute(
            "SELECT slot FROM slots INDEXED BY free WHERE stride = ? AND key IS NULL "
            "AND owner IS NULL LIMIT 1",
            (stride,),
        ).fetchone()
        if row is None:
            last = self._db.execute(
                "SELECT slot FROM slots WHERE stride = ? ORDER BY slot DESC LIMIT 1", (stride,)
            ).fetchone()
            row = (0,) if last is None else (slot_at(stride, last[0]).slot + 1,)
        return slot_at(stride, row[0])

    def _is_claimed(self, at: Slot, owner: str) -> bool:
        row = self._db.execute("SELECT owner FROM slots WHERE stride = ? AND slot = ?", at)
        return bool(row.fetchone() == (owner,))

    def _take(self, nbytes: int) -> None:
        self.taken = nbytes
        self._db.execute("UPDATE taken SET nbytes = ?", (nbytes,))

    def _evict(self, warm: list[Slot], stride: int = 0) -> tuple[Slot, bytes] | None:
        """Free the least recently used page, of any size and model; return its slot and model.

        Its blocks are given back, unless the slot has `stride`: then it is added to `warm`.
        """
        row = self._db.execute(
            "SELECT stride, slot, model FROM slots INDEXED BY ages WHERE key IS NOT NULL "
            "ORDER BY used LIMIT 1"
        ).fetchone()
        if row is None:
            return None
        at = slot_at(*row[:2])
        if at.stride == stride:
            warm.append(at)
        else:
            self._hand_back(at)
        self._db.execute(
            "UPDATE slots SET model = NULL, key = NULL WHERE stride = ? AND slot = ?", at
        )
        return at, row[2]

    def _free(self, where: str, values: Sequence[object]) -> int:
        with self._transaction():
            rows = self._db.execute(f"SELECT stride, slot FROM slots WHERE {where}", values)
            slots = [slot_at(*row) for row in rows.fetchall()]
            for slot in slots:
                self._hand_back(slot)
            self._db.execute(
                f"UPDATE slots SET model = NULL, key = NULL, owner = NULL WHERE {where}", values
            )
            self._take(self._taken() - sum(slot.stride for slot in slots))
        return len(slots)

    def _hand_back(self, at: Slot) -> None:
        self._gave_back = True
        self._give_back(at)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with raising_damage(), raising_busy():
            self._db.execute("BEGIN IMMEDIATE")
            self._gave_back = False
            try:
                yield
                self._db.execute("COMMIT")
                if self._has_no_room and self._gave_back:
                    self._db.execute("PRAGMA journal_mode=TRUNCATE")
                    self._has_no_room = False
            except BaseException as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if is_full(error):
                    # Freeing blocks must not need room: until blocks are freed, the journal is in
                    # memory. A kill during a change then damages the index, which is abandoned.
                    self._db.execute("PRAGMA journal_mode=MEMORY")
                    self._has_no_room = True
                raise


def require_index(folder: PrivateFolder) -> None:
    """Raise DamagedError if one of the index's files is no file."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        folder.require_file(INDEX + suffix)
