"""Hashes of an artifact's files: of chunks of a fixed size, which are never in memory whole."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvgraph.contract.hashes import (
    CHUNK_BYTES,
    PIECE_BYTES,
    FileEntry,
    hash_files,
    verify_files,
)
from kvgraph.contract.manifest import read_manifest
from kvgraph.errors import ArtifactError

Compiled = Callable[..., Path]

SIZES = (0, 1, PIECE_BYTES - 1, PIECE_BYTES + 1, CHUNK_BYTES, 2 * CHUNK_BYTES + PIECE_BYTES + 3)


@pytest.mark.parametrize("size", SIZES)
def test_chunks_of_a_file(tmp_path: Path, size: int) -> None:
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    path = tmp_path / "file"
    path.write_bytes(content)
    chunks = [content[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)]
    expected = FileEntry(size, [hashlib.sha256(chunk).hexdigest() for chunk in chunks])
    assert hash_files(tmp_path, [path.name]) == {path.name: expected}


def test_verifying_keeps_no_chunk_in_memory(compiled: Compiled, tmp_path: Path) -> None:
    """Of a file with holes, as large as chunks for every thread; a change in its last is seen."""
    path = tmp_path / "weights.safetensors"
    with path.open("wb") as file:
        file.truncate(6 * CHUNK_BYTES)
    manifest = read_manifest(compiled("tiny-llama"))
    manifest = replace(manifest, files=hash_files(tmp_path, [path.name]))
    tracemalloc.start()
    try:
        verify_files(tmp_path, manifest.files)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < CHUNK_BYTES
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(ArtifactError, match=r"weights.safetensors: chunk 5: expected SHA-256"):
        verify_files(tmp_path, manifest.files)
