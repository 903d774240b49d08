"""Configurations in which a token cannot use the experts that they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kvgraph import ModelError
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.routing import require_routing
from tests.support.models import COMMON, EXPERTS, LATENT
from tests.support.plans import plan

FOUR = {"num_hidden_layers": 1, "moe_intermediate_size": 48}
GROUPED = LATENT | EXPERTS | FOUR | {"first_k_dense_replace": 0, "head_dim": 16}
OF = "num_experts_per_tok: expected 1 to 4 experts, as {} says, got {}"
ROUTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "too many": (
        "qwen3_moe",
        FOUR | {"num_experts": 4, "num_experts_per_tok": 9},
        OF.format("num_experts", 9),
    ),
    "none": (
        "mixtral",
        FOUR | {"num_local_experts": 4, "num_experts_per_tok": 0},
        OF.format("num_local_experts", 0),
    ),
    "below zero": (
        "gpt_oss",
        FOUR | {"num_local_experts": 4, "num_experts_per_tok": -1},
        OF.format("num_local_experts", -1),
    ),
    "of groups": (
        "deepseek_v3",
        GROUPED | {"num_experts_per_tok": 9},
        OF.format("n_routed_experts", 9),
    ),
    "of a list": (
        "hunyuan_v1_moe",
        FOUR | {"num_experts": 4, "moe_topk": [9]},
        "moe_topk: expected 1 to 4 experts, as num_experts says, got 9",
    ),
    "uneven groups": (
        "deepseek_v3",
        GROUPED | {"n_group": 3},
        "n_group: expected a divisor of 4, the number of experts in n_routed_experts, got 3",
    ),
    "no groups": (
        "glm4_moe",
        EXPERTS | FOUR | {"first_k_dense_replace": 0, "n_group": 0},
        "n_group: expected a divisor of 4, the number of experts in n_routed_experts, got 0",
    ),
    "too many groups": (
        "deepseek_v3",
        GROUPED | {"n_group": 2, "topk_group": 4},
        "topk_group: expected 1 to 2 groups, as n_group says, got 4",
    ),
}


def configured(architecture: str, folder: Path, changes: dict[str, Any]) -> Path:
    AutoConfig.for_model(architecture, **COMMON | changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", ROUTED)
def test_experts_that_a_token_cannot_use_are_refused(case: str, tmp_path: Path) -> None:
    architecture, changes, said = ROUTED[case]
    folder = configured(architecture, tmp_path, changes)
    for attempt in (
        lambda: plan(folder, target="cpu", memory=1 << 30, max_seq_len=None),
        lambda: huggingface.load(folder, "float32", weightless=True),
    ):
        with pytest.raises(ModelError) as raised:
            attempt()
        assert str(raised.value) == f"{folder}/config.json: {said}"


UNROUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "no experts": ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),
    "another family's fields": ("llama", {"num_experts": 4, "num_experts_per_tok": 9}),
    "a number for each layer": ("hunyuan_v1_moe", FOUR | {"num_experts": 4, "moe_topk": [2]}),
    "groups that are not used": (
        "deepseek_v2",
        GROUPED | {"topk_method": "greedy", "n_group": 3, "topk_group": None},
    ),
    "groups that are not said": ("deepseek_v2", GROUPED | {"n_group": None, "topk_group": None}),
}


@pytest.mark.parametrize("case", UNROUTED)
def test_fields_of_experts_that_are_not_there_are_not_read(case: str, tmp_path: Path) -> None:
    architecture, changes = UNROUTED[case]
    folder = configured(architecture, tmp_path, changes)
    require_routing(folder, AutoConfig.from_pretrained(folder))
