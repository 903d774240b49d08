"""The artifact's folder: built beside its place, moved there whole, manifest last."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.compiler.targets import BUILD_LOG_NAME, Lowered
from kvgraph.contract.devices import Target
from kvgraph.contract.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Binding,
    FileEntry,
    Manifest,
    ModelInfo,
    PassEntry,
    hash_files,
    write_manifest,
)
from kvgraph.contract.plain import to_json
from kvgraph.errors import ArtifactError
from kvgraph.ops.header import ABI_VERSION

if TYPE_CHECKING:
    from kvgraph.compiler.trace import Traced

REPLACED = "replaced"
"""Where the artifact that `--force` replaces waits until the new one is in its place."""


def require_free(out: Path, *, force: bool) -> None:
    """Refuse an `out` that would lose something: any folder without `force`, and with `force`
    anything but an artifact or an empty folder."""
    if not out.exists():
        return
    if not force:
        raise ArtifactError(f"{out}: expected no such folder yet, got one (kept); use --force")
    if not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST_NAME).is_file()):
        raise ArtifactError(
            f"{out}: expected an artifact or an empty folder to replace, got something else (kept)"
        )


@contextlib.contextmanager
def staging(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` on success and disappears on failure.

    `require_free` is asked again at the end: what appeared at `out` meanwhile is not lost.

    A killed process leaves at most a hidden folder without a manifest, so nothing that reads as
    an artifact; the next compile to `out` removes it.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    prefix = f".{out.name}.{os.getpid()}."
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        yield folder
        require_free(out, force=force)
        _replace(out, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(out: Path) -> None:
    for path in out.parent.iterdir():
        match = re.fullmatch(rf"\.{re.escape(out.name)}\.(\d+)\.[^.]+", path.name)
        if match and not _alive(int(match[1])):
            replaced = path / REPLACED
            if replaced.exists() and not out.exists():
                replaced.rename(out)  # killed between the two renames of `_replace`
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace(out: Path, folder: Path) -> None:
    for name in _files(folder):
        (folder / name).chmod(0o644)  # safetensors writes for its user alone
    folder.chmod(0o755)
    if not out.exists():
        folder.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.{os.getpid()}.", dir=out.parent))
    out.rename(old / REPLACED)
    folder.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def hash_all(folder: Path) -> dict[str, FileEntry]:
    """Entries of every file in a folder but the log of its making, which differs each time."""
    return hash_files(folder, [name for name in _files(folder) if name != BUILD_LOG_NAME])


def _files(folder: Path) -> list[str]:
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]


def emit(
    folder: Path,
    *,
    traced: Traced,
    lowered: Lowered,
    target: Target,
    backend: str,
    weights: str,
    notes: list[str],
) -> Manifest:
    """Copy the model's travelling files, hash everything, write the manifest."""
    model, signature = traced.model, traced.signature
    for name, source in model.files.items():
        shutil.copyfile(source, folder / name)
    files = hash_all(folder)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        kvgraph_version=metadata.version("kvgraph"),
        op_abi_version=ABI_VERSION,
        model=ModelInfo(
            model.architecture,
            _model_identity(traced, files["weights.safetensors"]),
            model.vocab_size,
            model.max_seq_len,
            list(model.eos_token_ids),
            model.bos_token_id,
        ),
        backend=backend,
        target=str(target),
        dtype=model.dtype,
        weights=weights,
        layout=traced.plan.params.layout_dict(),
        inputs=[Binding.of(symbol) for symbol in signature.inputs],
        outputs=[Binding.of(symbol, output=True) for symbol in signature.outputs],
        layers=list(traced.plan.layers),
        ops=lowered.ops,
        passes=[PassEntry(r.name, r.applied, r.unmatched) for r in lowered.passes],
        notes=[*notes, *lowered.notes],
        files=files,
        nondeterministic_files=lowered.nondeterministic_files,
        tools={name: metadata.version(name) for name in lowered.tools},
        engine=lowered.engine,
    )
    write_manifest(folder, manifest)
    return manifest


def _model_identity(traced: Traced, weights: FileEntry) -> str:
    """Of everything that decides a page's content beside its layout: the program and the weights.

    Equal in every process, pool and rank that runs the artifact.
    """
    return hashlib.sha256(to_json([traced.digest.hex(), weights.chunks])).hexdigest()
