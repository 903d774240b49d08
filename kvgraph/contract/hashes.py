"""Sizes and hashes of an artifact's files: computed at compile, checked before use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.files import inside, kind_of
from kvgraph.contract.manifest_values import require_digest
from kvgraph.contract.plain import in_short
from kvgraph.contract.threads import mapped
from kvgraph.errors import ArtifactError
from kvgraph.progress import Advance, task
from kvgraph.signal_handlers import reraise_if_signalled

CHUNK_BYTES = 16 << 20
PIECE_BYTES = 256 << 10
"""Bytes of one read. Whole chunks, one for each thread, would stay in the process's memory."""

THREADS = "kvgraph-hashes"
"""Name of the threads that hash."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Bytes of a file, and SHA-256 of each chunk of `CHUNK_BYTES`; the last one may be short."""

    size: int
    chunks: list[str]


def require_entries(files: Mapping[str, FileEntry]) -> None:
    """Raise ValueError for a size with another number of chunks, and for a hash that is none."""
    for name, entry in files.items():
        count = ceildiv(entry.size, CHUNK_BYTES)
        if entry.size < 0 or len(entry.chunks) != count:
            raise ValueError(
                f"files.{name}: expected {count} chunks for {entry.size} bytes, "
                f"got {len(entry.chunks)}"
            )
        for index, chunk in enumerate(entry.chunks):
            require_digest(f"files.{name}.chunks[{index}]", chunk)


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Entries of the files `names`, sorted by name; chunks are hashed in parallel."""
    sizes = {name: (folder / name).stat().st_size for name in sorted(names)}
    jobs = [
        (folder / name, index)
        for name, size in sizes.items()
        for index in range(ceildiv(size, CHUNK_BYTES))
    ]
    with (
        task("hashing", sum(sizes.values()), "bytes") as advance,
        mapped(_hash_chunk, jobs, THREADS) as hashed,
    ):
        return {name: _entry(size, hashed, advance) for name, size in sizes.items()}


def _entry(size: int, hashed: Iterator[tuple[str, int]], advance: Advance) -> FileEntry:
    """The entry of a file of `size` bytes, whose chunks are next in `hashed`."""
    chunks = []
    for found, nbytes in islice(hashed, ceildiv(size, CHUNK_BYTES)):
        chunks.append(found)
        advance(nbytes)
    return FileEntry(size, chunks)


def _hash_chunk(job: tuple[Path, int]) -> tuple[str, int]:
    """SHA-256 and number of bytes of a file's chunk; the last chunk may be short."""
    path, index = job
    with path.open("rb", buffering=0) as file:
        return _hash_open_chunk(file.fileno(), index)


def _hash_open_chunk(file: int, index: int) -> tuple[str, int]:
    """Do as `_hash_chunk`, of a descriptor, whose offset is neither used nor changed."""
    digest, piece, nbytes = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES)), 0
    while nbytes < CHUNK_BYTES:
        part, start = piece[: CHUNK_BYTES - nbytes], index * CHUNK_BYTES + nbytes
        if not (count := os.preadv(file, [part], start)):
            break
        digest.update(piece[:count])
        nbytes += count
    return digest.hexdigest(), nbytes


def is_intact(file: int, entry: FileEntry) -> bool:
    """Whether an open file, given by its descriptor, has the size and the hashes of `entry`.

    It is read in the caller's thread, chunk after chunk. OSError if that fails.
    """
    return os.fstat(file).st_size == entry.size and all(
        _hash_open_chunk(file, index)[0] == chunk for index, chunk in enumerate(entry.chunks)
    )


def verify_files(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Compare every file with its size and hashes, chunks in parallel.

    ArtifactError names the first file (by name) that is missing, changed, or outside the folder.
    """
    for name, entry in sorted(files.items()):
        path = inside_folder(folder, name)
        if not path.is_file():
            got = kind_of(path) or "none"
            raise ArtifactError(f"{path}: expected {entry.size} bytes from the manifest, got {got}")
        if path.stat().st_size != entry.size:
            raise ArtifactError(
                f"{path}: expected {entry.size} bytes from the manifest, got {path.stat().st_size}"
            )
    jobs = [
        (folder / name, index, chunk)
        for name, entry in sorted(files.items())
        for index, chunk in enumerate(entry.chunks)
    ]
    total = sum(entry.size for entry in files.values())
    with (
        task("hashing", total, "bytes") as advance,
        mapped(_check_chunk, jobs, THREADS) as checked,
    ):
        for sentence, nbytes in checked:
            if sentence:
                raise ArtifactError(sentence)
            advance(nbytes)


def inside_folder(folder: Path, name: str) -> Path:
    """The path of an artifact's file. Raises ArtifactError if it is outside the folder."""
    path = inside(folder, name)
    if path is None:
        how = ", a link that leads out or in a circle" if _is_link(folder, name) else ""
        raise ArtifactError(
            f"{folder}: expected files inside the folder, got {in_short(repr(name))}{how}"
        )
    return path


def _is_link(folder: Path, name: str) -> bool:
    """Whether `name`, relative and without "..", is a link or goes through one."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    try:
        return any((folder / each).is_symlink() for each in (path, *path.parents[:-1]))
    except OSError as error:  # too long a name
        reraise_if_signalled(error)
        return False


def _check_chunk(job: tuple[Path, int, str]) -> tuple[str | None, int]:
    """Error text of a chunk, None if it is intact, and the chunk's number of bytes."""
    path, index, expected = job
    found, nbytes = _hash_chunk((path, index))
    if found == expected:
        return None, nbytes
    why = f"expected SHA-256 {expected} from the manifest, got {found}"
    return f"{path}: chunk {index}: {why}: the file was changed", nbytes
