"""SQLite's errors and rows as signs of a damaged index, a full disk, or a temporary failure."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from typing import Any

from kvgraph.kv.tiers.disk.folder import DamagedError
from kvgraph.kv.tiers.disk.slabs import Slot

MOST = 200
"""Most characters of what a message says of a schema."""

PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_CANTOPEN,
}
"""Errors that are no sign of damage to the file."""


class BusyError(sqlite3.OperationalError):
    """Other processes changed or read the index for too long: it was not changed."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY


def is_full(error: BaseException) -> bool:
    """Whether the disk had no room for a write of the index."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


@contextmanager
def raising_busy() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            raise BusyError(str(error)) from error
        raise


@contextmanager
def raising_damage() -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF in PASSING or code == sqlite3.SQLITE_READONLY_DBMOVED:
            raise
        raise DamagedError(str(error)) from error
    except (UnicodeError, OverflowError) as error:  # text or a number that kvgraph never writes
        raise DamagedError(str(error)) from error
    except MemoryError as error:
        raise sqlite3.OperationalError("not enough memory") from error


def has_schema(db: sqlite3.Connection, own: str) -> bool:
    """Whether `db` has a schema; DamagedError if it has a table, index, view or trigger that the
    statements `own` do not make: SQLite would run its SQL."""
    found = _schema(db)
    for kind, name, table, said in found - _schema_of(own):
        raise DamagedError(f"{kind} {name!r} of {table!r}: {said!r}"[:MOST])
    return bool(found)


def _schema(db: sqlite3.Connection) -> frozenset[tuple[object, ...]]:
    rows = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return frozenset(rows.fetchall())


@cache
def _schema_of(own: str) -> frozenset[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(own)
        return _schema(db)


def typed_rows(kinds: Sequence[type], rows: Iterable[Sequence[object]]) -> list[Any]:
    """`rows` as tuples; DamagedError for a value of another type than `kinds`."""
    found = [tuple(row) for row in rows]
    for row in found:
        if [type(value) for value in row] != list(kinds):
            raise DamagedError(f"a row of {row!r}")
    return found


def slot_at(stride: object, slot: object) -> Slot:
    if not (type(stride) is int and type(slot) is int):
        raise DamagedError(f"slot {stride!r}, {slot!r}")
    if not (stride > 0 and slot >= 0 and stride * (slot + 1) < 1 << 62):
        raise DamagedError(f"slot {stride}, {slot}")
    return Slot(stride, slot)


def out_of_range(stride: object, slot: object, size: object, used: object) -> DamagedError:
    return DamagedError(f"slot {stride!r}, {slot!r}: a page of {size!r} bytes, used at {used!r}")
