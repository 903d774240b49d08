"""The command `kvgraph inspect`."""

from __future__ import annotations

from kvgraph.cli.console import print_json, stderr, stdout
from kvgraph.cli.options import ArtifactFolder, Json
from kvgraph.cli.show import show
from kvgraph.contract.plain import to_plain


def inspect(artifact: ArtifactFolder, json: Json = False) -> None:
    """Show what an artifact binds to, computes and contains (its files are not hashed)."""
    from kvgraph.contract.manifest import read_manifest
    from kvgraph.runtime.folder import ArtifactFolder as Folder

    manifest = read_manifest(artifact)
    if said := Folder(artifact, manifest).other_abi:
        stderr.print(f"warning: {said}", soft_wrap=True, highlight=False)
    if json:
        print_json(to_plain(manifest))
        return
    show(artifact, manifest, stdout)
