"""A session and a manager driven by hand: one request at a time, chunk by chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.inputs import KVCacheInputs, ModelInputs
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.requests import TextContext

Logits = npt.NDArray[np.float32]


def inputs_of(contexts: list[TextContext], *, every_token: bool = False) -> ModelInputs:
    """The step's tokens; logits of each row's last token, or of every token."""
    tokens = np.concatenate([c.active_tokens for c in contexts])
    offsets = np.cumsum([0, *(c.active_length for c in contexts)], dtype=np.int32)
    wanted = np.arange(len(tokens), dtype=np.int32) if every_token else offsets[1:] - 1
    return ModelInputs(tokens, offsets, wanted.astype(np.int32))


def run_step(
    session: Any, manager: KVCacheManager, context: TextContext, **options: Any
) -> tuple[Logits, KVCacheInputs]:
    """alloc, run, update and step of one request's active tokens; nothing is generated.

    The logits are the caller's own: a session's last for two steps.
    """
    manager.alloc(context)
    kv = manager.runtime_inputs([[context]])
    logits = session.run(inputs_of([context], **options), kv).copy()
    context.update()
    manager.step([[context]])
    return logits, kv


def prefill(
    session: Any, manager: KVCacheManager, context: TextContext, *, chunk: int | None = None
) -> Logits:
    """Logits of the last token, the first step cut to `chunk` tokens."""
    manager.claim(context.request_id)
    if chunk is not None:
        context.active_length = chunk
        run_step(session, manager, context)
    return run_step(session, manager, context)[0]
