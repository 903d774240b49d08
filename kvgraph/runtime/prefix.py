"""Computes a prefix ahead of time: an idle engine writes a fixed prompt's pages to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.contract.files import as_path, require_replaceable
from kvgraph.errors import GenerationError, RequestError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers.store import KEY_BYTES
from kvgraph.runtime.arguments import token_ids
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.prefix_file import FORMAT, Prefix, is_prefix, save_prefix
from kvgraph.runtime.sampling import SamplingParams
from kvgraph.runtime.turns import in_turn
from kvgraph.signal_handlers import reraise_if_signalled


@in_turn("write_prefix")
def write_prefix(engine: Engine, prompt: str | Sequence[int], path: str | Path) -> Prefix:
    """Compute `prompt` (text or token ids) on an idle engine, and write its pages to `path`.

    The file is replaced atomically. RequestError: a prompt shorter than a page, a cache that does
    not share pages, or a file at `path` that is not a prefix. GenerationError if the model's
    logits for the prompt are not numbers.
    """
    kv, path = engine.kv, as_path("prefix", path)
    if not (isinstance(kv, PagedKVCacheManager) and kv.params.enable_prefix_caching):
        raise RequestError("prefix: expected a paged cache with prefix caching, got one without")
    tokens = engine.tokenize(prompt) if isinstance(prompt, str) else token_ids(prompt)
    size = kv.params.page_size
    if len(tokens) < size:
        raise RequestError(f"prefix: expected at least a page of {size} tokens, got {len(tokens)}")
    _require_place(path)
    done = engine._generate([tokens], SamplingParams(max_new_tokens=1, ignore_eos=True))[0]
    if done.error:
        raise GenerationError(done.error)
    committed = kv.committed_pages(TextContext("prefix", tokens + done.token_ids))
    tensors: dict[str, Array] = {"tokens": np.array(tokens, np.int32)}
    records = {pools.leaf: pools.record_size for pools in kv.leaf_pools()}
    for leaf, pages in committed.items():  # empty if a window of 1 needs no page of the prompt
        whole = np.concatenate([np.empty(0, np.uint8), *pages.values()])
        tensors[f"pages.{leaf}"] = whole.reshape(-1, records[leaf])
        tensors[f"keys.{leaf}"] = np.frombuffer(b"".join(pages), np.uint8).reshape(-1, KEY_BYTES)
    metadata = {
        "format": FORMAT,
        "identity": kv.identity.hex(),
        "architecture": engine.model.architecture,
        "fingerprint": kv.fingerprint.hex(),
    }
    return save_prefix(path, metadata, tensors)


def _require_place(path: Path) -> None:
    try:
        require_replaceable(path, is_prefix, "an earlier prefix")
    except OSError as error:  # a NUL, or too long a name
        reraise_if_signalled(error)
        raise RequestError(
            f"prefix: expected the path of a file, got {str(path)!r} ({error.strerror})"
        ) from error
