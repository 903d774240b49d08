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
    kv: KVCacheManager,
    rows: Sequence[npt.ArrayLike],
    run: Run,
    *,
    chunk: Chunk,
    last_only: bool = False,
) -> Iterator[tuple[int, int, Logits]]:
    """Yield `(row, first, logits [new, vocab])` of each step and row: logits from token `first` on.

    All rows run together, with at most `chunk` new tokens of each in a step. They are claimed at
    the start and always released at the end. `run`'s logits are valid until its next call.
    `last_only`: steps ask for the logits of each row's last token only, as an engine's steps do.
    """
    contexts = [TextContext(("forward", i), np.asarray(row)) for i, row in enumerate(rows)]
    most = chunks_of(chunk, len(rows))
    claimed: list[TextContext] = []
    try:
        for context in contexts:
            kv.claim(context.request_id)
            claimed.append(context)
        while batch := [context for context in contexts if context.active_length]:
            yield from _step(kv, contexts, batch, run, most, last_only=last_only)
    finally:
        for context in claimed:
            kv.release(context.request_id)


def chunks_of(chunk: Chunk, rows: int) -> Sequence[int]:
    return [chunk] * rows if isinstance(chunk, int) else chunk


def all_logits(
    kv: KVCacheManager,
    rows: Sequence[npt.ArrayLike],
    run: Run,
    *,
    chunk: Chunk,
    last_only: bool = False,
) -> list[Logits]:
    """All logits that `forward` yields, by row: `[len(row), vocab]` each, or `[1, vocab]` if
    `last_only`."""
    found: list[list[Logits]] = [[] for _ in rows]
    for row, _, part_TV in forward(kv, rows, run, chunk=chunk, last_only=last_only):
        found[row].append(part_TV.copy())
    return [np.concatenate(parts) for parts in found]


def _step(
    kv: KVCacheManager,
    contexts: list[TextContext],
    batch: list[TextContext],
    run: Run,
    most: Sequence[int],
    *,
    last_only: bool,
) -> Iterator[tuple[int, int, Logits]]:
    for context in batch:
        context.active_length = min(context.active_length, most[contexts.index(context)])
    kv.alloc_batch([batch])
    lengths = [context.active_length for context in batch]
    ends = np.cumsum(lengths)
    tokens = np.concatenate([context.active_tokens for context in batch])
    asked = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    if last_only:
        is_last = [x.processed_length + x.active_length == x.current_length for x in batch]
        asked = [at[-1:] if last else at[:0] for at, last in zip(asked, is_last, strict=True)]
    indices = np.concatenate(asked).astype(np.int32)
    if not len(indices):  # graphs need at least one row of logits
        indices = np.zeros(1, np.int32)
    inputs = ModelInputs(tokens, np.array([0, *ends], np.int32), indices)
    logits_NV = run(inputs, kv.runtime_inputs([batch]))
    starts = np.cumsum([0, *map(len, asked)])
    for context, first, at in zip(batch, starts, asked, strict=False):
        if len(at):
            skipped = context.active_length - len(at)
            part_NV = logits_NV[first : first + len(at)]
            yield contexts.index(context), context.processed_length + skipped, part_NV
    for context in batch:
        context.update()
    kv.step([batch])
