"""What `kvgraph plan` says of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.compiler.plan import plan_deployment
from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import ParamsError
from tests.support.models import make_model, randomize_vectors

PLANNED: dict[str, Any] = {
    "memory": 64 << 20,
    "max_seq_len": None,
    "max_batch_size": 8,
    "dtype": None,
    "cache_dtype": None,
    "page_size": 16,
}


def test_plan_counts_one_rank(compiled: Callable[..., Path], model_folder: Any) -> None:
    given = PLANNED | {"target": "cpu", "max_batch_size": 256}
    one = plan_deployment(model_folder("tiny-llama"), **given)
    two = plan_deployment(model_folder("tiny-llama"), tp=2, **given)
    stored = (compiled("tiny-llama", tp=2) / "weights.safetensors").stat().st_size
    assert two.weights == pytest.approx(stored, rel=0.01)
    assert two.bytes_per_page[""] * 2 == one.bytes_per_page[""]
    assert two.pages[""] > 2 * one.pages[""]
    assert two.warnings == []


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_plan_counts_what_a_rank_stores(name: str, tmp_path: Path) -> None:
    """Of a tied table too that is so small that the exporter would store its transpose as well."""
    folder = make_model(name, tmp_path / "model", tie_word_embeddings=True)
    randomize_vectors(folder)  # equal norms would be stored once
    kvgraph.compile(folder, tmp_path / "out", tp=2, check=False)
    tensors = read_layout(tmp_path / "out" / "weights.safetensors")
    given = PLANNED | {"target": "cpu", "memory": 1 << 30}
    planned = plan_deployment(folder, tp=2, **given).weights
    assert planned == sum(each.nbytes for each in tensors.values())
    assert "model.lm_head.weight" in tensors
    assert not [each for each in tensors if each.startswith("permute")]


def test_plan_warns_of_what_compile_refuses(model_folder: Callable[[str], Path]) -> None:
    """Sizes are of equal parts: of 4 kv heads the largest of 3 has 2."""
    given = PLANNED | {"target": "cpu"}
    whole = plan_deployment(model_folder("tiny-llama"), **given)
    three = plan_deployment(model_folder("tiny-llama"), tp=3, **given)
    assert three.warnings == [
        "compile refuses this: tp: expected ranks that divide the 4 kv heads of 'llama', or a "
        "multiple of them, got 3; sizes are those of 3 equal parts"
    ]
    assert three.weights == -(-whole.weights // 3)
    assert three.bytes_per_page[""] * 2 == whole.bytes_per_page[""]
    (warning,) = plan_deployment(model_folder("gpt2"), tp=2, **given).warnings
    assert warning.startswith("compile refuses this: tp: expected a plan for tensor parallelism")


def refused(folder: Path, memory: int, **options: Any) -> str:
    with pytest.raises(ParamsError) as error:
        plan_deployment(folder, **PLANNED | {"memory": memory, "target": "cpu"} | options)
    return str(error.value)


def test_plan_says_what_would_fit(model_folder: Callable[[str], Path]) -> None:
    """3.9 MiB of weights, 14.1 of a step of 2,048 tokens."""
    tiny = model_folder("tiny-llama")
    assert refused(tiny, 17 << 20) == (
        "memory: expected more than 4133376 bytes of weights and 14745600 of a step of 2048 "
        "tokens and 136 rows of logits, got 17825792; what fits: --weights int8 (1.7 MiB), "
        "--weights int4 (1.2 MiB), --max-batch-tokens 1024, --tp 2 (2.0 MiB on each device)"
    )
    assert refused(tiny, 17 << 20, target="cuda:sm_90").partition("what fits: ")[2] == (
        "--weights int8 (2.1 MiB), --weights int4 (1.6 MiB), --max-batch-tokens 1024, --tp 2 "
        "(2.0 MiB on each device)"
    )
    assert "what fits" not in refused(tiny, 1)
    # A page alone does not fit.
    assert "one page of 32768 bytes, got 10 bytes" in refused(tiny, 4133376 + 14745600 + 10)
    # Fewer bits need fewer ranks.
    assert refused(tiny, 930 << 10, max_batch_tokens=16).partition("what fits: ")[2] == (
        "--tp 8 (660.5 KiB on each device), --weights int8 --tp 4 (576.5 KiB on each device), "
        "--weights int4 --tp 4 (437.0 KiB on each device)"
    )
    # Only both together.
    assert refused(tiny, 540 << 10, max_batch_tokens=16).endswith(
        "what fits: --weights int4 --tp 8 (305.6 KiB on each device)"
    )


def test_plan_names_only_ranks_that_compile_takes(model_folder: Callable[[str], Path]) -> None:
    gpt2 = plan_deployment(model_folder("gpt2"), target="cpu", **PLANNED)
    short = gpt2.weights + gpt2.reserve.nbytes - 1
    assert "--tp" not in refused(model_folder("gpt2"), short)
