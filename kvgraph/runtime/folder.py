"""The contents of an artifact's folder that a session reads."""

from __future__ import annotations

import re
import stat
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from kvgraph.contract.devices import Device, Target
from kvgraph.contract.files import KINDS
from kvgraph.contract.hashes import FileEntry, verify_files
from kvgraph.contract.manifest import MANIFEST_NAME, Manifest, read_manifest
from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.plain import in_short
from kvgraph.contract.shards import shards_of
from kvgraph.contract.signature import GraphSignature
from kvgraph.contract.trees import MultiKVCacheParams, params_from_layout
from kvgraph.contract.versions import number_of_other
from kvgraph.errors import ArtifactError
from kvgraph.ops.specs import ABI_VERSION
from kvgraph.signal_handlers import reraise_if_signalled

FileState: TypeAlias = tuple[int, ...] | None

ATTENTION = "kvgraph.update_and_attend"
"""The op of a layer's attention, unless the cache is padded."""

OWNER = re.compile(r"rank\d+/")
"""Beginning of the name of a file that only one rank reads."""


def file_of(rank: int, name: str, files: Container[str]) -> str:
    """Which of an artifact's `files` a rank reads as `name`: its own, or the one that all share."""
    own = f"rank{rank}/{name}"
    return own if rank and own in files else name


def files_of_rank(files: Mapping[str, FileEntry], rank: int) -> dict[str, FileEntry]:
    """The files that `rank` reads: its own, and those that all ranks share."""
    shared = {file_of(rank, name, files) for name in files if OWNER.match(name) is None}
    return {
        name: entry
        for name, entry in files.items()
        if name in shared or name.startswith(f"rank{rank}/")
    }


def is_listed(name: str, files: Container[str] | None) -> bool:
    """Whether a manifest with these `files` lists `name`; other files are not part of the artifact,
    and were not hashed. None: a folder without a manifest, of which every file counts."""
    return files is None or name in files


def state_of(path: Path) -> FileState:
    """Device, inode, size and times of the last change: equal while the file is unchanged. None:
    no such file."""
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        reraise_if_signalled(error)
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@dataclass(frozen=True)
class ArtifactFolder:
    """An artifact folder that `compile` wrote, with its manifest, for one rank."""

    folder: Path
    """The folder with the artifact's files."""

    manifest: Manifest
    """The record in the folder's `manifest.json`."""

    rank: int = 0
    """The rank whose part of the weights is read; 0 for an artifact of one rank."""

    seen: Mapping[str, FileState] = field(default_factory=dict, compare=False, repr=False)
    """States of the manifest, and of the files whose hashes are checked, before they were read."""

    def require_unchanged(self) -> None:
        """Raise ArtifactError if the folder now has another artifact, or none, or if a file of this
        rank was changed. Files of another state are read again: they may have the same contents."""
        changed = {n for n, state in self.seen.items() if state_of(self.folder / n) != state}
        if not changed:
            return
        got = "another one"
        try:
            if read_manifest(self.folder) == self.manifest:
                got = ""
        except ArtifactError:
            got = "none"
        if got:
            raise ArtifactError(
                f"{self.folder}: expected the artifact that was loaded, got {got} in its place; "
                "load it again"
            )
        mine = files_of_rank(self.manifest.files, self.rank)
        verify_files(self.folder, {n: entry for n, entry in mine.items() if n in changed})

    def require_files(self) -> None:
        """Raise ArtifactError if a file of this rank is no regular file: a pipe would be waited on.
        What reads a file tells that it is missing."""
        for name in files_of_rank(self.manifest.files, self.rank):
            path = self.folder / name
            try:
                kind = KINDS[stat.S_IFMT(path.stat().st_mode)]
            except OSError as error:
                reraise_if_signalled(error)
                continue
            if kind != "a file":
                raise ArtifactError(f"{path}: expected a file, got {kind}")

    def require_windows(self, name: str, found: Iterable[int]) -> None:
        """Raise ArtifactError unless the attention of graph `name` has the windows `found` that the
        manifest's layers have. Pages outside of a layer's window are given to other rows."""
        layers = self.manifest.layers
        expected = sorted(layer.window for layer in layers if layer.window is not None)
        counted = self.manifest.ops.get(ATTENTION)
        if len(expected) == len(layers) == counted and expected != (got := sorted(found)):
            raise ArtifactError(
                f"{self.file(name)}: windows of attention: expected {in_short(expected)} from the "
                f"manifest, got {in_short(got)}; compile the model again"
            )

    @property
    def other_abi(self) -> str:
        """The sentence on the ABI version of its ops, if it is not this kvgraph's; else empty."""
        found, written = self.manifest.op_abi_version, self.manifest.kvgraph_version
        if found == ABI_VERSION:
            return ""
        said = number_of_other("op_abi_version", ABI_VERSION, found, written)
        return f"{self.folder / MANIFEST_NAME}: {said}"

    @property
    def ranks(self) -> int:
        """Number of ranks that run the artifact together."""
        return shards_of(self.manifest.layout)

    def file(self, name: str) -> Path:
        """Path of file `name` for this rank: its own, or the one that all ranks share."""
        return self.folder / file_of(self.rank, name, self.manifest.files)

    def entry(self, name: str) -> FileEntry | None:
        """Size and hashes of that file; None if the manifest does not list it."""
        return self.manifest.files.get(file_of(self.rank, name, self.manifest.files))

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
