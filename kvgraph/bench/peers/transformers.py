"""transformers' own `generate` with its dynamic cache and torch's SDPA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a peer's interpreter has no kvgraph
    from kvgraph.contract.plain import JsonObject

NEEDS = {"transformers": "transformers", "torch": "torch"}
PRECISIONS = ("fp32", "bf16")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def load(job: JsonObject) -> tuple[Any, JsonObject]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(job["threads"])
    dtype = DTYPES[job["precision"]]
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Generate greedily; rows of different lengths are padded and masked on the left."""
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
        )
        with torch.inference_mode():
            done = model.generate(ids, attention_mask=mask, generation_config=config)
        new: list[list[int]] = done[:, length:].tolist()
        return new

    about = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "settings": "generate, dynamic cache, sdpa",
        "pool_dtype": dtype,
    }
    return generate, about
