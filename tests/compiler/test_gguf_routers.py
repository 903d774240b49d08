"""Fields of GGUF files that change results of other models: files that name one are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.compiler.frontends.gguf_architectures import ARCHITECTURES
from kvgraph.compiler.frontends.gguf_routers import ROUTERS
from kvgraph.errors import UnsupportedError
from tests.support import gguf_files
from tests.support.models import make_model

SIZES = {"num_hidden_layers": 1, "vocab_size": 258}
FEW = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mixtral": SIZES | {"num_local_experts": 4},
    "qwen3_moe": FEW | {"norm_topk_prob": True},
    "qwen2_moe": FEW | {"shared_expert_intermediate_size": 48},
    "olmoe": FEW,
    "gpt_oss": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": SIZES,
}
SOFTMAX, SIGMOID, OF_CHOSEN = 1, 2, 3
"""llama.cpp's numbers of functions that make weights of experts."""


def opened(kind: str, tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = make_model(kind, tmp_path / "model", **MODELS[kind])
    more = gguf_files.prefixed(kind, fields)
    with as_folder(gguf_files.make(folder, tmp_path / "model.gguf", **more)):
        pass


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("qwen3_moe", {"expert_gating_func": SIGMOID}, "func: expected 1, the softmax, got 2"),
        ("mixtral", {"expert_gating_func": SIGMOID}, "func: expected 1, the softmax, got 2"),
        ("gpt_oss", {"expert_gating_func": SIGMOID}, "3, the softmax of the chosen experts, got"),
        ("qwen3_moe", {"expert_weights_norm": False}, "weights_norm: expected 1, got False"),
        ("minimax_m2", {"expert_weights_norm": False}, "weights_norm: expected 1, got False"),
        ("qwen2_moe", {"expert_weights_norm": True}, "weights_norm: expected 0, got True"),
        ("olmoe", {"expert_weights_norm": True}, "weights_norm: expected 0, got True"),
        ("qwen3_moe", {"expert_group_count": 2}, "group_count: expected none, or 1, got 2"),
        ("qwen3_moe", {"expert_weights_scale": 2.5}, "weights_scale: expected 1, got 2.5"),
        ("llama", {"attention__clamp_kqv": 8.0}, "clamp_kqv: expected 0, got 8.0"),
        ("llama", {"attention__max_alibi_bias": 8.0}, "max_alibi_bias: expected 0, got 8.0"),
        ("llama", {"attention__shared_kv_layers": 1}, "shared_kv_layers: expected 0, got 1"),
        ("llama", {"attention__temperature_length": 64}, "_length: expected 0, got 64"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping: expected 0, got 30"),
        ("llama", {"final_logit_softcapping": 30.0}, "logit_softcapping: expected 0, got 30"),
        ("llama", {"rope__scaling__alpha": 1000.0}, "scaling.alpha: expected 0, got 1000.0"),
        ("llama", {"swiglu_clamp_exp": [7.0]}, "swiglu_clamp_exp: expected 0, got [7.0]"),
        ("stablelm", {"attention__sliding_window": 24}, "sliding_window: expected none, got 24"),
    ],
)
def test_a_field_that_changes_results(
    kind: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError) as raised:
        opened(kind, tmp_path, fields)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3_moe", {"expert_gating_func": SOFTMAX, "expert_weights_norm": True}),
        ("qwen3_moe", {"expert_gating_func": 0, "expert_group_count": 1}),
        ("qwen2_moe", {"expert_gating_func": SOFTMAX, "expert_weights_norm": False}),
        ("gpt_oss", {"expert_gating_func": OF_CHOSEN, "expert_weights_norm": True}),
        ("llama", {"expert_gating_func": SIGMOID}),
        ("llama", {"attention__clamp_kqv": 0.0, "attention__max_alibi_bias": 0.0}),
        ("llama", {"final_logit_softcapping": 0.0, "attention__temperature_length": 0}),
        ("stablelm", {"use_parallel_residual": True, "attention__sliding_window": 1 << 20}),
    ],
)
def test_a_field_that_changes_nothing(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    opened(kind, tmp_path, fields)


def test_every_architecture_with_experts_has_one_way_to_weigh_them_or_a_configuration() -> None:
    routed = {"deepseek2", "dots1", "glm4moe"}
    names = {each for each in ARCHITECTURES if "moe" in each}
    assert names <= {*ROUTERS, *routed}
    assert {*ROUTERS} <= {*ARCHITECTURES}
