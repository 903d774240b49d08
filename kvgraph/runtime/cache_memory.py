"""Default size of a cache: 1 GiB of host memory at most, or most of a device's free memory.

A device is assumed to serve this engine alone. Its cache takes DEVICE_CACHE_SHARE of the memory
that the weights and the largest step leave free. To measure this, the largest step is run once,
on a temporary pool. Host memory is shared with other processes, and only touched as pages are used.
Prefix caching uses all pages in time: a small machine or container must not run out of memory then.
"""

from __future__ import annotations

import numpy as np

from kvgraph.contract.inputs import ModelInputs
from kvgraph.contract.params import KVCacheParamInterface
from kvgraph.errors import CapacityError
from kvgraph.kv.memory import DEVICE_CACHE_SHARE, most_pages
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.progress import task
from kvgraph.runtime.machine import memory
from kvgraph.runtime.sessions.base import Session

HOST_BYTES = 1 << 30
HOST_SHARE = 4
"""A pool takes at most one part in so many of the memory of the machine or container."""


def default_bytes(
    params: KVCacheParamInterface, session: Session, tokens: int, logits: int, longest: int
) -> int:
    """Bytes of a pool on the session's device; its steps have at most `tokens` new tokens and
    `logits` rows of logits, its requests `longest` tokens. CapacityError: such a step does not fit.
    """
    free = session.free_memory()
    if free is None:
        return min(HOST_BYTES, memory() // HOST_SHARE)
    try:
        with task("measuring the largest step", tokens, "tokens") as advance:
            _run_largest_step(params, session, tokens, logits, longest)
            advance(tokens)
    except CapacityError as error:
        raise CapacityError(
            f"the largest step: expected memory for {tokens} new tokens and {logits} rows of "
            f"logits in {free} bytes that are free beside the weights, got too little ({error}); "
            "give a smaller max_batch_tokens or max_batch_size"
        ) from error
    return int((session.free_memory() or 0) * DEVICE_CACHE_SHARE)


def _run_largest_step(
    params: KVCacheParamInterface, session: Session, tokens: int, logits: int, longest: int
) -> None:
    """Run a step of `tokens` prompt tokens, so that the session allocates its step memory."""
    length = min(tokens, longest)
    prompts = [
        TextContext(("largest step", start), [0] * min(length, tokens - start))
        for start in range(0, tokens, length)
    ]
    leaves = params.leaves.items()
    pages = {path: len(prompts) * most_pages(leaf, length, length) for path, leaf in leaves}
    kv = PagedKVCacheManager(
        params, session, pages, max_batch_size=len(prompts), max_seq_len=longest
    )
    for prompt in prompts:
        kv.claim(prompt.request_id)
        kv.alloc(prompt)
    offsets = np.array([*range(0, tokens, length), tokens], np.int32)
    inputs = ModelInputs(np.zeros(tokens, np.int32), offsets, np.zeros(logits, np.int32))
    session.run(inputs, kv.runtime_inputs([prompts]))
    kv.close()
