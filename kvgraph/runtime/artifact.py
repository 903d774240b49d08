"""An artifact on disk: read and verified, nothing allocated yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.contract.devices import Device, Target
from kvgraph.contract.manifest import Manifest, read_manifest, verify_files
from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.signature import GraphSignature
from kvgraph.contract.trees import MultiKVCacheParams, params_from_layout
from kvgraph.errors import ArtifactError
from kvgraph.ops.header import ABI_VERSION

if TYPE_CHECKING:
    from kvgraph.runtime.sessions.base import Session


@dataclass(frozen=True)
class Artifact:
    """A folder that compile wrote."""

    folder: Path
    manifest: Manifest

    @property
    def signature(self) -> GraphSignature:
        return GraphSignature(
            tuple(binding.symbol() for binding in self.manifest.inputs),
            tuple(binding.symbol() for binding in self.manifest.outputs),
        )

    def params(
        self,
        devices: Sequence[Device] | None = None,
        *,
        data_parallel_degree: int = 1,
        enable_prefix_caching: bool = False,
    ) -> KVCacheParams | MultiKVCacheParams:
        """Cache parameters with the artifact's layout and this deployment's fields."""
        kind = Target.parse(self.manifest.target).kind
        return params_from_layout(
            self.manifest.layout,
            devices=devices or [Device(kind)],
            data_parallel_degree=data_parallel_degree,
            enable_prefix_caching=enable_prefix_caching,
        )

    def session(self, kind: str | None = None, *, num_threads: int | None = None) -> Session:
        """Something that can run the graph: `kind` "onnxruntime", "torch" or "reference".

        Default: the one of the artifact's backend. `num_threads` 0 or None: all cores.
        """
        from kvgraph.runtime import sessions

        return sessions.create(self, kind, num_threads)

    def require_machine(self) -> None:
        """ArtifactError unless this machine and this kvgraph can run the artifact."""
        manifest = self.manifest
        where = self.folder / "manifest.json"
        if manifest.op_abi_version != ABI_VERSION:
            raise ArtifactError(
                f"{where}: op_abi_version: expected {ABI_VERSION} from this kvgraph, "
                f"got {manifest.op_abi_version}"
            )
        if manifest.target != "cpu":
            raise ArtifactError(
                f"{where}: target: expected 'cpu' from this machine, got {manifest.target!r}"
            )


def load(folder: str | Path, *, verify: bool = True) -> Artifact:
    """Read the manifest of `folder`, check that this machine can run it, and hash its files.

    `verify=False` skips the hashes (sizes too); the checks of the manifest stay. Raises
    ArtifactError with one sentence that names the file or field and both values.
    """
    folder = Path(folder)
    artifact = Artifact(folder, read_manifest(folder))
    artifact.require_machine()
    if verify:
        verify_files(folder, artifact.manifest)
    return artifact
