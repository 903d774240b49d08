"""The contents of an artifact's folder that a session reads."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from kvgraph.contract.devices import Device, Target
from kvgraph.contract.manifest import MANIFEST_NAME, Manifest, read_manifest
from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.shards import shards_of
from kvgraph.contract.signature import GraphSignature
from kvgraph.contract.trees import MultiKVCacheParams, params_from_layout
from kvgraph.errors import ArtifactError

FileState: TypeAlias = tuple[int, int, int, int]


def file_of(rank: int, name: str, files: Container[str]) -> str:
    """Which of an artifact's `files` a rank reads as `name`: its own, or the one that all share."""
    own = f"rank{rank}/{name}"
    return own if rank and own in files else name


def state_of(path: Path) -> FileState | None:
    """Device, inode, size and time of the last change: equal while the file is unchanged. None:
    no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class ArtifactFolder:
    """An artifact folder that `compile` wrote, with its manifest, for one rank."""

    folder: Path
    """The folder with the artifact's files."""

    manifest: Manifest
    """The record in the folder's `manifest.json`."""

    rank: int = 0
    """The rank whose part of the weights is read; 0 for an artifact of one rank."""

    seen: FileState | None = field(default=None, compare=False, repr=False)
    """State of the manifest file when it was read; None if not known."""

    def require_unchanged(self) -> None:
        """Raise ArtifactError if the folder now has another artifact, or none. A manifest file that
        was replaced is read again: it may have the same contents."""
        if self.seen is None or state_of(self.folder / MANIFEST_NAME) == self.seen:
            return
        got = "another one"
        try:
            if read_manifest(self.folder) == self.manifest:
                return
        except ArtifactError:
            got = "none"
        raise ArtifactError(
            f"{self.folder}: expected the artifact that was loaded, got {got} in its place; load "
            "it again"
        )

    @property
    def ranks(self) -> int:
        """Number of ranks that run the artifact together."""
        return shards_of(self.manifest.layout)

    def file(self, name: str) -> Path:
        """Path of file `name` for this rank: its own, or the one that all ranks share."""
        return self.folder / file_of(self.rank, name, self.manifest.files)

    @property
    def signature(self) -> GraphSignature:
        """Names, dtypes and dims of the graph's inputs and outputs."""
        return self.manifest.signature

    def params(
        self,
        devices: Sequence[Device] | None = None,
        *,
        data_parallel_degree: int = 1,
        enable_prefix_caching: bool = False,
    ) -> KVCacheParams | MultiKVCacheParams:
        """Cache parameters with the artifact's layout and this deployment's fields."""
        if devices is None:
            kind = Target.parse(self.manifest.target).kind
            devices = [Device(f"{kind}:{i}") for i in range(self.ranks)]
        return params_from_layout(
            self.manifest.layout,
            devices=devices,
            data_parallel_degree=data_parallel_degree,
            enable_prefix_caching=enable_prefix_caching,
        )
