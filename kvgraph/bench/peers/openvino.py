"""OpenVINO GenAI: ContinuousBatchingPipeline on the CPU; optimum-cli exports the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a peer's interpreter has no kvgraph
    from kvgraph.contract.plain import JsonObject

NEEDS = {
    "openvino_genai": "openvino-genai",
    "openvino": "openvino",
    "optimum.intel": "'optimum-intel[openvino]'",
    "nncf": "nncf",
}
PRECISIONS = ("fp32", "bf16", "int8", "int4")
PREFIX_CACHING = True
WEIGHTS = {"fp32": "fp32", "bf16": "fp32", "int8": "int8", "int4": "int4"}
"""Values of --weight-format; for bf16 the precision hint converts float32 weights at load."""
GIB = 1 << 30


def prepare(job: JsonObject) -> tuple[Path, str, list[str]]:
    """Folder, tool and command of the checkpoint's export, which the worker runs."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    command += ["-m", job["model"], "--task", "text-generation-with-past"]
    command += ["--weight-format", WEIGHTS[job["precision"]]]
    return _folder(job), "optimum-cli export", command


def load(job: JsonObject) -> tuple[Any, JsonObject]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    hint = "f32" if job["precision"] == "fp32" else "bf16"
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = job["cache_bytes"] * 5 // 4 // GIB + 1
    scheduler.max_num_batched_tokens = max(job["step_tokens"], len(job["rows"]))
    scheduler.max_num_seqs = len(job["rows"])
    scheduler.enable_prefix_caching = job["prefix_caching"]
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_PRECISION_HINT": hint,
        "INFERENCE_NUM_THREADS": job["threads"],
    }
    pipeline = genai.ContinuousBatchingPipeline(str(_folder(job)), scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.eos_token_id, config.do_sample = True, -1, False
        rows = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        done = pipeline.generate(rows, [config] * len(rows))
        return [list(each.m_generation_ids[0]) for each in done]

    about = {
        "versions": {"openvino-genai": genai.__version__},
        "settings": f"ContinuousBatchingPipeline, {hint} compute",
        "pool_dtype": _default_pool_dtype(ov),
        "model_bytes": sum(path.stat().st_size for path in _folder(job).rglob("*.bin")),
    }
    return generate, about


def _default_pool_dtype(ov: Any) -> str:
    try:
        found = ov.Core().get_property("CPU", "KV_CACHE_PRECISION")
        return str(getattr(found, "get_type_name", lambda: found)())
    except RuntimeError:
        return "default"


def _folder(job: JsonObject) -> Path:
    return Path(job["folder"]) / f"openvino-{WEIGHTS[job['precision']]}"
