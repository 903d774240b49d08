"""The checkpoint's scores of a text, in float32 by transformers' own attention.

It shares no code with what was compiled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvgraph.errors import ModelError
from kvgraph.progress import task
from kvgraph.quality.scores import Scores, joined, score
from kvgraph.quality.text import Windows


def score_reference(source: Path, windows: Windows) -> Scores:
    """The checkpoint's scores in float32. It is in memory only until this returns."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{source}: cannot read the weights: {first}") from error
    parts = []
    total = sum(map(len, windows)) - len(windows)
    with torch.inference_mode(), task("scoring", total, "tokens") as advance:
        for window in windows:
            ids = torch.from_numpy(window[:-1].astype(np.int64))[None]
            logits_NV = model(input_ids=ids, use_cache=False).logits[0].numpy()
            parts.append(score(logits_NV, window[1:]))
            advance(len(logits_NV))
    return joined(parts)
