"""What a compile costs in quality: an artifact and its checkpoint, on the same held-out text.

It needs both banks, compiler and runtime, so it stands above them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvgraph.contract.manifest import Manifest, QualityInfo, read_measured, write_manifest
from kvgraph.errors import RequestError
from kvgraph.quality.scores import compare
from kvgraph.quality.text import WINDOW_TOKENS, cut_windows, read_text

MOST_TOKENS = 2048


def measure(
    folder: Path,
    source: Path,
    text: Path | None = None,
    *,
    most_tokens: int = MOST_TOKENS,
    session: str | None = None,
    num_threads: int | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> QualityInfo:
    """Compare the artifact `folder` with its Hugging Face checkpoint `source` in float32.

    `text` is a UTF-8 file (default: the held-out text of the package); its first `most_tokens`
    tokens are predicted, teacher-forced, in windows of 512. The checkpoint is in memory first and
    alone, then the session: never both. Nothing is written (see `record`).

    ModelError: no tokenizer.json or no weights in `source`. ArtifactError: one that this machine
    cannot run, or whose logits are not finite. RequestError: a text too short, or not UTF-8.
    """
    from kvgraph.compiler.frontends.gguf import as_folder
    from kvgraph.quality.artifact import score_artifact
    from kvgraph.quality.reference import score_reference
    from kvgraph.runtime import artifact as artifacts

    if most_tokens < 1:
        raise RequestError(f"most_tokens: expected >= 1, got {most_tokens}")
    artifact = artifacts.load(folder)
    model = artifact.manifest.model
    given = read_text(text)
    length = min(WINDOW_TOKENS, model.max_seq_len)
    with as_folder(source) as folder_of_source:
        windows = cut_windows(given, folder_of_source, model.bos_token_id, length, most_tokens)
        progress("scoring the checkpoint in float32")
        reference = score_reference(folder_of_source, windows, model.max_seq_len)
    progress("scoring the artifact")
    scores = score_artifact(artifact, windows, session=session, num_threads=num_threads)
    return compare(scores, reference, text=given.name, sha256=given.sha256)


def record(folder: Path, measured: Manifest, quality: QualityInfo) -> Manifest:
    """Write `quality` into the artifact's manifest, which appears whole or not at all.

    ArtifactError, with nothing written, where `folder` no longer has the artifact of `measured`.
    """
    manifest = replace(read_measured(folder, measured), quality=quality)
    write_manifest(folder, manifest)
    return manifest
