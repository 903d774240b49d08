"""Kernels of an artifact's folder: the files that its manifest lists, and how each is launched."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvgraph.contract.file_names import KERNELS_NAME
from kvgraph.contract.files import inside, read_list
from kvgraph.contract.manifest import read_manifest
from kvgraph.contract.plain import in_short
from kvgraph.errors import ArtifactError, KVGraphError
from kvgraph.kernels.shapes import SHARED_MEMORY
from kvgraph.kernels.variants import ALIGNMENT, KERNELS, Constant, Variant

KERNELS_FILE = re.compile(rf"kernels/(sm_\d+)/{re.escape(KERNELS_NAME)}")
KNOWN = {kernel.name: kernel for kernel in KERNELS}


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """An entry of kernels.json: data for the launch, and the fields of the variant.

    `shared`: bytes of a block's dynamic shared memory. `alignment`: in bytes, of operands.
    `ptx`: None in an artifact from before artifacts had it.
    """

    kernel: str
    role: str
    arch: str
    file: str
    sha256: str
    entry: str
    dtype: str
    pool_dtype: str
    num_warps: int
    num_stages: int
    absent: list[str]
    shared: int
    parameters: list[list[str]]
    alignment: int
    constants: dict[str, Constant]
    ptx: str | None = None


@dataclass(frozen=True)
class StoredKernel:
    """A kernel of a folder: its variant, the path of its PTX, and the data for its launch.

    `path` is in the folder of the architecture.
    """

    variant: Variant
    arch: str
    entry: str
    shared: int
    path: Path

    @property
    def title(self) -> str:
        return f"{self.variant.kernel.name} {self.variant.role}".strip()


def archs_of(files: Iterable[str]) -> list[str]:
    """Architectures, such as "sm_90", whose kernels are among the `files` of a manifest."""
    return sorted(match[1] for match in map(KERNELS_FILE.fullmatch, files) if match)


@contextmanager
def fitting(kernel: StoredKernel) -> Iterator[None]:
    """Convert errors of constants that a kernel of this version does not have to ArtifactError."""
    try:
        yield
    except KVGraphError:
        raise
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        raise ArtifactError(
            f"{kernel.path}: expected the constants of a kernel of this version of kvgraph, got "
            f"others ({type(error).__name__}: {in_short(error)}); compile it again"
        ) from error


def read_entries(folder: Path, arch: str, files: Container[str]) -> list[KernelEntry]:
    """Read the entries of an architecture's kernels.json, in an artifact's `folder`.

    ArtifactError for a damaged file, a kernel for another architecture, and a file that is not
    among the manifest's `files`.
    """
    path = folder / "kernels" / arch / KERNELS_NAME
    entries = read_list(path, KernelEntry, "kernels", ArtifactError)
    for entry in entries:
        if entry.arch != arch:
            raise ArtifactError(
                f"{path}: {in_short(repr(entry.file))}: expected a kernel for {arch}, got one for "
                f"{in_short(repr(entry.arch))}"
            )
        for name in (entry.file, entry.ptx):
            listed = f"kernels/{arch}/{name}"
            if name is not None and (listed not in files or inside(folder, listed) is None):
                raise ArtifactError(
                    f"{path}: expected files that the manifest lists, got {in_short(repr(name))}; "
                    "compile the model again"
                )
    return entries


def read_kernels(folder: Path) -> list[StoredKernel]:
    """Read all kernels that an artifact's manifest lists; ArtifactError for none, or one without
    PTX."""
    files = read_manifest(folder).files
    found = [kernel for arch in archs_of(files) for kernel in _stored_of(folder, arch, files)]
    if not found:
        raise ArtifactError(
            f"{folder}: expected kernels to execute in kernels/, got none; artifacts for CUDA have "
            "them, but those of backend onnx"
        )
    return found


def read_arch(folder: Path, arch: str) -> list[StoredKernel]:
    """Read the kernels of one architecture as `read_kernels` does."""
    return _stored_of(folder, arch, read_manifest(folder).files)


def _stored_of(folder: Path, arch: str, files: Container[str]) -> list[StoredKernel]:
    entries = read_entries(folder, arch, files)
    return [_stored(folder / "kernels" / arch, entry) for entry in entries]


def _stored(folder: Path, entry: KernelEntry) -> StoredKernel:
    file = folder / entry.file
    if entry.ptx is None:
        raise ArtifactError(
            f"{file}: expected its PTX beside it, got an artifact from before artifacts had it; "
            "compile it again"
        )
    variant = variant_of(file, entry)
    return StoredKernel(variant, entry.arch, entry.entry, entry.shared, folder / entry.ptx)


def variant_of(file: Path, entry: KernelEntry) -> Variant:
    """The variant that the cubin `file` was compiled from.

    ArtifactError if this version has no such kernel, or another launch of it than `entry` says.
    """
    ours = f"{file}: expected a kernel of this version of kvgraph"
    try:
        most = SHARED_MEMORY[entry.arch]
        variant = Variant(
            KNOWN[entry.kernel],
            entry.role,
            entry.dtype,
            entry.pool_dtype,
            entry.constants,
            entry.num_warps,
            entry.num_stages,
            frozenset(entry.absent),
        )
    except KeyError as error:
        raise ArtifactError(f"{ours}, got one with {in_short(error)}; compile it again") from error
    made = {
        "file": f"{variant.name}.cubin",
        "ptx": None if entry.ptx is None else f"{variant.name}.ptx.gz",
        "entry": entry.kernel,
        "parameters": [[each.name, each.type] for each in variant.parameters],
        "alignment": ALIGNMENT,
    }
    others = [field for field, value in made.items() if getattr(entry, field) != value]
    if others:
        raise ArtifactError(
            f"{ours} ({variant.name}), got one with other {others[0]}; compile it again"
        )
    if not 0 <= entry.shared <= most:
        raise ArtifactError(
            f"{file}: expected 0 to {most} bytes of shared memory on {entry.arch}, got "
            f"{in_short(entry.shared)}"
        )
    return variant
