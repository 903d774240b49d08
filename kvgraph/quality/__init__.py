"""Measure the quality that a compile loses: score an artifact and its checkpoint on the same text.

It needs both the compiler and the runtime, so it stands above them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvgraph.contract.manifest import Manifest, QualityInfo, read_measured, write_manifest
from kvgraph.contract.tokenizer import NAME
from kvgraph.errors import ModelError, RequestError
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

    `text`: a UTF-8 file; default: the held-out text of the package. Its first `most_tokens` tokens
    are predicted, teacher-forced, in windows of 512. The checkpoint is scored first and freed
    before the session opens, so both are never in memory together. Nothing is written (see
    `record`).

    ModelError: `source` has no tokenizer.json or no weights, or the text has token ids that the
    model does not have. ArtifactError: this machine cannot run the artifact, or its logits are not
    finite. RequestError: the text is too short, or not UTF-8.
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
        highest = max(int(window.max()) for window in windows)
        if highest >= model.vocab_size:
            raise ModelError(
                f"{source}/{NAME}: expected token ids in [0, {model.vocab_size}), those of the "
                f"model, got {highest} for {given.name}"
            )
        progress("scoring the checkpoint in float32")
        reference = score_reference(folder_of_source, windows, model.max_seq_len)
    progress("scoring the artifact")
    scores = score_artifact(artifact, windows, session=session, num_threads=num_threads)
    return compare(scores, reference, text=given.name, sha256=given.sha256)


def record(folder: Path, measured: Manifest, quality: QualityInfo) -> Manifest:
    """Write `quality` into the artifact's manifest, which appears whole or not at all.

    ArtifactError, with nothing written: `folder` no longer has the artifact of manifest `measured`.
    """
    manifest = replace(read_measured(folder, measured), quality=quality)
    write_manifest(folder, manifest)
    return manifest
