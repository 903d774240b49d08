"""Write all of an artifact besides the backend's files; the manifest comes last."""

from __future__ import annotations

import filecmp
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.compiler.targets import Lowered
from kvgraph.contract.backends import Backend
from kvgraph.contract.collectives import Collective
from kvgraph.contract.devices import Target
from kvgraph.contract.file_names import BUILD_LOG_NAME, WEIGHTS_NAME
from kvgraph.contract.hashes import FileEntry, hash_files
from kvgraph.contract.manifest import (
    SCHEMA_VERSION,
    Binding,
    Manifest,
    ModelInfo,
    PassEntry,
    write_manifest,
)
from kvgraph.contract.plain import to_json
from kvgraph.contract.versions import version_of
from kvgraph.ops.specs import ABI_VERSION

if TYPE_CHECKING:
    from kvgraph.compiler.traced import Traced


def hash_all(folder: Path) -> dict[str, FileEntry]:
    """Manifest entries of every file in `folder`, except the build log, which differs each time."""
    return hash_files(folder, [name for name in _files(folder) if name != BUILD_LOG_NAME])


def _files(folder: Path) -> list[str]:
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]


def drop_shared(place: Path, folder: Path) -> list[str]:
    """Remove from `place`, a subfolder of `folder`, the build log and each file that `folder` has
    with the same bytes. Return the names of the rest, relative to `folder`."""
    kept = []
    for path in sorted(place.iterdir()):
        if path.name == BUILD_LOG_NAME or filecmp.cmp(path, folder / path.name, shallow=False):
            path.unlink()
        else:
            kept.append(f"{place.name}/{path.name}")
    return kept


def emit(
    folder: Path,
    *,
    traced: Traced,
    lowered: Lowered,
    collectives: list[Collective],
    target: Target,
    backend: Backend,
    weights: str,
    notes: list[str],
) -> Manifest:
    """Copy the model's extra files (tokenizer and the like), hash all files, write the manifest."""
    model, signature = traced.model, traced.signature
    for name, source in model.files.items():
        copy = folder / name
        copy.parent.mkdir(exist_ok=True)
        if isinstance(source, bytes):
            copy.write_bytes(source)
        else:
            shutil.copyfile(source, copy)
    files = hash_all(folder)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        kvgraph_version=version_of(),
        op_abi_version=ABI_VERSION,
        model=ModelInfo(
            model.architecture,
            _model_identity(traced, files),
            model.vocab_size,
            model.max_seq_len,
            list(model.eos_token_ids),
            model.bos_token_id,
        ),
        backend=backend.name,
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
        tools={name: version_of(name) for name in backend.targets[target.kind].tools},
        engine=lowered.engine,
        collectives=collectives,
        mixtures=lowered.mixtures,
    )
    write_manifest(folder, manifest)
    return manifest


def _model_identity(traced: Traced, files: Mapping[str, FileEntry]) -> str:
    """SHA-256, as hex, of program and weights: all that decides a page's content but its layout.

    It is equal in every process, pool and rank that runs the artifact.
    """
    weights = [name for name in sorted(files) if name.endswith(WEIGHTS_NAME)]
    chunks = [chunk for name in weights for chunk in files[name].chunks]
    return hashlib.sha256(to_json([traced.digest.hex(), chunks])).hexdigest()
