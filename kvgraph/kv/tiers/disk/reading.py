"""Reads which pages a folder holds, while engines use it: no lock lasts longer than a batch."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from kvgraph.kv.tiers.disk import index
from kvgraph.kv.tiers.disk.damage import (
    has_schema,
    out_of_range,
    raising_damage,
    slot_at,
    typed_rows,
)
from kvgraph.kv.tiers.disk.folder import DamagedError, PrivateFolder
from kvgraph.kv.tiers.disk.index import INDEX, OUT_OF_RANGE, SCHEMA, require_index

BATCH_ROWS = 4096
"""Rows that are read in one transaction, about 10 ms: another process's change waits for it."""

BATCH = f"""
SELECT stride, slot, size, used, model, key IS NOT NULL, ({OUT_OF_RANGE}) IS TRUE FROM slots
WHERE (stride, slot) > (?, ?) ORDER BY stride, slot LIMIT ?
"""


class ModelPages(NamedTuple):
    """Pages of one model and layout in the folder; `last_used` in ns since 1970."""

    fingerprint: bytes
    pages: int
    nbytes: int
    last_used: int


def pages_by_model(path: Path) -> list[ModelPages]:
    """Pages of each model in the generation at `path`, the last used model first.

    A page that moves meanwhile counts once, twice or not. Raises DamagedError, OSError, StoreError
    or sqlite3.Error.
    """
    found: dict[bytes, ModelPages] = {}
    folder = PrivateFolder(path.parent, path.name, is_read=True)
    try:
        with raising_damage(), closing(_opened(folder)) as db:
            for _, _, size, used, model in _pages(db):
                _, pages, nbytes, last = found.get(model, ModelPages(model, 0, 0, 0))
                found[model] = ModelPages(model, pages + 1, nbytes + size, max(used, last))
    finally:
        folder.close()
    return sorted(found.values(), key=lambda each: each.last_used, reverse=True)


def _opened(folder: PrivateFolder) -> sqlite3.Connection:
    """A connection that changes nothing; SQLite itself undoes what a killed process left half."""
    require_index(folder)
    return sqlite3.connect(
        f"{(folder.path / INDEX).absolute().as_uri()}?mode=rw",
        timeout=index.LOCK_SECONDS,
        isolation_level=None,
        uri=True,
    )


def _pages(db: sqlite3.Connection) -> Iterator[tuple[int, int, int, int, bytes]]:
    """Stride, slot, size, time of last use and model of each page."""
    db.executescript("PRAGMA query_only=ON; PRAGMA trusted_schema=OFF;")
    if not has_schema(db, SCHEMA):
        return  # a process that makes the index ended, or has not come further yet
    last = (-1 << 63, -1 << 63)
    while rows := db.execute(BATCH, (*last, BATCH_ROWS)).fetchall():
        for row in rows:
            if row[-1]:
                raise out_of_range(*row[:4])
        yield from typed_rows((int, int, int, int, bytes), [row[:5] for row in rows if row[5]])
        at = slot_at(*rows[-1][:2])
        if at <= last:
            raise DamagedError(f"slots out of order: {at} after {last}")
        last = at
