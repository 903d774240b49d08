"""kvgraph itself as an engine of the bench: an adapter like those of peers/ (see worker.py)."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.runtime import artifact as artifacts
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import SamplingParams


def load(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    artifact = artifacts.load(Path(job["model"]))
    pages = pool_pages(artifact, job["rows"])
    engine = Engine(
        artifact,
        num_pages=pages,
        max_batch_size=len(job["rows"]),
        max_batch_tokens=job["step_tokens"],
        enable_prefix_caching=False,
        num_threads=job["threads"],
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        return [done.token_ids for done in engine.generate(prompts, sampling)]

    manifest, params = artifact.manifest, artifact.params()
    about = {
        "versions": _versions(manifest.backend),
        "settings": f"{manifest.backend} backend, {manifest.dtype} activations",
        "pool_dtype": pool_dtype(artifact),
        "pool_bytes": None if pages is None else pages * params.bytes_per_page,
    }
    return generate, about


def pool_dtype(artifact: Artifact) -> str:
    """The stored type of the pool; of several, all."""
    leaves = artifact.params().leaves.values()
    return "+".join(dict.fromkeys(leaf.pool_dtype for leaf in leaves))


def pool_pages(artifact: Artifact, rows: list[int]) -> int | None:
    """Pages for rows of so many tokens at once; None where the cache has no pages."""
    params = artifact.params()
    if isinstance(params, KVCacheParams) and params.cache_strategy is not KVCacheStrategy.PAGED:
        return None
    return sum(ceildiv(tokens, params.page_size) for tokens in rows)


def _versions(backend: str) -> dict[str, str]:
    """kvgraph's and the installed one of what runs the backend."""
    packages = {
        "onnx": ("onnxruntime", "onnxruntime-gpu"),
        "torch": ("torch",),
    }.get(backend, ())
    found = {"kvgraph": metadata.version("kvgraph")}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
