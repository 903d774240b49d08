"""The command `kvgraph verify`."""

from __future__ import annotations

from kvgraph.cli.console import print_json, size_text, stdout, summary, working
from kvgraph.cli.options import ArtifactFolder, Json


def verify(artifact: ArtifactFolder, json: Json = False) -> None:
    """Hash every file of an artifact and compare it with the manifest."""
    from kvgraph.runtime.artifact import verify as verify_artifact

    with working("hashing"):
        manifest = verify_artifact(artifact).manifest
    if json:
        print_json(summary(artifact, manifest))
        return
    size = size_text(sum(entry.size for entry in manifest.files.values()))
    stdout.print(f"{artifact}: intact: {len(manifest.files)} files, {size}", soft_wrap=True)
