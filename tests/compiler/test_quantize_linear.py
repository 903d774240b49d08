"""Linear layers over small weights on CUDA: what becomes one node, how near it stays, what is
refused, and what a plan counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

import kvgraph
from kvgraph import ParamsError, UnsupportedError
from kvgraph.compiler import gpu_weights
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_experts import FUSED, fuse_experts
from kvgraph.compiler.passes.fuse_rms_norm import fuse_rms_norm
from kvgraph.compiler.passes.quantize_linear import QUANTIZED, quantize_linear
from kvgraph.compiler.plan import plan_deployment
from kvgraph.contract.manifest import read_manifest
from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import KernelError
from kvgraph.ops.matrices import GROUP, numbers_of
from tests.compiler.test_pack_experts import folder_of
from tests.compiler.test_pack_linear import NODES, Gated
from tests.compiler.test_plan import LLAMA_8B, TABLE, plan
from tests.support.command_line import run
from tests.support.models import layers, make_model
from tests.support.programs import packed_by, program_of, step
from tests.support.small_weights import rounded

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"


def quantized(program: ExportedProgram, bits: int) -> PassReport:
    drop_no_ops(program.graph)
    packed_by(fuse_experts, program, bits)
    return packed_by(quantize_linear, program, bits)


def nodes(program: ExportedProgram) -> list[Node]:
    return [node for node in program.graph.nodes if node.target is QUANTIZED]


def test_a_layer_whose_weight_is_a_row_stays() -> None:
    x = torch.rand(5, 64, dtype=torch.bfloat16)
    report = packed_by(quantize_linear, torch.export.export(Gated(torch.bfloat16), (x,)), 8)
    assert report.applied == 1
    assert report.unmatched == ["linear_1: expected a matrix of weights, got 1 dims"]


def test_a_layer_in_another_dtype_stays() -> None:
    program = torch.export.export(Gated(torch.float64), (torch.rand(5, 64, dtype=torch.float64),))
    report = packed_by(quantize_linear, program, 8)
    kinds = "torch.float32 or torch.float16 or torch.bfloat16"
    assert report.applied == 0
    assert report.unmatched[0] == f"linear: expected {kinds}, got torch.float64"


@pytest.mark.parametrize("name", NODES)
def test_layers_of_one_input_become_one_node(name: str, tmp_path: Path) -> None:
    program, _ = program_of(make_model(name, tmp_path / name), "bfloat16")
    report = quantized(program, 8)
    per_layer, gated, _ = NODES[name]
    count = layers(name)
    assert len(nodes(program)) == per_layer * count + 1  # and the head
    assert sum("silu_mul" in node.kwargs for node in nodes(program)) == gated * count
    left = Counter(n.target for n in program.graph.nodes)[torch.ops.aten.linear.default]
    assert left == (count if name == "gpt_oss" else 0)
    assert all("a router, which keeps its weights" in why for why in report.unmatched)
    given = ("q_proj.weight", "qkv_proj.weight", "gate_up_proj.weight", "c_fc.weight")
    assert not [n for n in program.state_dict if n.endswith(given)]  # stored once


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "bits"), [("llama", 8), ("phi3", 4), ("qwen2", 4), ("gemma2", 8)])
def test_results_are_those_of_the_rounded_weights(
    name: str, bits: int, dtype: str, tmp_path: Path
) -> None:
    """q, k and v with and without biases, gate and up of two layers and of halves of one."""
    folder = make_model(name, tmp_path / name, tie_word_embeddings=False)
    program, signature = program_of(folder, dtype)
    quantized(program, bits)
    plain, _ = program_of(folder, dtype)
    for node in plain.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            _round(plain, node.args[1].name, bits)
    given = [step(signature, dtype, [5, 1, 20]) for _ in range(2)]
    with torch.no_grad():
        found, expected = (
            each.module()(*inputs)[0].float()
            for each, inputs in zip((program, plain), given, strict=True)
        )
    limit = 1e-4 if dtype == "float32" else 0.05
    assert (found - expected).norm() < limit * expected.norm()


def _round(program: ExportedProgram, node: str, bits: int) -> None:
    """The weight behind a placeholder."""
    (name,) = [spec.target for spec in program.graph_signature.input_specs if spec.arg.name == node]
    assert name is not None
    held = program.state_dict[name]
    made = rounded(held, bits).to(held.dtype)
    program.state_dict[name] = nn.Parameter(made, requires_grad=False)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.05), (4, 0.5)])
def test_experts_stay_near(bits: int, most: float, tmp_path: Path) -> None:
    program, signature = program_of(folder_of("qwen3_moe", tmp_path), "bfloat16")
    plain, _ = program_of(folder_of("qwen3_moe", tmp_path), "float32")
    quantized(program, bits)
    (node, *_) = [node for node in program.graph.nodes if node.target is FUSED]
    assert node.kwargs["up_bits"] == node.kwargs["down_bits"] == bits
    with torch.no_grad():
        found = program.module()(*step(signature, "bfloat16", [1, 9, 25]))[0].float()
        expected = plain.module()(*step(signature, "float32", [1, 9, 25]))[0]
    assert (found - expected).norm() < most * expected.norm()


def test_norms_take_sums_of_what_became_one_of_several_results(tmp_path: Path) -> None:
    program, _ = program_of(make_model("llama", tmp_path / "llama"), "bfloat16")
    quantized(program, 8)
    report = fuse_rms_norm(program.graph)
    assert (report.applied, report.unmatched) == (2 * layers("llama") + 1, [])


# -- what is stored


def test_int8_is_the_nearest_under_a_columns_largest() -> None:
    weight = torch.randn(7, 40)
    weight[3] = 0
    part = gpu_weights.rounded(weight, 8)
    assert part["scales"].shape == (1, 7)
    assert part["weight"].abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    assert ((rounded(weight, 8) - weight).abs() <= part["scales"].T / 2 + 1e-6).all()


def test_nibbles_hold_groups_and_their_extremes() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 300)
    weight[2, :GROUP] = 0
    part = gpu_weights.rounded(weight, 4)
    assert part["weight"].shape == (5, 3 * GROUP // 2)
    assert part["scales"].shape == (3, 5)
    whole = numbers_of(part["weight"].numpy(), 3 * GROUP, 4)
    assert (whole.min(), whole.max()) == (-8, 7)
    assert (whole[:, 300:] == 0).all()
    byte = part["weight"][0, 5].item()
    assert whole[0, 5] == (byte << 28 >> 28 if byte >= 0 else ((byte & 15) ^ 8) - 8)
    assert whole[0, 5 + GROUP // 2] == byte >> 4


def test_errors_are_those_that_the_decision_page_names() -> None:
    torch.manual_seed(0)
    weight = torch.randn(512, 2048)
    errors = [float((rounded(weight, bits) - weight).norm() / weight.norm()) for bits in (8, 4)]
    assert errors == pytest.approx([0.0083, 0.0976], rel=0.02)


# -- what is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"weights": "bf16"},
            r"weights: expected one of \['int8', 'int4', 'stored'\] for target cuda",
        ),
        (
            {"weights": "int8", "backend": "onnx"},
            "weights: expected none for backend onnx on cuda, which packs none, got 'int8'",
        ),
        (
            {"weights": "int4", "backend": "tensorrt"},
            "weights: expected none for backend tensorrt, which packs none, got 'int4'",
        ),
    ],
)
def test_other_weights_and_backends_are_refused(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        kvgraph.compile(TINY_LLAMA, tmp_path / "out", target="cuda:sm_90", **options)


def test_bad_operands_are_refused_where_a_call_is_traced() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = meta(2, 5, 16, dtype=torch.float16)
    scales = meta(1, 8, dtype=torch.float32)
    attributes = {"out_features": 8, "bits": 8}
    op = torch.ops.kvgraph.quantized_linear
    assert [tuple(out.shape) for out in op(x, meta(8, 16), scales, **attributes)] == [
        (2, 5, 8), (0, 0), (0, 0)
    ]  # fmt: skip
    for given, changes, sentence in (
        ((x, meta(8, 15), scales), {}, "weight: dim depth: expected 16 for 16 inputs of x, got 15"),
        ((x, meta(8, 16), None), {}, "scales: expected some for bits 8, got none"),
        ((x, meta(8, 16), scales), {"bits": 4}, "weight: dim depth: expected 64 for 16 inputs"),
        ((x, meta(8, 16), scales), {"bits": 16}, "bits: expected 8 or 4, got 16"),
        ((x, meta(8, 16), scales), {"silu_mul": 1}, "num_columns: expected 16 for out_features"),
        (
            (x, meta(16, 16), meta(1, 16, dtype=torch.float32)),
            {"out_features": 4, "out_features_1": 4, "silu_mul": 1},
            "silu_mul: expected 0 with several outputs, got 1",
        ),
        ((x, meta(8, 16), scales), {"group": 48}, "group: expected 0, 32, 64 or 128, got 48"),
        (
            (x, meta(8, 16), scales),
            {"codes": 3},
            "codes: expected 0 or 2 for 8 bits without groups",
        ),
        (
            (x, meta(8, 16), scales),
            {"group": 32, "codes": 2},
            "weight: expected float8_e4m3fn for bits 8 and x of float16, got int8",
        ),
        (
            (x, meta(8, 16), meta(2, 8, dtype=torch.float32)),
            {"group": 32, "codes": 3},
            "scales: dim num_groups: expected 1 for 16 inputs of x, got 2",
        ),
        (
            (x, meta(8, 32), scales),
            {"bits": 4, "group": 32, "codes": 1},
            "scales: expected none for codes 1, got some",
        ),
        (
            (x, meta(8, 32), None),
            {"bits": 4, "group": 32, "codes": 1},
            "group_bytes: expected some for codes 1, got none",
        ),
        (
            (x, meta(8, 16), scales, meta(1, 8)),
            {},
            "group_bytes: expected none for bits 8, got some",
        ),
    ):
        with pytest.raises(KernelError, match=f"quantized_linear: .*{sentence}"):
            op(*given, **(attributes | changes))


# -- artifacts and plans


@pytest.mark.parametrize(
    ("model", "weights", "dtype"),
    [("tiny-llama", "int4", "bfloat16"), ("gpt_oss", "int8", "float16")],
)
def test_a_plan_counts_what_is_stored(
    model: str,
    weights: str,
    dtype: str,
    compiled: Callable[..., Path],
    model_folder: Callable[[str], Path],
) -> None:
    folder = compiled(model, "torch", target="cuda:sm_80", dtype=dtype, weights=weights)
    manifest = read_manifest(folder)
    assert (manifest.weights, manifest.dtype) == (weights, dtype)
    held = read_layout(folder / "weights.safetensors")
    nbytes = sum(at.nbytes for name, at in held.items() if "inv_freq" not in name)
    made = plan_deployment(
        model_folder(model),
        target="cuda:sm_80",
        memory=80 << 30,
        max_seq_len=None,
        max_batch_size=4,
        dtype=dtype,
        weights=weights,
        cache_dtype=None,
        page_size=16,
    )
    assert (made.weights_dtype, made.dtype) == (weights, dtype)
    assert made.weights == pytest.approx(nbytes, rel=0.003)  # a router keeps its few bytes
    mixtures = [at.nbytes for name, at in held.items() if ".experts." in name]
    assert sum(mixture.bytes for mixture in manifest.mixtures) == sum(mixtures)
    shown = run("inspect", folder).out
    assert weights in shown
    assert "quantize_linear" in shown
    assert "quantized_linear" in shown  # its kernels


def test_nothing_is_measured_where_no_gpu_has_to_be(tmp_path: Path) -> None:
    """A compile for CUDA measures perplexity where that is asked for alone."""
    options = ("--target", "cuda:sm_80", "--weights", "int8", "--no-check")
    done = run("compile", TINY_LLAMA, "-o", tmp_path / "out", *options)
    assert done.code == 0, done.err
    assert "quality" not in done.err
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.quality, manifest.weights) == (None, "int8")


def test_small_weights_on_a_gpu(tmp_path: Path) -> None:
    """int8: a byte and a scale of 4 for a column; int4: groups of 128 with a scale each. The table
    of embeddings and the norms stay in bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    layer = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    products = [*layer * 32, (4096, 128256)]
    kept = 2 * (4096 * 128256 + 65 * 4096) + TABLE
    int8 = sum(columns * (inputs + 4) for inputs, columns in products)
    int4 = sum(columns * inputs // 128 * (64 + 4) for inputs, columns in products)
    for weights, nbytes in (("int8", int8), ("int4", int4)):
        made = plan(tmp_path, weights=weights)
        assert made.weights == nbytes + kept
        assert (made.weights_dtype, made.dtype, made.cache_dtype) == (weights, *["bfloat16"] * 2)
    fitting = rf"--weights int8 \({(int8 + kept) / 2**30:.1f} GiB\), --weights int4"
    with pytest.raises(ParamsError, match=fitting):
        plan(tmp_path, memory=12 << 30)
