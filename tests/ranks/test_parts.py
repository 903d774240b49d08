"""Attention and feed-forward layers that are cut by what their parts are, with a plan or not."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

import kvgraph
from kvgraph.compiler.frontends import huggingface, rank_plan
from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.frontends.rank_parts import ALL_HEADS, EACH_HEAD, PACKED_HEADS, attention_rows
from kvgraph.compiler.frontends.ranks import cut
from kvgraph.errors import UnsupportedError
from tests.support.artifacts import CHECKED
from tests.support.models import EXPERTS, LATENT, make_model, sizes_of
from tools.models.judge import make

ATTENTION = "model.model.layers.0.self_attn"
MLP = "model.model.layers.0.mlp"
SLOW = (
    *("afmoe", "cohere", "gemma3n_text", "glm4", "glm4_moe_lite", "hunyuan_v1_dense"),
    *(
        "hunyuan_v1_moe",
        "minicpm3",
        "minimax_m2",
        "olmoe",
        "qwen2_moe",
        "qwen3_vl (whole)",
        "youtu",
    ),
)
CUT = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


class Norm(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dims))


class Wrapped(nn.Module):
    """As projections of Gemma 4's vision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)


def attention(**others: nn.Module) -> nn.Module:
    """Four query heads and two kv heads of 8, with `others` next to their projections."""
    module = nn.Module()
    module.layer_idx, module.head_dim = 0, 8  # type: ignore[assignment]
    widths = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
    parts = {name: nn.Linear(*dims) for name, dims in widths.items()} | others
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def test_what_is_known_next_to_four_projections() -> None:
    assert attention_rows(attention()) == CUT
    assert attention_rows(attention(dropout=nn.Dropout(), gate_proj=nn.Linear(32, 32))) == CUT | {
        "gate_proj": "colwise"
    }
    of_a_head = {"q_norm": "replicate", "key_layernorm": "replicate"}
    assert attention_rows(attention(q_norm=Norm(8), key_layernorm=Norm(8))) == CUT | of_a_head
    of_all = {"q_norm": ALL_HEADS, "k_norm": ALL_HEADS}
    assert attention_rows(attention(q_norm=Norm(32), k_norm=Norm(16))) == CUT | of_all
    of_each = {"q_norm": EACH_HEAD, "k_norm": EACH_HEAD}
    assert attention_rows(attention(q_norm=Norm(4, 8), k_norm=Norm(2, 8))) == CUT | of_each
    sinks = attention()
    sinks.sinks = nn.Parameter(torch.zeros(4))
    assert attention_rows(sinks) == CUT | {"sinks": "colwise"}


@pytest.mark.parametrize(
    "others",
    [
        {"gate_proj": nn.Linear(32, 16)},  # not as wide as queries
        {"q_norm": Norm(4)},  # neither of a head nor of all
        {"k_norm": Norm(4, 8)},  # not as many heads as keys have
        {"indexer": nn.Linear(32, 8)},
        {"q_norm": nn.LayerNorm(32)},  # a bias of all heads
        {"q_proj": Wrapped(), "q_norm": Norm(32)},
        {"q_proj": Wrapped(), "gate_proj": Wrapped()},
    ],
)
def test_what_is_not_known_is_not_guessed_at(others: dict[str, nn.Module]) -> None:
    assert attention_rows(attention(**others)) == {}


def test_all_layers_of_a_name_are_known_or_none_is() -> None:
    """Modules of other names, such as those of a vision tower, do not count."""
    layers = nn.ModuleList([attention(), attention(indexer=nn.Linear(32, 8))])
    others = nn.ModuleList([attention(), attention(q_norm=Norm(8))])
    model = nn.ModuleDict({"layers": layers, "others": others})
    rows = CUT | {"q_norm": "replicate"}
    assert rank_plan._rows(model, attention_rows) == {f"others.*.{k}": v for k, v in rows.items()}
    layers[0], layers[1] = attention(q_norm=Norm(8)), attention(q_norm=Norm(32))
    assert rank_plan._rows(model, attention_rows).keys() == {f"others.*.{part}" for part in rows}


def test_a_parameter_that_is_not_known_is_not_guessed_at() -> None:
    module = attention()
    module.scale = nn.Parameter(torch.ones(1))
    assert attention_rows(module) == {}


def test_other_modules_are_not_attention() -> None:
    assert attention_rows(nn.Linear(4, 4)) is None


def test_a_plan_that_cuts_no_attention_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' plan of Phi-3 gathers queries, keys and values on each rank."""
    monkeypatch.setattr(rank_plan, "attention_rows", lambda module: None)
    model = huggingface.load(make_model("phi3", tmp_path / "m"), "float32")
    with pytest.raises(UnsupportedError, match="its plan does not cut attention"):
        cut(model, 2, 0)


def test_kinds_of_layers_with_equally_wide_heads(tmp_path: Path) -> None:
    """Gemma 4: two kv heads of 16 in layers with a window, one of 32 in others."""
    heads = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "global_head_dim": 32}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True}
    others = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    folder = make_model("gemma4_text", tmp_path / "m", **heads, **kinds, **others)
    model = huggingface.load(folder, "float32")
    whole = dict(model.module.named_parameters())
    for rank in range(4):
        own = dict(cut(model, 4, rank).module.named_parameters())
        for layer, parts in ((0, 2), (1, 1)):
            name = f"model.model.layers.{layer}.self_attn.k_proj.weight"
            assert torch.equal(own[name], whole[name].chunk(parts)[rank * parts // 4])


def test_packed_projections_are_cut_part_by_part(tmp_path: Path) -> None:
    """Phi-3: four query heads and two kv heads of 16 in one, gate and up in another."""
    model = huggingface.load(make_model("phi3", tmp_path / "m"), "float32")
    whole = dict(model.module.named_parameters())
    for rank in range(2):
        part = cut(model, 2, rank)
        own = dict(part.module.named_parameters())
        for name, widths in (
            (f"{ATTENTION}.qkv_proj.weight", (64, 32, 32)),
            (f"{MLP}.gate_up_proj.weight", (96, 96)),
        ):
            pieces = whole[name].split(widths)
            expected = torch.cat([piece.chunk(2)[rank] for piece in pieces])
            assert torch.equal(own[name], expected)
        for name in (f"{ATTENTION}.o_proj.weight", f"{MLP}.down_proj.weight"):
            assert torch.equal(own[name], whole[name].chunk(2, 1)[rank])


def test_packed_heads_are_not_copied(tmp_path: Path) -> None:
    model = huggingface.load(make_model("phi3", tmp_path / "m"), "float32")
    sentence = (
        r"tp: expected ranks that divide the 2 kv heads that .*qkv_proj of 'phi3' packs, got 4"
    )
    with pytest.raises(UnsupportedError, match=sentence):
        cut(model, 4, 0)


def test_a_packed_projection_of_other_rows_is_not_guessed_at(tmp_path: Path) -> None:
    model = huggingface.load(make_model("phi3", tmp_path / "m"), "float32")
    attention = model.module.get_submodule(ATTENTION)
    assert attention_rows(attention) == {"qkv_proj": PACKED_HEADS, "o_proj": "rowwise"}
    attention.qkv_proj = nn.Linear(64, 144)
    assert attention_rows(attention) == {}


def test_a_plan_that_gathers_between_projections_is_not_followed(tmp_path: Path) -> None:
    """GLM's: two collectives less in a layer."""
    model = huggingface.load(make_model("glm", tmp_path / "m"), "float32")
    rows = rank_plan.plan_of(cast("Decoder", model.module), "glm", 2)
    assert rows["model.layers.*.mlp.gate_up_proj"] == "packed_colwise"
    assert rows["model.layers.*.mlp.down_proj"] == "rowwise"


def test_heads_of_a_latent_are_cut(tmp_path: Path) -> None:
    folder = make_model("deepseek_v3", tmp_path / "m", **LATENT | EXPERTS)
    model = huggingface.load(folder, "float32")
    whole = dict(model.module.named_parameters())
    for rank in range(2):
        part = cut(model, 2, rank)
        assert [layer.n_kv_heads for layer in part.layers] == [4, 4]  # of the model
        own = dict(part.module.named_parameters())
        for name, dim in (("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1)):
            expected = whole[f"{ATTENTION}.{name}.weight"].chunk(2, dim)[rank]
            assert torch.equal(own[f"{ATTENTION}.{name}.weight"], expected)
        for name in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"):
            assert torch.equal(
                own[f"{ATTENTION}.{name}.weight"], whole[f"{ATTENTION}.{name}.weight"]
            )


def shared_expert(folder: Path, width: int) -> tuple[nn.Module, nn.Module]:
    """Of Qwen2-MoE, whose plan says nothing of it: the whole, and the part of rank 1."""
    given = {
        "shared_expert_intermediate_size": width,
        "num_experts": 4,
        "moe_intermediate_size": 32,
    }
    model = huggingface.load(make_model("qwen2_moe", folder, **given), "float32")
    name = "model.model.layers.0.mlp.shared_expert"
    return model.module.get_submodule(name), cut(model, 2, 1).module.get_submodule(name)


def test_feed_forward_layers_that_the_plan_leaves_out_are_cut(tmp_path: Path) -> None:
    whole, own = shared_expert(tmp_path / "even", 48)
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        expected = whole.get_parameter(f"{name}.weight").chunk(2, dim)[1]
        assert torch.equal(own.get_parameter(f"{name}.weight"), expected)


def test_one_that_ranks_do_not_divide_stays_whole(tmp_path: Path) -> None:
    whole, own = shared_expert(tmp_path / "odd", 33)
    for name, weight in whole.named_parameters():
        assert torch.equal(own.get_parameter(name), weight)


def test_norms_of_copied_heads_are_copied(tmp_path: Path) -> None:
    model = huggingface.load(make_model("cohere", tmp_path / "m", use_qk_norm=True), "float32")
    whole = dict(model.module.named_parameters())
    for rank in range(4):
        own = dict(cut(model, 4, rank).module.named_parameters())
        for name, parts in (("q_norm", 4), ("k_norm", 2)):
            expected = whole[f"{ATTENTION}.{name}.weight"].chunk(parts)[rank * parts // 4]
            assert torch.equal(own[f"{ATTENTION}.{name}.weight"], expected)


def test_a_norm_of_all_heads_has_no_copies(tmp_path: Path) -> None:
    model = huggingface.load(make_model("olmo2", tmp_path / "m"), "float32")
    sentence = r"tp: expected at most 2 ranks, .*k_norm of 'olmo2' is over all heads, got 4"
    with pytest.raises(UnsupportedError, match=sentence):
        cut(model, 4, 0)


def test_code_that_counts_all_heads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of torch's own report is shown."""
    model = huggingface.load(make_model("cohere", tmp_path / "m", use_qk_norm=True), "float32")
    monkeypatch.setattr("kvgraph.compiler.frontends.rank_plan.attention_rows", lambda module: None)
    capfd.readouterr()  # of the model that was made
    with pytest.raises(UnsupportedError, match="tp: expected code of 'cohere' that runs with a"):
        cut(model, 2, 0)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "olmo2",
        "llama4_text:one",
        "phi3:partial",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_ranks_give_the_models_logits(name: str, tmp_path: Path) -> None:
    """Cases of the support table; all of a mixture's experts are packed."""
    make(name, tmp_path / "m")
    manifest = kvgraph.compile(tmp_path / "m", tmp_path / "out", tp=2, page_size=16)
    assert manifest.notes[-1] == CHECKED
    assert "rank1/model.onnx" not in manifest.files  # ranks share the graph


def test_experts_of_llama_4_are_packed_on_each_rank(tmp_path: Path) -> None:
    make("llama4_text:one", tmp_path / "m")
    manifest = kvgraph.compile(tmp_path / "m", tmp_path / "out", tp=2, page_size=16, weights="int8")
    assert manifest.ops["kvgraph.experts"] == 4
    assert manifest.ops["kvgraph.all_reduce"] == 9  # one for attention, one for a mixture
    mixtures = sizes_of(tmp_path / "m", 2).experts
    assert [(each.count, each.held, each.active) for each in mixtures] == [(4, 4, 1)] * 4
    assert manifest.mixtures[0].parameters == sum(each.elements for each in mixtures)
