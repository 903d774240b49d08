"""Compiled hosts end to end: their driver executes the PTX of every launch, on a CPU.

Attention runs by the launcher, by TensorRT's plugin or by ONNX Runtime's op; norms and gates by the
launcher; linear layers by torch. Tokens are those of transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")
torch = pytest.importorskip("torch", reason="runs the linear layers")

from tests.executed.artifacts import with_ptx  # noqa: E402
from tests.plugins.hosts import Host, build  # noqa: E402
from tests.support.artifacts import TINY_LLAMA, made  # noqa: E402
from tests.support.models import make_model  # noqa: E402
from tests.support.small_weights import round_weights  # noqa: E402

PROMPTS = [[5, 9, 100, 23, 77, 31, 8], [3 + i % 150 for i in range(90)]]
ENGINE = {"num_pages": 32, "max_batch_size": 2, "max_batch_tokens": 128}
NEW_TOKENS = 16
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}

Generate = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Host]:
    """The launcher needs the driver alone, which is the same with every host."""
    names = ("tensorrt", "onnxruntime")
    found = {name: build(name, tmp_path_factory.mktemp(name)) for name in names}
    return {**found, "launcher": found["tensorrt"]}


@pytest.fixture
def generate(hosts: dict[str, Host], tmp_path: Path) -> Generate:
    """`generate(host, folder, sm, **request)` -> a list of runs."""

    def run(host: str, folder: Path, sm: int, **request: Any) -> list[dict[str, Any]]:
        path = tmp_path / "request.json"
        kernels = str(folder / "artifact" / "kernels")
        settings = {
            "host": host, "kernels": kernels, "records": kernels, "prompts": PROMPTS,
            "new_tokens": NEW_TOKENS, "engine": ENGINE, "changes": [],
        }  # fmt: skip
        path.write_text(json.dumps(settings | request))
        module = ("-m", "tests.executed.process", str(folder), str(path))
        printed = hosts[host].run(*module, driver=True, sm=sm, timeout=600)
        found: list[dict[str, Any]] = json.loads(printed)
        return found

    return run


def narrow() -> Path:
    return with_ptx(TINY_LLAMA, "sm_80", dtype="float32")


def wide_model() -> Path:
    return made({"name": "llama-128", **WIDE}, lambda out: make_model("llama", out, **WIDE))


def mixture() -> Path:
    return made({"name": "mixture", **MIXTURE}, lambda out: make_model("qwen3_moe", out, **MIXTURE))


def eager(folder: Path, dtype: torch.dtype) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return [
        model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def hosts_of(*quick: str) -> list[Any]:
    """All hosts; those that are not `quick` run with the slow tests."""
    return [
        host if host in quick else pytest.param(host, marks=pytest.mark.slow)
        for host in ("launcher", "tensorrt", "onnxruntime")
    ]


@pytest.mark.parametrize("host", hosts_of("onnxruntime"))
def test_tokens_equal_transformers(generate: Generate, host: str) -> None:
    [found] = generate(host, narrow(), 80)
    assert found["tokens"] == eager(TINY_LLAMA, torch.float32)
    kernels = {"store_kv", "paged_attention", "merge_parts", "rms_norm", "silu_mul"}
    assert found["launched"].keys() == kernels


@pytest.mark.parametrize("host", hosts_of("launcher", "tensorrt"))
def test_tokens_of_wide_heads_equal_transformers(generate: Generate, host: str) -> None:
    """Heads of 128 on Hopper: prefill multiplies by whole warpgroups."""
    [found] = generate(host, with_ptx(wide_model(), "sm_90", dtype="float16"), 90)
    assert found["tokens"] == eager(wide_model(), torch.float16)
    assert found["executed"]["warpgroup"] > 0


EXPERTS = {"route", "sort_slots", "place_tiles", "experts_up", "experts_down", "sum_experts"}


def test_tokens_of_experts_equal_transformers(generate: Generate) -> None:
    """Slots are chosen, sorted, multiplied and summed by what the launcher enqueues."""
    [found] = generate("launcher", with_ptx(mixture(), "sm_80", dtype="float16"), 80)
    assert found["tokens"] == eager(mixture(), torch.float16)
    assert {found["launched"][name] for name in EXPERTS} == {found["launched"]["sort_slots"]}


def test_small_weights_give_the_best_tokens_of_what_they_stand_for(generate: Generate) -> None:
    """Linear layers and experts in int4 on Hopper, by whole warpgroups: every token is one that
    transformers finds best over the rounded weights in float32, or nearly so."""
    from transformers import AutoModelForCausalLM

    folder = with_ptx(mixture(), "sm_90", dtype="float16", weights="int4")
    [found] = generate("launcher", folder, 90)
    assert found["launched"].keys() >= EXPERTS | {"quantized_linear"}
    assert found["executed"]["warpgroup"] > 0
    model = AutoModelForCausalLM.from_pretrained(mixture(), dtype=torch.float32)
    round_weights(model, 4)
    for prompt, tokens in zip(PROMPTS, found["tokens"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        behind = (logits.max(1).values - chosen) / logits.abs().max(1).values
        assert behind.max() <= 0.02


# ---- what does not fit


OUTSIDE = "inside of a buffer"
CHANGES = {
    ("grid", "rms_norm"): "no block wrote",
    ("grid", "silu_mul"): "no block wrote",
    ("grid", "paged_attention"): OUTSIDE,
    ("grid", "merge_parts"): "no block wrote",
    ("scratch", ""): OUTSIDE,
    ("arguments", "store_kv"): OUTSIDE,
    ("arguments", "paged_attention"): OUTSIDE,
    ("arguments", "merge_parts"): OUTSIDE,
}


def test_a_plan_that_does_not_fit_fails(generate: Generate) -> None:
    runs = generate("launcher", narrow(), 80, changes=list(CHANGES), new_tokens=2)
    for change, said, found in zip(CHANGES, CHANGES.values(), runs, strict=True):
        assert "refused" in found, change
        assert said in found["refused"][1], change


def halved(entry: dict[str, Any]) -> None:
    entry["shared"] //= 2


def exchanged(entry: dict[str, Any]) -> None:
    first, second, *others = entry["parameters"]
    entry["parameters"] = [second, first, *others]


@pytest.mark.parametrize(
    ("host", "change", "said"),
    [
        ("launcher", halved, "shared"),
        pytest.param("tensorrt", halved, "shared", marks=pytest.mark.slow),
        pytest.param("onnxruntime", halved, "shared", marks=pytest.mark.slow),
        ("tensorrt", exchanged, OUTSIDE),
        pytest.param("onnxruntime", exchanged, OUTSIDE, marks=pytest.mark.slow),
    ],
)
def test_a_record_that_does_not_fit_fails(
    generate: Generate,
    tmp_path: Path,
    host: str,
    change: Callable[[dict[str, Any]], None],
    said: str,
) -> None:
    """It says less shared memory than attention was compiled with, or another order.

    The launcher compares the order with this version's when it loads a kernel; plugins do not.
    """
    kernels = tmp_path / "kernels"
    shutil.copytree(narrow() / "artifact" / "kernels", kernels)
    path = kernels / "sm_80" / "kernels.json"
    entries = json.loads(path.read_text())
    for entry in entries:
        if entry["kernel"] == "paged_attention":
            change(entry)
    path.write_text(json.dumps(entries))
    given = {"kernels" if host == "launcher" else "records": str(kernels)}
    [found] = generate(host, narrow(), 80, **given, new_tokens=1)
    kind, sentence = found["refused"]
    assert kind == "KernelFaultError"
    assert "paged_attention" in sentence
    assert said in sentence
