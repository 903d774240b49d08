"""`kvgraph plan`: figures from config.json alone, on hardware that is not here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from models import make_model
from safetensors import safe_open

import kvgraph
from kvgraph import ParamsError, UnsupportedError
from kvgraph.compiler.plan import Plan, plan_deployment
from kvgraph.contract.safetensors import read_layout

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"

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


def plan(folder: Path, **change: object) -> Plan:
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


TABLE = 131072 * 128 * 4
"""Cosines and sines of Llama's positions."""


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_llama_8b_on_80_gib(llama_8b: Path) -> None:
    made = plan(llama_8b)
    assert made.weights == 2 * 8_030_261_248 + TABLE
    assert made.weights_dtype == made.dtype == "bfloat16"
    assert made.bytes_per_page == {"": 16_777_216}
    assert made.pages == {"": ((80 << 30) - made.weights) // 16_777_216} == {"": 4158}
    assert made.concurrent_requests == 4158 // 64
    assert made.longest_context == 131072


def test_a_quantised_pool_nearly_doubles_the_pages(llama_8b: Path) -> None:
    assert plan(llama_8b, cache_dtype="int8").bytes_per_page == {"": 8_388_608 + 262_144}


@pytest.mark.parametrize(("name", "tables"), [("gemma2", 1), ("gemma3_text", 2), ("gpt_oss", 1)])
def test_the_weights_are_the_checkpoints_and_rotary_tables(
    model_folder: Callable[[str], Path], name: str, tables: int
) -> None:
    with safe_open(model_folder(name) / "model.safetensors", framework="np") as file:
        stored = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    table = 512 * 16 * 4
    assert plan(model_folder(name), max_seq_len=None).weights == stored + tables * table


def test_positions_of_a_step_s_length_have_no_table(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope |= {"original_max_position_embeddings": 65536}
    weights = {}
    for name, scaling in (("plain", {}), ("longrope", {"rope_parameters": rope})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA_8B | scaling))
        weights[name] = plan(tmp_path / name).weights
    assert weights["plain"] - weights["longrope"] == TABLE


Compiled = Callable[..., Path]


def held_bytes(artifact: Path) -> int:
    """Of weights.safetensors, and of what ONNX keeps in the graph: tensors of up to a KiB, which
    are 1.6 % of so small a model as tiny-llama in int4."""
    held = sum(at.nbytes for at in read_layout(artifact / "weights.safetensors").values())
    if (artifact / "model.onnx").exists():
        graph = onnx.load(artifact / "model.onnx", load_external_data=False).graph
        inline = [x for x in graph.initializer if x.data_location != onnx.TensorProto.EXTERNAL]
        held += sum(onnx.numpy_helper.to_array(x).nbytes for x in inline)
    return held


PACKED = ("bf16", "int8", "int4")


@pytest.mark.parametrize(
    ("backend", "weights"),
    [("onnx", "fp32"), *((backend, w) for backend in ("onnx", "torch") for w in PACKED)],
)
def test_planned_weights_are_what_an_artifact_holds(
    compiled: Compiled, backend: str, weights: str
) -> None:
    out = compiled("tiny-llama", backend, **({"weights": weights} if weights in PACKED else {}))
    made = plan(TINY_LLAMA, target="cpu", weights=weights, max_seq_len=None)
    assert made.weights == pytest.approx(held_bytes(out), rel=0.002)
    assert made.weights_dtype == kvgraph.load(out).manifest.weights == weights


def test_a_target_without_weights_asked_for_plans_its_default(tmp_path: Path) -> None:
    """ONNX on cpu computes in float32, so the pool is float32 too, whatever is stored."""
    half = make_model("llama", tmp_path / "half", dtype="bfloat16")
    for dtype, weights in ((None, "bf16"), ("float32", "fp32"), ("float16", "fp32")):
        made = plan(half, target="cpu", dtype=dtype, max_seq_len=None)
        manifest = kvgraph.compile(half, tmp_path / weights, dtype=dtype, force=True)
        assert made.weights_dtype == manifest.weights == weights
        assert made.dtype == manifest.dtype == "float32"
        assert made.cache_dtype == manifest.layout["dtype"]


def test_linear_layers_with_biases_and_odd_widths(tmp_path: Path) -> None:
    """Panels are padded to 16 columns and 64 inputs; q, k and v have float32 biases."""
    folder = make_model("qwen2", tmp_path / "odd", hidden_size=72, head_dim=18, num_hidden_layers=1)
    kvgraph.compile(folder, tmp_path / "a.kvg", weights="int4")
    made = plan(folder, target="cpu", weights="int4", max_seq_len=None)
    equal_norms = 2 * 72 * 4  # ONNX keeps one of three
    assert made.weights == pytest.approx(held_bytes(tmp_path / "a.kvg") + equal_norms, rel=0.001)


REFUSED: dict[str, dict[str, str]] = {
    "unknown": {"weights": "int2", "target": "cpu"},
    "on a GPU": {"weights": "int8", "target": "cuda:sm_90"},
    "of bfloat16 activations": {"weights": "int4", "target": "cpu", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_are_refused_as_a_compile_refuses_them(
    case: str, llama_8b: Path, tmp_path: Path
) -> None:
    sentences = []
    for attempt in (
        lambda: plan(llama_8b, **REFUSED[case]),
        lambda: kvgraph.compile(llama_8b, tmp_path / "a", **REFUSED[case]),  # type: ignore[arg-type]
    ):
        with pytest.raises(UnsupportedError) as raised:
            attempt()
        sentences.append(str(raised.value))
    assert sentences[0] == sentences[1]


def test_memory_below_the_weights_or_below_one_page(llama_8b: Path) -> None:
    with pytest.raises(ParamsError, match=r"more than the 16127631360 bytes of weights, got 1$"):
        plan(llama_8b, memory=1)
    with pytest.raises(ParamsError, match=r"at least one page of 16777216 bytes, got 4 bytes"):
        plan(llama_8b, memory=16_127_631_364)


def test_sliding_layers_are_planned_for_their_windows(model_folder: Callable[[str], Path]) -> None:
    """gemma2 here: window 24 of 512 tokens, so with page 16 a request holds 4 of its 32 pages."""
    made = plan(
        model_folder("gemma2"), page_size=16, max_seq_len=512, max_batch_size=8, memory=64 << 20
    )
    assert made.pages == {"sliding": 8 * 4 + 2048 // 16, "full": 8 * 32}
    assert made.concurrent_requests == 8


def test_lengths_beyond_the_model_are_refused(llama_8b: Path) -> None:
    for length in (0, 131073):
        message = rf"max_seq_len: expected 1 to 131072 from the model, got {length}"
        with pytest.raises(ParamsError, match=message):
            plan(llama_8b, max_seq_len=length)
