"""`kvgraph plan`: figures from config.json alone, on hardware that is not here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from kvgraph import ParamsError
from kvgraph.compiler.plan import Plan, plan_deployment

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


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_llama_8b_on_80_gib(llama_8b: Path) -> None:
    made = plan(llama_8b)
    assert made.weights == 2 * 8_030_261_248
    assert made.bytes_per_page == {"": 16_777_216}
    assert made.pages == {"": ((80 << 30) - made.weights) // 16_777_216} == {"": 4162}
    assert made.concurrent_requests == 4162 // 64
    assert made.longest_context == 131072


def test_a_quantised_pool_nearly_doubles_the_pages(llama_8b: Path) -> None:
    assert plan(llama_8b, cache_dtype="int8").bytes_per_page == {"": 8_388_608 + 262_144}


def test_the_weights_are_the_checkpoints(model_folder: Callable[[str], Path]) -> None:
    for name in ("gemma2", "gpt_oss"):
        with safe_open(model_folder(name) / "model.safetensors", framework="np") as file:
            stored = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
        assert plan(model_folder(name), max_seq_len=None).weights == stored


def test_memory_below_the_weights_or_below_one_page(llama_8b: Path) -> None:
    with pytest.raises(ParamsError, match=r"more than the 16060522496 bytes of weights, got 1$"):
        plan(llama_8b, memory=1)
    with pytest.raises(ParamsError, match=r"at least one page of 16777216 bytes, got 4 bytes"):
        plan(llama_8b, memory=16_060_522_500)


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
