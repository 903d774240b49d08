"""llama.cpp through llama-cpp-python's low-level API: one batch of all rows per step.

The model is a GGUF file from llama.cpp's own tools (`convert_hf_to_gguf.py`, then
`llama-quantize`): `llama.cpp-KIND.gguf` in the folder of --peer-models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a peer's interpreter has no kvgraph
    from kvgraph.contract.plain import JsonObject

NEEDS = {"llama_cpp": "llama-cpp-python"}
UBATCH = 512
"""Tokens of a batch that llama.cpp computes at once: its own default."""

PRECISIONS = ("fp32", "bf16", "int8", "int4")
KINDS = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}


def prepare(job: JsonObject) -> None:
    path = _path(job)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: expected a GGUF file made by llama.cpp's convert_hf_to_gguf.py and "
            "llama-quantize, got none"
        )


def load(job: JsonObject) -> tuple[Any, JsonObject]:
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    path = _path(job)
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"{path}: llama.cpp could not load it")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = sum(job["rows"])
    chunk = max(job["step_tokens"], len(job["rows"]))
    params.n_batch, params.n_ubatch = chunk, min(chunk, UBATCH)
    params.n_seq_max = len(job["rows"])
    params.n_threads = params.n_threads_batch = job["threads"]
    params.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"{path}: llama.cpp could not make a context of {params.n_ctx} tokens")

    def decode(entries: list[tuple[int, int, int, bool]], batch: Any) -> dict[int, int]:
        """Run entries (token, position, row, wants logits); return the likeliest token of each row
        that wants logits."""
        for slot, (token, position, row, wants) in enumerate(entries):
            batch.token[slot], batch.pos[slot] = token, position
            batch.n_seq_id[slot], batch.seq_id[slot][0] = 1, row
            batch.logits[slot] = wants
        batch.n_tokens = len(entries)
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}")
        chosen = {}
        for slot, (_, _, row, wants) in enumerate(entries):
            if wants:
                logits = llama_cpp.llama_get_logits_ith(context, slot)
                chosen[row] = int(np.ctypeslib.as_array(logits, shape=(vocab,)).argmax())
        return chosen

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        # Clear only the cells: zeros over the whole cache are not part of the measured work.
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        batch = llama_cpp.llama_batch_init(chunk, 0, 1)
        entries = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for start in range(0, len(entries), chunk):
            last |= decode(entries[start : start + chunk], batch)
        new = [[last[row]] for row in range(len(prompts))]
        for step in range(new_tokens - 1):
            last = decode(
                [(last[row], len(prompts[row]) + step, row, True) for row in range(len(new))],
                batch,
            )
            for row, ids in enumerate(new):
                ids.append(last[row])
        llama_cpp.llama_batch_free(batch)
        return new

    about = {
        "versions": {"llama-cpp-python": llama_cpp.__version__},
        "settings": f"{KINDS[job['precision']]}, batches of at most {chunk} tokens, unified cache",
        "pool_dtype": "float16",
        "model_bytes": path.stat().st_size,
    }
    return generate, about


def _path(job: JsonObject) -> Path:
    return Path(job["folder"]) / f"llama.cpp-{KINDS[job['precision']]}.gguf"
