"""Reads the artifact's `weights.safetensors` by the names of a torch program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvgraph.contract.file_names import WEIGHTS_NAME
from kvgraph.errors import ArtifactError
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.opening import opening

if TYPE_CHECKING:
    import torch


def read_weights(
    artifact: ArtifactFolder, names: Iterable[str], device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Tensors of `names` on `device`; a tied name is looked up under its owner's.

    ArtifactError names the first that the file does not have.
    """
    from safetensors import safe_open

    path = artifact.file(WEIGHTS_NAME)
    weights: dict[str, torch.Tensor] = {}
    with opening(path, "safetensors"), safe_open(path, framework="pt", device=device) as file:
        owners = file.metadata() or {}
        stored = set(file.keys())
        read: dict[str, torch.Tensor] = {}
        for name in names:
            owner = owners.get(name, name)
            if owner not in stored:
                raise ArtifactError(f"{path}: expected a tensor {owner!r} from model.pt2, got none")
            if owner not in read:
                tensor = file.get_tensor(owner)
                # Kernels load 16 bytes at once; a file's tensors may start anywhere.
                read[owner] = tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
            weights[name] = read[owner]
    return weights
