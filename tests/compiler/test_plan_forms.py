"""What a plan counts of weights, layer by layer, against what a compile stores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import kvgraph
from kvgraph import UnsupportedError
from kvgraph.compiler.described import Linear, ModelSizes
from kvgraph.compiler.frontends.left_plain import EXPERT, left_plain
from kvgraph.compiler.frontends.stored_forms import PLAIN, stored_forms
from kvgraph.compiler.passes.fuse_rope import fuse_rope
from kvgraph.compiler.passes.pair_complex import pair_complex
from kvgraph.contract.safetensors import read_layout
from kvgraph.ops.packed import E4M3, INT8, MOST_SUMMED, NVFP4, Form
from tests.support import quantized
from tests.support.models import COMMON, make_model, sizes_of
from tests.support.plans import LLAMA_8B, plan
from tests.support.programs import program_of
from tools.models import page
from tools.models.judge import make

ATTENTION = "self_attn."
GROUPS: dict[str, Any] = {
    "group_0": {
        "targets": ["Linear"],
        "weights": quantized.integer(4, strategy="group", group_size=128),
    }
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": GROUPS,
}
ONLY_MLP = {"group_0": GROUPS["group_0"] | {"targets": [r"re:.*mlp\..*"]}}
LEFT: dict[str, dict[str, Any]] = {
    "a pattern": COMPRESSED | {"ignore": ["lm_head", r"re:.*self_attn\..*"]},
    "names": COMPRESSED
    | {"ignore": [f"model.layers.{i}.self_attn.{n}_proj" for i in range(32) for n in "qkvo"]},
    "targets": COMPRESSED | {"config_groups": ONLY_MLP},
    "activations": COMPRESSED
    | {"config_groups": ONLY_MLP | {"group_1": {"targets": ["Linear"], "weights": None}}},
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": ["self_attn"],
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "dynamic": {r"-:.*\.self_attn\.": {}},
    },
    "blocks of gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]],
    },
    "fp8": {
        "quant_method": "fp8",
        "modules_to_not_convert": ["q_proj", "k_proj", "v_proj", "o_proj"],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "exclude_modules": ["lm_head", "model.layers.*.self_attn*"],
    },
    "some layers": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            f"model.layers.{i}.mlp.{n}_proj": {"quant_algo": "NVFP4"}
            for i in range(32)
            for n in ("gate", "up", "down")
        },
    },
}
PLAIN_ATTENTION = 32 * 2 * 4096 * (4096 + 1024) * 2
"""Bytes of Llama-3-8B's in bfloat16."""


def of_8b(folder: Path, given: Mapping[str, Any] | None) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | {"quantization_config": given}))
    return plan(folder)


@pytest.mark.parametrize("case", LEFT)
def test_layers_that_lists_leave_plain_are_counted_so(case: str, tmp_path: Path) -> None:
    given = LEFT[case]
    lists = ("ignore", "exclude_modules", "modules_to_not_convert", "dynamic")
    whole = {name: value for name, value in given.items() if name not in lists}
    whole.pop("modules_in_block_to_quantize", None)
    if "config_groups" in given:
        whole["config_groups"] = GROUPS
    if case == "some layers":
        whole = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    found, packed = of_8b(tmp_path, given), of_8b(tmp_path, whole)
    share = 8 if case in ("fp8", "modelopt", "some layers") else 4  # no kernel takes NVFP4 as it is
    more = found.weights - packed.weights
    assert more == pytest.approx(PLAIN_ATTENTION * (1 - share / 16), rel=0.1)
    assert found.warnings == []


def test_a_gate_is_no_gate_proj() -> None:
    given = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["gate", "layers.1"]}
    is_plain = left_plain({"quantization_config": given})
    names = ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.1.a.b")
    assert [is_plain(name) for name in (*names, "model.layers.11.a.b")] == [
        True,
        False,
        True,
        False,
    ]


def test_names_in_a_larger_model_and_of_experts() -> None:
    config = {
        "quantization_config": COMPRESSED | {"ignore": ["re:model.language_model.layers.0.*"]}
    }
    assert left_plain(config)("model.layers.0.mlp.up_proj")
    assert not left_plain(config)("model.layers.1.mlp.up_proj")
    mixed = {"model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"}}
    given = {"quant_method": "modelopt", "quantized_layers": mixed}
    experts = left_plain({"quantization_config": given}, EXPERT["gate_up_proj"])
    assert not experts("model.layers.0.mlp.experts")
    assert experts("model.layers.1.mlp.experts")


def held_bytes(artifact: Path) -> int:
    held = read_layout(artifact / "weights.safetensors").items()
    return sum(at.nbytes for name, at in held if "inv_freq" not in name)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
def test_layers_whose_tensors_are_plain(
    target: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whatever lists say: as a compile reads them."""
    folder = quantized.make("w4a16", plain("llama"), tmp_path / "packed")
    packed = plan(folder, target=target, max_seq_len=None)
    for layer in (0, 1):
        for name in "qkvo":
            quantized.mixed(folder, plain("llama"), f"model.layers.{layer}.self_attn.{name}_proj.")
    found = plan(folder, target=target, max_seq_len=None)
    out = tmp_path / "out"
    kvgraph.compile(folder, out, target=target, backend="torch", weights="stored", check=False)
    assert found.weights > packed.weights
    assert found.weights == pytest.approx(held_bytes(out), rel=0.003)


def test_what_a_compile_cannot_read_is_refused_with_its_sentence(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make("nvfp4", plain("llama"), tmp_path / "packed")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 8}
    path.write_text(json.dumps(config))
    sentences = []
    for attempt in (
        lambda: plan(folder, max_seq_len=None),
        lambda: kvgraph.compile(folder, tmp_path / "out"),
    ):
        with pytest.raises(UnsupportedError) as raised:
            attempt()
        sentences.append(str(raised.value))
    assert sentences[0] == sentences[1]
    assert "awq: bits: expected 4, got 8" in sentences[0]


def test_forms_that_are_not_known_are_said(tmp_path: Path) -> None:
    (said,) = of_8b(tmp_path, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}).warnings
    assert said.startswith("quantization_config: quant_algo: expected one of ['FP8', ")
    assert said.endswith(
        "got 'W4A8_AWQ'; its weights are counted as plain, and compile may refuse them"
    )
    assert of_8b(tmp_path, {"quant_method": "modelopt", "quant_algo": None}).warnings == []
    assert of_8b(tmp_path, {"quant_method": "mxfp4"}).warnings == [
        "quantization_config: quant_method: expected a model with experts for 'mxfp4', got one "
        "without; its weights are counted as plain"
    ]


@pytest.mark.parametrize(
    ("given", "bits"),
    [
        ({"quant_algo": "NVFP4"}, 4),
        ({"quant_algo": "mxfp4"}, 4),
        ({"quant_algo": "FP8"}, 8),
        ({"quant_algo": "W4A16_AWQ"}, 16),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "MXFP4"}, "b": {"quant_algo": "FP8"}},
            },
            8,
        ),
    ],
)
def test_what_a_plan_takes_modelopts_forms_for(given: dict[str, Any], bits: int) -> None:
    config = {"quantization_config": {"quant_method": "modelopt", **given}}
    assert stored_forms(config).linears.bits == bits


INT4, FP4 = GROUPS["group_0"]["weights"], {"num_bits": 4, "type": "float", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "block"}
ONLY_INPUTS = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}}


@pytest.mark.parametrize(
    ("form", "groups", "expected"),
    [
        ("pack-quantized", [{"weights": INT4}, ONLY_INPUTS], Form(4, 128)),
        ("pack-quantized", [ONLY_INPUTS], PLAIN),
        ("pack-quantized", [{"weights": INT4 | {"actorder": "group"}}], Form(8)),
        ("pack-quantized", [{"weights": INT4 | {"group_size": 16}}], Form(8)),
        ("pack-quantized", [{"weights": INT4 | {"actorder": "weight"}}], Form(4, 128)),
        ("int-quantized", [{"weights": INT4}], Form(8, 128, INT8)),
        (
            "mixed-precision",
            [{"weights": FP4, "format": "nvfp4-pack-quantized"}],
            Form(4, 16, NVFP4),
        ),
        ("float-quantized", [{"weights": FP8 | {"block_structure": "128x64"}}], Form(8, 64, E4M3)),
        ("float-quantized", [{"weights": FP8 | {"block_structure": [128, 64]}}], Form(8, 64, E4M3)),
    ],
)
def test_what_a_plan_takes_groups_for(form: str, groups: list[object], expected: Form) -> None:
    named = {f"group_{place}": group for place, group in enumerate(groups)}
    config = {"quantization_config": COMPRESSED | {"format": form, "config_groups": named}}
    assert stored_forms(config).linears == expected


@pytest.mark.parametrize("bits", [8, 4])
def test_layers_of_more_inputs_than_kernels_sum_are_counted_in_bfloat16(bits: int) -> None:
    def nbytes(inputs: int, bits: int) -> int:
        layer = Linear(16, inputs, has_bias=False)
        sizes = ModelSizes("", (), 1, 1, 1, 1, (layer,), 0, 0, ())
        return sizes.weight_bytes("float32", bits, on_cpu=True)

    assert nbytes(MOST_SUMMED, bits) < nbytes(MOST_SUMMED, 16)
    assert nbytes(MOST_SUMMED + 1, bits) == nbytes(MOST_SUMMED + 1, 16)


def test_a_scheme_by_its_name_is_counted_as_plain(tmp_path: Path) -> None:
    found = of_8b(tmp_path, COMPRESSED | {"config_groups": GROUPS | {"W8A8": ["Linear"]}})
    assert found.warnings == [
        "quantization_config: config_groups: expected groups that say what their weights are, got "
        "the scheme 'W8A8' by its name; all weights are counted as plain"
    ]
    assert found.weights == of_8b(tmp_path, None).weights


def test_tensors_at_hand_leave_no_doubt(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("w8a8", plain("llama"), tmp_path / "packed")
    expected = plan(folder, max_seq_len=None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {"W8A8": ["Linear"]}
    (folder / "config.json").write_text(json.dumps(config))
    found = plan(folder, max_seq_len=None)
    assert (found.weights, found.warnings) == (expected.weights, [])
    (folder / "model.safetensors").unlink()
    assert "all weights are counted as plain" in "".join(plan(folder, max_seq_len=None).warnings)


# -- rotary tables, the head, experts

RESULTS = json.loads(page.GOLDEN.read_text())["cases"]


def configured(folder: Path, architecture: str, **fields: Any) -> Path:
    AutoConfig.for_model(architecture, **COMMON | fields).save_pretrained(folder)
    return folder


LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("deepseek_v3", LATENT | {"num_key_value_heads": 4}),
        ("llama4_text", FOUR),
        ("hunyuan_v1_dense", {}),
    ],
)
def test_no_table_is_counted_where_none_is_stored(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_model(architecture, tmp_path / "model", **fields)
    out = tmp_path / "out"
    kvgraph.compile(folder, out, target="cuda:sm_90", check=False)
    made = plan(folder, max_seq_len=None)
    assert sizes_of(folder).rotary_dims == ()
    assert made.weights == pytest.approx(held_bytes(out), rel=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, said in RESULTS.items() if said == "right"])
def test_tables_are_those_that_a_trace_makes(name: str, tmp_path: Path) -> None:
    """Of every model of transformers that is compiled."""
    make(name, tmp_path / "model")
    model = sizes_of(tmp_path / "model")
    program, signature = program_of(tmp_path / "model", "float32")
    pair_complex(program)
    fuse_rope(program, signature, model.max_seq_len)
    tables = [t for each, t in program.state_dict.items() if "kvgraph.cos_sin_" in each]
    assert sorted(model.rotary_dims) == sorted(table.shape[1] for table in tables)


def test_equal_frequencies_share_a_table(tmp_path: Path) -> None:
    layers = ["full_attention", "sliding_attention"]
    folder = configured(tmp_path, "olmo3", layer_types=layers, sliding_window=24)
    assert sizes_of(folder).rotary_dims == (16,)


def test_a_layer_as_tall_as_the_vocabulary_is_no_head(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model", intermediate_size=160)
    found = sizes_of(folder)
    assert sum(each.is_head for each in found.linears) == 1
    assert found.widest == 160
    shutil.rmtree(folder)
    folder = make_model("llama", folder, intermediate_size=160, vocab_size=320)
    found = sizes_of(folder, 2)  # of a rank: 160 rows of the head
    assert sum(each.is_head for each in found.linears) == 1


def test_experts_of_a_token_by_layer(tmp_path: Path) -> None:
    """Hunyuan-A13B names them for each layer."""
    sizes = {"num_experts": 8, "num_hidden_layers": 2, "head_dim": 16}
    each = [
        plan(configured(tmp_path / name, "hunyuan_v1_moe", moe_topk=topk, **sizes), max_seq_len=64)
        for name, topk in (("one", 2), ("list", [2, 2]))
    ]
    assert each[0].active_parameters == each[1].active_parameters < each[1].parameters


def test_experts_that_are_all_computed_are_said(tmp_path: Path) -> None:
    one = plan(configured(tmp_path / "one", "llama4_text", **FOUR), max_seq_len=None)
    assert one.active_parameters < one.parameters
    assert one.warnings == []
    two = configured(tmp_path / "two", "llama4_text", **FOUR | {"num_experts_per_tok": 2})
    made = plan(two, max_seq_len=None)
    assert made.active_parameters == made.parameters
    assert made.warnings == [
        "experts: a step computes all 4 of a layer for each token, as transformers' "
        "Llama4TextExperts does, so all parameters work on a token"
    ]
