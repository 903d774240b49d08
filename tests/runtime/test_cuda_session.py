"""The session on CUDA: on Triton's interpreter everywhere, and for real where a GPU is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgraph import Engine, SamplingParams
from kvgraph.contract.devices import LogicalDevice
from kvgraph.contract.inputs import Buffer

triton = pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")
torch = pytest.importorskip("torch", reason="runs the program")

from kvgraph.runtime.sessions.cuda_pages import PageCopies  # noqa: E402

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 9, 100, 23, 77, 31, 8], [1], list(range(3, 40))]
ENGINE = {"num_pages": 32, "max_batch_size": 6, "max_batch_tokens": 24}

old_interpreter = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4),
    reason="the interpreter of this Triton fails on NumPy 2.4 and later",
)


def interpreted(artifact: Path, tmp_path: Path, **request: Any) -> dict[str, Any]:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"engine": ENGINE, **request}))
    command = [sys.executable, "-m", "tests.runtime.interpreted", str(artifact), str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing of the libraries reaches the screen
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def eager(folder: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """What transformers generates, one prompt at a time, without a cache of ours."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # as `ignore_eos`
    return [
        model.generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=new_tokens,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@old_interpreter
def test_tokens_equal_eager(
    compiled: Callable[..., Path], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Chunked prefill, mixed steps, and decode steps that are captured once and replayed."""
    artifact = compiled("tiny-llama", None, target="cuda:sm_90", dtype="float32")
    found = interpreted(artifact, tmp_path, prompts=PROMPTS, new_tokens=6)
    assert found["tokens"] == eager(model_folder("tiny-llama"), PROMPTS, 6)
    assert 1 <= found["captures"] <= 3
    assert found["replays"] >= 4
    assert found["two_steps"]
    assert set(found["launched"]) >= {
        "store_kv-",
        "paged_attention-prefill",
        "paged_attention-decode_split",
        "merge_parts-",
        "rms_norm-",
        "silu_mul-",
    }


@old_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma2", "qwen3", "gpt_oss"])
def test_other_architectures_equal_eager(
    compiled: Callable[..., Path], model_folder: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    """Two pools with windows and a softcap; norms of heads; sinks and experts."""
    artifact = compiled(model, None, target="cuda:sm_90", dtype="float32")
    found = interpreted(artifact, tmp_path, prompts=PROMPTS, new_tokens=6)
    assert found["tokens"] == eager(model_folder(model), PROMPTS, 6)


def test_pages_are_copied_as_bytes() -> None:
    """bfloat16 has no NumPy type of its own; pages that are not named stay as they are."""
    pool = torch.randn(5, 2, 1, 4, 2, 8).to(torch.bfloat16)
    before = pool.clone()
    buffer = Buffer("bfloat16", tuple(pool.shape), LogicalDevice("cuda"), pool)
    copies = PageCopies(torch.device("cpu"))
    rows = copies.pinned(2 * pool[0].nbytes).reshape(2, -1)
    copies.out(buffer, [3, 1], rows)
    assert rows[0].tobytes() == pool[3].view(torch.uint8).numpy().tobytes()
    pool[3] = pool[1] = torch.nan
    copies.into(buffer, [1, 3], rows[::-1])
    assert torch.equal(pool, before)


@pytest.mark.cuda
@pytest.mark.parametrize("model", ["tiny-llama", "gemma2", "qwen3", "gpt_oss"])
def test_on_a_gpu(
    compiled: Callable[..., Path], model_folder: Callable[[str], Path], model: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    major, minor = torch.cuda.get_device_capability()
    artifact = compiled(model, None, target=f"cuda:sm_{major}{minor}", dtype="float32")
    engine = Engine(artifact, **ENGINE)  # type: ignore[arg-type]
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    found = [c.token_ids for c in engine.generate(PROMPTS, sampling)]
    assert found == eager(model_folder(model), PROMPTS, 24)
