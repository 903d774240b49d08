"""Precomputed prefixes: the pages of a fixed prompt in a file, checked like an artifact.

A `.kvp` is a safetensors file. For each leaf (by path, "" for a single cache):

    pages.<leaf>  uint8 [n, record]  bytes of each page, as tiers exchange them
    keys.<leaf>   uint8 [n, 32]      keys of the pages in the tiers
    tokens        int32 [tokens]     the prompt; tokens after its last full page are recomputed

Metadata: format, identity and architecture of the artifact, fingerprint (model and layout), and the
SHA-256 of everything else. An engine uses the file as a read-only tier.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array
from kvgraph.contract.files import as_path, open_regular, reading, replacing
from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.contract.plain import in_short
from kvgraph.errors import ArtifactError
from kvgraph.kv.tiers.store import KEY_BYTES, StoreStats
from kvgraph.signal_handlers import reraise_if_signalled

FORMAT = "kvgraph-prefix-1"
FIELDS = ("format", "identity", "architecture", "fingerprint")

Tensors = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Prefix:
    """A verified `.kvp` file: token ids of the prompt, and pages by key."""

    path: Path
    metadata: Mapping[str, str]
    tokens: list[int]
    pages: Mapping[bytes, npt.NDArray[np.uint8]]

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in self.pages.values())


def save_prefix(path: Path, metadata: Mapping[str, str], tensors: Tensors) -> Prefix:
    """Write a prefix file atomically. `metadata`: FIELDS; the digest is added."""
    from safetensors.numpy import save

    metadata = {**metadata, "sha256": _digest(metadata, tensors)}
    with replacing(path) as file:
        file.write(save(dict(tensors), metadata))
    return _prefix(path, metadata, tensors)


def read_prefix(path: str | Path) -> Prefix:
    """Read and verify a file of `save_prefix`; ArtifactError if it is damaged or another file."""
    path = as_path("prefix", path)
    metadata, tensors = _read(path)
    if metadata.get("format") != FORMAT:
        raise ArtifactError(
            f"{path}: format: expected {FORMAT!r} from this kvgraph, "
            f"got {in_short(repr(metadata.get('format', 'none')))}"
        )
    found = _digest(metadata, tensors)
    if metadata.get("sha256") != found:
        raise ArtifactError(
            f"{path}: sha256: expected {in_short(repr(metadata.get('sha256')))} from its metadata, "
            f"got {found}"
        )
    _require_parts(path, tensors)
    return _prefix(path, metadata, tensors)


def _read(path: Path) -> tuple[dict[str, str], Tensors]:
    from safetensors import SafetensorError, safe_open

    try:
        with reading(path, ArtifactError):
            open_regular(path).close()  # rejects a pipe, which would block
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except ArtifactError:
        raise
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: expected a prefix of kvgraph prefill, got no file") from error
    except (SafetensorError, OSError, TypeError, AttributeError, ValueError) as error:
        reraise_if_signalled(error)
        # TypeError, AttributeError: a dtype that NumPy lacks. ValueError: a NUL in the path.
        raise ArtifactError(
            f"{path}: expected a prefix of kvgraph prefill, got a damaged file ({in_short(error)})"
        ) from error


def _require_parts(path: Path, tensors: Tensors) -> None:
    """Raise ArtifactError unless the tensors are the prompt's tokens, and each leaf's keys and
    pages."""
    leaves = [name.removeprefix("keys.") for name in tensors if name.startswith("keys.")]
    expected: dict[str, tuple[str, tuple[int | None, ...]]] = {"tokens": ("int32", (None,))}
    for leaf in leaves:
        count = len(tensors[f"keys.{leaf}"]) if tensors[f"keys.{leaf}"].ndim else 0
        expected[f"keys.{leaf}"] = ("uint8", (count, KEY_BYTES))
        expected[f"pages.{leaf}"] = ("uint8", (count, None))
    for name in sorted(expected.keys() | tensors.keys()):
        wanted, got = expected.get(name), tensors.get(name)
        if wanted is None or got is None or not _fits(got, *wanted):
            found = None if got is None else (str(got.dtype), got.shape)
            raise ArtifactError(
                f"{path}: {name}: expected {_said(wanted)} from {FORMAT}, got {_said(found)}"
            )


def _fits(tensor: Array, dtype: str, shape: tuple[int | None, ...]) -> bool:
    extents = zip(shape, tensor.shape, strict=False)
    same = str(tensor.dtype) == dtype and tensor.ndim == len(shape)
    return same and all(wanted in (None, got) for wanted, got in extents)


def _said(part: tuple[str, tuple[int | None, ...]] | None) -> str:
    if part is None:
        return "no tensor"
    return f"{part[0]} [{', '.join('any' if n is None else str(n) for n in part[1])}]"


def is_prefix(path: Path) -> bool:
    """Whether a file was written by `save_prefix`, of any version."""
    try:
        return _read(path)[0].get("format", "").startswith("kvgraph-prefix-")
    except ArtifactError:
        return False


class PrefixStore(NotCopyable):
    """A prefix as a read-only page store. ArtifactError if it belongs to another artifact."""

    name = "prefix"

    def __init__(self, prefix: Prefix, fingerprint: bytes, page_bytes: int) -> None:
        found = prefix.metadata.get("fingerprint")
        if found != fingerprint.hex():
            raise ArtifactError(
                f"{prefix.path}: expected a prefix of this artifact and layout (fingerprint "
                f"{fingerprint.hex()[:16]}), got one of {prefix.metadata.get('architecture')}, "
                f"artifact {str(prefix.metadata.get('identity'))[:16]} "
                f"(fingerprint {str(found)[:16]})"
            )
        self._prefix = prefix
        self._read = 0

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._prefix.pages for key in keys]

    def read(self, key: bytes, out: memoryview) -> bool:
        page = self._prefix.pages.get(key)
        if page is None or page.nbytes != out.nbytes:
            return False
        np.frombuffer(out, np.uint8)[:] = page
        self._read += 1
        return True

    def write(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        return False

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: pages of a prefix are never evicted."""

    def flush(self) -> None:
        """Do nothing: nothing is written."""

    def clear(self) -> None:
        """Do nothing: the user configured the prefix, so it stays."""

    def stats(self) -> StoreStats:
        count = len(self._prefix.pages)
        return StoreStats(count, count, self._prefix.nbytes, read=self._read)

    def close(self) -> None:
        """Do nothing: the file is already closed."""


def _prefix(path: Path, metadata: Mapping[str, str], tensors: Tensors) -> Prefix:
    pages: dict[bytes, npt.NDArray[np.uint8]] = {}
    for name, keys in tensors.items():
        if name.startswith("keys."):
            records = tensors["pages." + name.removeprefix("keys.")]
            pages.update(zip(map(bytes, keys), records, strict=True))
    return Prefix(path, metadata, tensors["tokens"].tolist(), pages)


def _digest(metadata: Mapping[str, str], tensors: Tensors) -> str:
    """SHA-256 in hex of all FIELDS and tensors, with names, dtypes and shapes."""
    whole = sha256(json.dumps([metadata.get(name) for name in FIELDS]).encode())
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        whole.update(json.dumps([name, str(tensor.dtype), tensor.shape]).encode())
        whole.update(tensor.data)
    return whole.hexdigest()
