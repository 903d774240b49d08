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

import kvgraph
from kvgraph import Engine, SamplingParams
from kvgraph.compiler.check.compare import ROUNDED
from kvgraph.contract.devices import LogicalDevice
from kvgraph.contract.dtypes import WEIGHT_BITS
from kvgraph.contract.inputs import Buffer
from tests.support import carried, quantized
from tests.support.models import LATENT, make_model

triton = pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")
torch = pytest.importorskip("torch", reason="runs the program")

from kvgraph.runtime.sessions.cuda_pages import PageCopies  # noqa: E402
from tests.support.small_weights import round_weights  # noqa: E402

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 9, 100, 23, 77, 31, 8], [1], list(range(3, 40))]
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 1,
}
FUSIONS = ("fuse_rms_norm", "fuse_silu_mul")
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


def eager(
    folder: Path, prompts: Sequence[Sequence[int]], new_tokens: int, bits: int = 0
) -> list[list[int]]:
    """What transformers generates, one prompt at a time, without a cache of ours; with the numbers
    that weights of `bits` stand for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if bits:
        round_weights(model, bits)
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
def test_experts_equal_eager(tmp_path: Path) -> None:
    """One layer with experts, of which each row's are chosen, sorted, multiplied and summed on the
    device; decode steps are captured as all others."""
    folder = make_model("qwen3_moe", tmp_path / "model", **MIXTURE)
    kvgraph.compile(
        folder, tmp_path / "out", target="cuda:sm_90", dtype="float32", page_size=16, check=False
    )
    found = interpreted(tmp_path / "out", tmp_path, prompts=PROMPTS, new_tokens=3)
    assert found["tokens"] == eager(folder, PROMPTS, 3)
    assert found["captures"] >= 1
    assert set(found["launched"]) >= {
        "route-",
        "sort_slots-",
        "place_tiles-",
        "experts_up-few",
        "experts_down-few",
        "sum_experts-",
    }


@old_interpreter
@pytest.mark.parametrize(
    ("architecture", "weights", "launched"),
    [("llama", "int8", set()), ("qwen3_moe", "int4", {"experts_up-few", "experts_down-few"})],
)
def test_small_weights_equal_eager_over_what_they_stand_for(
    tmp_path: Path, architecture: str, weights: str, launched: set[str]
) -> None:
    given = MIXTURE if launched else {"num_hidden_layers": 1}
    folder = make_model(architecture, tmp_path / "model", **given)
    kvgraph.compile(
        folder,
        tmp_path / "out",
        target="cuda:sm_90",
        dtype="float32",
        weights=weights,
        page_size=16,
        check=False,
    )
    found = interpreted(tmp_path / "out", tmp_path, prompts=PROMPTS, new_tokens=3)
    assert found["tokens"] == eager(folder, PROMPTS, 3, WEIGHT_BITS[weights])
    small = {"quantized_linear-few", "quantized_linear-many"}
    assert set(found["launched"]) >= launched | small


@old_interpreter
def test_weights_as_they_are_stored_equal_eager_over_what_they_stand_for(tmp_path: Path) -> None:
    """Nibbles with zero points, FP8 and int8, in one checkpoint."""
    plain = make_model("llama", tmp_path / "plain", num_hidden_layers=1)
    folder, meant = tmp_path / "w4a16-zero-points", tmp_path / "meant-w4a16-zero-points"
    others = {"fp8-channel": "self_attn.o_proj.", "w8a8": "mlp.down_proj."}
    for form in (folder.name, *others):
        quantized.make(form, plain, tmp_path / form, tmp_path / f"meant-{form}")
    for form, name in others.items():
        quantized.mixed(folder, tmp_path / form, f"model.layers.0.{name}")
        quantized.mixed(meant, tmp_path / f"meant-{form}", f"model.layers.0.{name}")
        quantized.add_group(folder, form, name)
    require_stored_equal_eager(folder, meant, tmp_path)


@old_interpreter
@pytest.mark.slow
def test_experts_as_they_are_stored_equal_eager_over_what_they_stand_for(tmp_path: Path) -> None:
    few = {"num_hidden_layers": 1, "num_local_experts": 4}
    plain, meant = make_model("gpt_oss", tmp_path / "plain", **few), tmp_path / "meant"
    folder = quantized.make("mxfp4", plain, tmp_path / "small", meant)
    require_stored_equal_eager(folder, meant, tmp_path, kernel="experts_up")


def require_stored_equal_eager(
    folder: Path, meant: Path, tmp_path: Path, kernel: str = "quantized_linear"
) -> None:
    out, target = tmp_path / "out", "cuda:sm_90"
    manifest = kvgraph.compile(
        folder, out, target=target, dtype="float32", page_size=16, check=False
    )
    assert manifest.weights == "stored"
    assert not any("rounded" in note for note in manifest.notes)
    found = interpreted(out, tmp_path, prompts=PROMPTS, new_tokens=3)
    assert found["tokens"] == eager(meant, PROMPTS, 3)
    assert f"{kernel}-few" in found["launched"]


@old_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "given", "op"),
    [
        ("phi3", {"num_hidden_layers": 1}, "kvgraph.silu_mul"),
        ("deepseek_v3", LATENT | {"num_hidden_layers": 1}, "kvgraph.rms_norm"),
    ],
)
def test_rows_that_are_parts_of_larger_ones(
    tmp_path: Path, architecture: str, given: dict[str, Any], op: str
) -> None:
    """Gate and up of one projection; the latent of keys and values, next to its rotary part."""
    folder = make_model(architecture, tmp_path / "model", **given)
    manifest = kvgraph.compile(
        folder, tmp_path / "out", target="cuda:sm_90", dtype="float32", page_size=16
    )
    notes = [each for one in manifest.passes for each in one.unmatched if one.name in FUSIONS]
    assert [note for note in notes if "without the sum" not in note] == []
    assert manifest.ops[op] == (1 if op == "kvgraph.silu_mul" else 5)
    found = interpreted(tmp_path / "out", tmp_path, prompts=PROMPTS, new_tokens=3)
    assert found["tokens"] == eager(folder, PROMPTS, 3)


@old_interpreter
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
    engine = engine_on_a_gpu(compiled, model, "float32")
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    found = [c.token_ids for c in engine.generate(PROMPTS, sampling)]
    assert found == eager(model_folder(model), PROMPTS, 24)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny-llama", "gemma2", "qwen3", "gpt_oss"])
def test_half_on_a_gpu(
    compiled: Callable[..., Path], model_folder: Callable[[str], Path], model: str, dtype: str
) -> None:
    """Kernels of tensor cores, through graphs that were captured: every token is one that
    transformers in float32 finds best, or within the dtype's rounding of the best."""
    require_near_best(engine_on_a_gpu(compiled, model, dtype), model_folder(model), dtype)


def engine_on_a_gpu(compiled: Callable[..., Path], model: str, dtype: str) -> Engine:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    major, minor = torch.cuda.get_device_capability()
    artifact = compiled(model, None, target=f"cuda:sm_{major}{minor}", dtype=dtype)
    return Engine(artifact, **ENGINE)  # type: ignore[arg-type]


def require_near_best(engine: Engine, folder: Path, dtype: str) -> None:
    """Or within what the dtype makes of this model in transformers, where it changes experts."""
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    found = [done.token_ids for done in engine.generate(PROMPTS, sampling)]
    behind, own = carried.rounding(
        carried.load(folder), carried.load(folder, dtype), PROMPTS, found
    )
    assert behind <= max(ROUNDED[dtype].error, own), found


def test_what_near_best_says(
    compiled: Callable[..., Path], model_folder: Callable[[str], Path]
) -> None:
    """The measure of the test above, on a CPU: it holds for the model, not for another one."""
    engine = Engine(compiled("tiny-llama"), num_pages=32)
    require_near_best(engine, model_folder("tiny-llama"), "float32")
    other = Engine(compiled("qwen3"), num_pages=32)
    with pytest.raises(AssertionError):
        require_near_best(other, model_folder("gemma2"), "bfloat16")
