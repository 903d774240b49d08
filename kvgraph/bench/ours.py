"""kvgraph itself as an engine of the bench: an adapter like those of peers/ (see worker.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.file_names import WEIGHTS_NAME
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.plain import JsonObject
from kvgraph.plural import plural
from kvgraph.runtime import artifact as artifacts
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import SamplingParams


def load(job: JsonObject) -> tuple[Any, JsonObject]:
    artifact = artifacts.load(Path(job["model"]))
    session = artifact.session(num_threads=max(1, job["threads"] // artifact.ranks))
    spare = job["new_tokens"] if job["prefix_caching"] else None
    pages = pool_pages(artifact, job["rows"], spare)
    step_tokens = max(min(job["step_tokens"], session.step_tokens), len(job["rows"]))
    engine = Engine(
        artifact,
        session=session,
        num_pages=pages,
        max_batch_size=len(job["rows"]),
        max_batch_tokens=step_tokens,
        enable_prefix_caching=job["prefix_caching"],
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        return [done.token_ids for done in engine.generate(prompts, sampling)]

    manifest, params = artifact.manifest, artifact.params()
    about = {
        "settings": f"{manifest.backend} backend, {manifest.dtype} activations, "
        f"steps of at most {step_tokens} {plural('token', step_tokens)}",
        "pool_dtype": pool_dtype(artifact),
        "pool_bytes": None if pages is None else pages * params.bytes_per_page,
        "model_bytes": sum(
            entry.size for name, entry in manifest.files.items() if name.endswith(WEIGHTS_NAME)
        ),
    }
    return generate, about


def pool_dtype(artifact: Artifact) -> str:
    """The stored dtype of the pool; several dtypes are joined by "+"."""
    leaves = artifact.params().leaves.values()
    return "+".join(dict.fromkeys(leaf.pool_dtype for leaf in leaves))


def pool_pages(artifact: Artifact, rows: list[int], spare: int | None = None) -> int | None:
    """Number of pages for rows of these many tokens at once; None if the cache has no pages.

    `spare`: new tokens of a row if prefixes stay cached from run to run. A row computes the end of
    its prompt and its new tokens again, while the pages of the previous run are still cached; the
    extra pages keep the prompts of the next rows from being evicted.
    """
    params = artifact.params()
    if isinstance(params, KVCacheParams) and params.cache_strategy is not KVCacheStrategy.PAGED:
        return None
    more = 0 if spare is None else 1 + ceildiv(spare, params.page_size)
    return sum(ceildiv(tokens, params.page_size) + more for tokens in rows)
