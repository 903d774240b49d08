"""Reads the artifact's `weights.safetensors` by the names of a torch program."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from kvgraph.contract.file_names import PROGRAM_NAME, WEIGHTS_NAME, WEIGHTS_TABLE
from kvgraph.contract.plain import in_short
from kvgraph.errors import ArtifactError
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.opening import opening
from kvgraph.runtime.sessions.package import written

if TYPE_CHECKING:
    import torch

Stored: TypeAlias = tuple[str, tuple[int, ...]]
"""safetensors' name of a dtype, and a shape."""


def read_weights(
    artifact: ArtifactFolder, expected: Mapping[str, Stored | None], device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Tensors of the names in `expected` on `device`; a tied name is looked up under its owner's.

    ArtifactError names the first that the file does not have, or has with another dtype or shape.
    None: any dtype and shape.
    """
    weights: dict[str, torch.Tensor] = {}
    with _opened(artifact, "pt", device) as file:
        owners = _owners(artifact, expected, file)
        read: dict[str, torch.Tensor] = {}
        for name, owner in owners.items():
            if owner not in read:
                tensor = file.get_tensor(owner)
                # Kernels load 16 bytes at once; a file's tensors may start anywhere.
                read[owner] = tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
            weights[name] = read[owner]
    return weights


def require_weights(artifact: ArtifactFolder) -> None:
    """Raise ArtifactError unless the weights of the artifact's rank have every tensor of its
    `model.pt2`. No tensor is read, and torch is not imported."""
    with _opened(artifact, "np", "cpu") as file:
        _owners(artifact, read_table(artifact), file)


def read_table(artifact: ArtifactFolder) -> dict[str, Stored]:
    """What `model.pt2` expects of each tensor of the weights; {} for a file of an older compile,
    and for one that is no archive, which torch refuses."""
    path = artifact.file(PROGRAM_NAME)
    if not zipfile.is_zipfile(path):
        return {}
    with (
        opening(path, "zipfile"),
        written(path, "a table of weights"),
        zipfile.ZipFile(path) as archive,
    ):
        if WEIGHTS_TABLE not in archive.namelist():
            return {}
        table = json.loads(archive.read(WEIGHTS_TABLE))
        return {name: (str(dtype), tuple(shape)) for name, (dtype, shape) in table.items()}


@contextmanager
def _opened(artifact: ArtifactFolder, framework: str, device: str) -> Iterator[Any]:
    from safetensors import safe_open

    path = artifact.file(WEIGHTS_NAME)
    with opening(path, "safetensors"), safe_open(path, framework=framework, device=device) as file:
        yield file


def _owners(
    artifact: ArtifactFolder, expected: Mapping[str, Stored | None], file: Any
) -> dict[str, str]:
    """The name in `file` of each expected tensor, after the header's dtypes and shapes are
    compared."""
    path, ties, names = artifact.file(WEIGHTS_NAME), file.metadata() or {}, set(file.keys())
    owners = {name: ties.get(name, name) for name in expected}
    for name, owner in owners.items():
        if owner not in names:
            raise ArtifactError(
                f"{path}: expected a tensor {in_short(repr(owner))} from model.pt2, got none"
            )
        at, wanted = file.get_slice(owner), expected[name]
        found = at.get_dtype(), tuple(at.get_shape())
        if wanted not in (None, found):
            said, got = (in_short(f"{dtype} {list(shape)}") for dtype, shape in (wanted, found))
            raise ArtifactError(
                f"{path}: {in_short(owner)}: expected {said}, as model.pt2 says, got {got}; "
                "compile the model again"
            )
    return owners
