"""Which store should keep pages on disk: figures of each, in one run.

    python -m benchmarks.stores [FOLDER]        (make bench-stores; FOLDER on the disk to measure)

Baseline and physical limit: one file, written and read page by page, without a checksum. Each
round takes the candidates in another order, and each starts with nothing left to write back: a
disk that others use, or that is throttled, would else favour what runs after an idle one.
Medians. Reference check: every page that is read is compared by its checksum, as a
tier must. Write: until the kernel has it. Synced: until the disk has it. Cold: read from the disk.
Warm: from the kernel's cache. Then what happens to a store of 10,000 pages of 4 KiB: the time to
open it after its process was killed, whether two processes can share it, and what a process sees
that reads it after half of its largest file is cut off.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import xxhash

from kvgraph.kv.tiers.disk.store import DiskStore

SIZES = (64 << 10, 1 << 20, 16 << 20)
TOTAL, ROUNDS = 64 << 20, 5
LIMIT = 4 << 30
NUM_SMALL, SMALL = 10_000, 4096
MODEL = sha256(b"model").digest()


class RawFile:
    name = "raw file"

    def __init__(self, folder: Path, size: int) -> None:
        self.file = os.open(folder / "raw", os.O_CREAT | os.O_RDWR)
        self.size = size

    def write(self, i: int, key: bytes, page: memoryview) -> None:
        os.pwrite(self.file, page, i * self.size)

    def read(self, i: int, key: bytes, out: memoryview) -> bool:
        return os.preadv(self.file, [out], i * self.size) == self.size

    def close(self) -> None:
        os.close(self.file)


class Tier:
    name = "disk tier"

    def __init__(self, folder: Path, size: int) -> None:
        self.store = DiskStore(folder, LIMIT, MODEL, size)

    def write(self, i: int, key: bytes, page: memoryview) -> None:
        assert self.store.write(key, [page])

    def read(self, i: int, key: bytes, out: memoryview) -> bool:
        return self.store.read(key, out)

    def close(self) -> None:
        self.store.close()


class FilePerPage:
    name = "file per page"

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder

    def write(self, i: int, key: bytes, page: memoryview) -> None:
        part = self.folder / "part"
        file = os.open(part, os.O_CREAT | os.O_WRONLY)
        os.writev(file, [page, digest(page)])
        os.close(file)
        os.rename(part, self.folder / key.hex())

    def read(self, i: int, key: bytes, out: memoryview) -> bool:
        sum_ = bytearray(16)
        file = os.open(self.folder / key.hex(), os.O_RDONLY)
        os.preadv(file, [out, sum_], 0)
        os.close(file)
        return digest(out) == sum_

    def close(self) -> None:
        pass


class SqliteBlobs:
    name = "SQLite blobs"

    def __init__(self, folder: Path, size: int) -> None:
        self.db = sqlite3.connect(folder / "pages.sqlite", isolation_level=None)
        for pragma in ("page_size=65536", "journal_mode=WAL", "synchronous=OFF"):
            self.db.execute(f"PRAGMA {pragma}")
        self.db.execute("CREATE TABLE IF NOT EXISTS p (key BLOB PRIMARY KEY, sum BLOB, page BLOB)")

    def write(self, i: int, key: bytes, page: memoryview) -> None:
        self.db.execute("INSERT INTO p VALUES (?, ?, ?)", (key, digest(page), page))

    def read(self, i: int, key: bytes, out: memoryview) -> bool:
        row = self.db.execute("SELECT sum, page FROM p WHERE key = ?", (key,)).fetchone()
        if row is None:
            return False
        out[:] = row[1]
        return digest(out) == row[0]

    def close(self) -> None:
        self.db.close()


class Lmdb:
    name = "LMDB"

    def __init__(self, folder: Path, size: int) -> None:
        import lmdb

        self.db: Any = lmdb.open(str(folder), map_size=LIMIT, sync=False)

    def write(self, i: int, key: bytes, page: memoryview) -> None:
        with self.db.begin(write=True) as transaction:
            transaction.put(key, b"".join((digest(page), page)))

    def read(self, i: int, key: bytes, out: memoryview) -> bool:
        with self.db.begin(buffers=True) as transaction:
            record = transaction.get(key)
            if record is None:
                return False
            out[:] = record[16:]
            return digest(out) == bytes(record[:16])

    def close(self) -> None:
        self.db.close()


class RocksDB:
    name = "RocksDB"

    def __init__(self, folder: Path, size: int) -> None:
        from rocksdict import Options, Rdict

        options = Options(raw_mode=True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        self.db: Any = Rdict(str(folder / "db"), options)

    def write(self, i: int, key: bytes, page: memoryview) -> None:
        self.db[key] = b"".join((digest(page), page))

    def read(self, i: int, key: bytes, out: memoryview) -> bool:
        record = self.db.get(key)
        if record is None:
            return False
        out[:] = memoryview(record)[16:]
        return digest(out) == record[:16]

    def close(self) -> None:
        self.db.close()


STORES: tuple[Any, ...] = (RawFile, Tier, FilePerPage, SqliteBlobs, Lmdb, RocksDB)


def digest(page: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(page)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def keys_of(count: int) -> list[bytes]:
    return [sha256(str(i).encode()).digest() for i in range(count)]


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def for_files(folder: Path, call: Callable[[int], object]) -> None:
    for path in files_of(folder):
        file = os.open(path, os.O_RDWR)
        call(file)
        os.close(file)


def forget(file: int) -> None:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def measure(store_class: Any, folder: Path, size: int) -> tuple[float, ...]:
    """MiB/s: write, synced, cold, warm."""
    folder.mkdir()
    keys = keys_of(TOTAL // size)
    page = memoryview(bytearray(os.urandom(size)))
    out = memoryview(bytearray(size))
    store = store_class(folder, size)

    def write() -> None:
        for i, key in enumerate(keys):
            page[:8] = i.to_bytes(8, "little")
            store.write(i, key, page)

    def read() -> None:
        for i, key in enumerate(keys):
            if not store.read(i, key, out) or out[:8] != i.to_bytes(8, "little"):
                raise RuntimeError(f"{store_class.name}: page {i} is wrong")

    to_kernel = timed(write)
    if isinstance(store, Tier):
        to_kernel += timed(store.store.flush)
    to_disk = timed(lambda: for_files(folder, os.fsync))
    store.close()
    for_files(folder, os.fsync)
    for_files(folder, forget)
    store = store_class(folder, size)
    cold, warm = timed(read), timed(read)
    store.close()
    shutil.rmtree(folder)
    return tuple(TOTAL / 2**20 / t for t in (to_kernel, to_kernel + to_disk, cold, warm))


def bandwidth(top: Path, stores: list[Any]) -> None:
    print(f"{'MiB/s (share of raw)':34}{'write':>14}{'synced':>14}{'cold':>14}{'warm':>14}")
    for size in SIZES:
        found: dict[str, list[tuple[float, ...]]] = {store.name: [] for store in stores}
        for round_ in range(ROUNDS):
            for store in random.Random(round_).sample(stores, len(stores)):
                os.sync()
                folder = top / f"{store.__name__}-{size}-{round_}"
                found[store.name].append(measure(store, folder, size))
        medians = {
            n: [statistics.median(c) for c in zip(*f, strict=True)] for n, f in found.items()
        }
        for name, figures in medians.items():
            shares = [f / raw for f, raw in zip(figures, medians[RawFile.name], strict=True)]
            cells = [f"{f:7.0f} ({s:4.0%})" for f, s in zip(figures, shares, strict=True)]
            print(f"{size >> 10:6} KiB  {name:22}" + "".join(f"{c:>14}" for c in cells), flush=True)


def in_child(store_class: Any, folder: Path, what: str) -> str:
    """What a process of its own says, or how it ends."""
    bench = [sys.executable, "-m", "benchmarks.stores"]
    command = [*bench, "--child", store_class.__name__, str(folder), what]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"killed by {name}" if name != "SIGKILL" else "killed"
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1][:40]


def child(store_class: Any, folder: Path, what: str) -> None:
    keys, page, out = keys_of(NUM_SMALL), memoryview(bytearray(SMALL)), bytearray(SMALL)
    if what == "fill":
        store = store_class(folder, SMALL)
        for i, key in enumerate(keys):
            store.write(i, key, page)
        os.kill(os.getpid(), signal.SIGKILL)
    seconds = time.perf_counter()
    store = store_class(folder, SMALL)
    seconds = time.perf_counter() - seconds
    if what == "count":
        kept = sum(store.read(i, key, memoryview(out)) for i, key in enumerate(keys))
        print(f"{kept} pages")
    elif what == "open":
        print(f"{seconds * 1e3:.0f} ms")
    else:
        store.write(0, keys[-1][::-1], page)
        print("yes")
    store.close()


def robustness(top: Path, stores: list[Any]) -> None:
    columns = ("open 10,000", "after SIGKILL", "shared by two", "half cut off")
    print(f"\n{'':16}" + "".join(f"{c:>18}" for c in columns))
    for store_class in stores:
        folder = top / store_class.__name__
        folder.mkdir()
        in_child(store_class, folder, "fill")
        cells = [in_child(store_class, folder, what) for what in ("open", "count")]
        store = store_class(folder, SMALL)
        shared = in_child(store_class, folder, "share")
        cells.append(shared if shared == "yes" else "no")
        store.close()
        largest = max(files_of(folder), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
        cells.append(in_child(store_class, folder, "count"))
        print(f"{store_class.name:16}" + "".join(f"{c[:24]:>18}" for c in cells), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(globals()[sys.argv[2]], Path(sys.argv[3]), sys.argv[4])
        return
    stores = [store for store in STORES if is_installed(store)]
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        bandwidth(Path(folder), stores)
        robustness(Path(folder), stores[1:])


def is_installed(store_class: Any) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            store_class(Path(folder), SMALL).close()
        except ImportError as error:
            print(f"{store_class.name}: left out: {error}; pip install 'kvgraph[bench]'")
            return False
    return True


if __name__ == "__main__":
    main()
