"""Run given tokens through a graph, chunk by chunk, with logits of every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvgraph.contract.inputs import KVCacheInputs, ModelInputs
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.requests import TextContext

Logits = npt.NDArray[np.float32]
Run = Callable[[ModelInputs, KVCacheInputs], Logits]


Chunk = int | Sequence[int]
"""Most new tokens of a row in a step: one number for each row, or one number for all."""


def forward(
    kv: KVCacheManager, rows: Sequence[npt.ArrayLike], run: Run, *, chunk: Chunk
) -> Iterator[tuple[int, int, Logits]]:
    """Yield `(row, first, logits [new, vocab])` of each step and row: logits from token `first` on.

    All rows run together, with at most `chunk` new tokens of each in a step. They are claimed at
    the start and always released at the end. `run`'s logits are valid until its next call.
    """
    contexts = [TextContext(("forward", i), np.asarray(row)) for i, row in enumerate(rows)]
    most = chunks_of(chunk, len(rows))
    claimed: list[TextContext] = []
    try:
        for context in contexts:
            kv.claim(context.request_id)
            claimed.append(context)
        while batch := [context for context in contexts if context.active_length]:
            yield from _step(kv, contexts, batch, run, most)
    finally:
        for context in claimed:
            kv.release(context.request_id)


def chunks_of(chunk: Chunk, rows: int) -> Sequence[int]:
    return [chunk] * rows if isinstance(chunk, int) else chunk


def all_logits(
    kv: KVCacheManager, rows: Sequence[npt.ArrayLike], run: Run, *, chunk: Chunk
) -> list[Logits]:
    """Logits of every token that `forward` yields, by row: `[len(row), vocab]` each."""
    found: list[list[Logits]] = [[] for _ in rows]
    for row, _, part_TV in forward(kv, rows, run, chunk=chunk):
        found[row].append(part_TV.copy())
    return [np.concatenate(parts) for parts in found]


def _step(
    kv: KVCacheManager,
    contexts: list[TextContext],
    batch: list[TextContext],
    run: Run,
    most: Sequence[int],
) -> Iterator[tuple[int, int, Logits]]:
    for context in batch:
        context.active_length = min(context.active_length, most[contexts.index(context)])
    kv.alloc_batch([batch])
    lengths = [context.active_length for context in batch]
    ends = np.cumsum(lengths)
    tokens = np.concatenate([context.active_tokens for context in batch])
    inputs = ModelInputs(
        tokens, np.array([0, *ends], np.int32), np.arange(len(tokens), dtype=np.int32)
    )
    logits_TV = run(inputs, kv.runtime_inputs([batch]))
    for context, part_TV in zip(batch, np.split(logits_TV, ends[:-1]), strict=True):
        yield contexts.index(context), context.processed_length, part_TV
    for context in batch:
        context.update()
    kv.step([batch])
