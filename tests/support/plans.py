"""Plans of checkpoints that are not read."""

from __future__ import annotations

from pathlib import Path

from kvgraph.compiler.plan import DeploymentPlan, plan_deployment

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def plan(folder: Path, **change: object) -> DeploymentPlan:
    settings = {
        "target": "cuda:sm_90",
        "memory": 80 << 30,
        "max_seq_len": 8192,
        "max_batch_size": 256,
        "dtype": None,
        "cache_dtype": None,
        "page_size": 128,
    }
    return plan_deployment(folder, **settings | change)  # type: ignore[arg-type]
