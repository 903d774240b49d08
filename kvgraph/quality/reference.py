"""Score a text with a checkpoint, in float32 by transformers' own attention and experts.

It shares the reading of weights with compile, but no operator. If the checkpoint allows it, weights
are in memory one module at a time. Each run reads all weights, so several windows of one length run
together, if their logits are not too large.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from kvgraph.progress import task
from kvgraph.quality.scores import Scores, joined, score
from kvgraph.quality.text import Windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOWS_AT_ONCE = 4
LOGITS_BYTES = 5 << 28
"""Most bytes of logits of several windows that run together: 1.25 GiB."""


def windows_at_once(length: int, vocab_size: int) -> int:
    """Number of windows of `length` tokens that run together."""
    of_window = 4 * length * vocab_size
    return max(1, min(WINDOWS_AT_ONCE, LOGITS_BYTES // of_window))


def score_reference(source: Path, windows: Windows, max_seq_len: int | None = None) -> Scores:
    """Scores of the checkpoint in float32, with rotary frequencies for contexts of `max_seq_len`.

    All memory is freed before the return. It waits while another thread compiles.
    """
    from kvgraph.compiler.alone import alone

    with alone():
        return _scores(source, windows, max_seq_len)


def _scores(source: Path, windows: Windows, max_seq_len: int | None) -> Scores:
    import torch

    from kvgraph.compiler.check.reference import eager
    from kvgraph.compiler.frontends import huggingface
    from kvgraph.compiler.streamed import with_values

    loaded = huggingface.load(source, "float32", max_seq_len=max_seq_len, weightless=True)
    model = cast("PreTrainedModel", loaded.module.model)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    parts = []
    total = sum(map(len, windows)) - len(windows)
    with (
        torch.inference_mode(),
        eager(model),
        with_values(loaded),
        task("scoring", total, "tokens") as advance,
    ):
        for length, group in groupby(windows, len):
            equal, count = list(group), windows_at_once(length, loaded.vocab_size)
            for first in range(0, len(equal), count):
                some = np.stack(equal[first : first + count]).astype(np.int64)
                ids = torch.from_numpy(some[:, :-1])
                logits_BNV = model(input_ids=ids, use_cache=False).logits.numpy()
                for logits_NV, window in zip(logits_BNV, some, strict=True):
                    parts.append(score(logits_NV, window[1:]))
                    advance(len(logits_NV))
    return joined(parts)
