"""onnxruntime-genai: a Generator over a static batch; its own builder converts the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a peer's interpreter has no kvgraph
    from kvgraph.contract.plain import JsonObject

NEEDS = {
    "onnxruntime_genai": "onnxruntime-genai",
    "onnx_ir": "onnx-ir",
    "torch": "torch",
    "transformers": "transformers",
}
PRECISIONS = ("fp32", "int4")


def prepare(job: JsonObject) -> tuple[Path, str, list[str]]:
    """Folder, tool and command of the builder, which the worker runs."""
    folder = _folder(job)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", job["model"], "-p", job["precision"], "-e", "cpu"]
    command += ["-c", str(folder.with_name("onnxruntime-genai-cache")), "-o"]
    return folder, "onnxruntime_genai builder", command


def load(job: JsonObject) -> tuple[Any, JsonObject]:
    import numpy as np
    import onnxruntime_genai as genai

    folder = _folder(job)
    _set_threads(folder / "genai_config.json", job["threads"])
    model = genai.Model(str(folder))

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        length = len(prompts[0])
        if any(len(prompt) != length for prompt in prompts):
            raise NotImplementedError("a Generator takes rows of one length only")
        params = genai.GeneratorParams(model)
        total = length + new_tokens
        params.set_search_options(
            max_length=total, min_length=total, batch_size=len(prompts), do_sample=False
        )
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(new_tokens):
            generator.generate_next_token()
        return [list(generator.get_sequence(row))[length:] for row in range(len(prompts))]

    about = {
        "versions": {"onnxruntime-genai": genai.__version__},
        "settings": "Generator, static batch",
        "pool_dtype": "float32",
        "model_bytes": sum(path.stat().st_size for path in folder.glob("*.onnx*")),
    }
    return generate, about


def _set_threads(path: Path, threads: int) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    options = config["model"]["decoder"]["session_options"]
    options |= {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")


def _folder(job: JsonObject) -> Path:
    return Path(job["folder"]) / f"onnxruntime-genai-{job['precision']}"
