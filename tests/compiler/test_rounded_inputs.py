"""Checkpoints in 8 bits that were made for rounded inputs of their layers, for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import ExportedProgram
from transformers import AutoModelForCausalLM

import kvgraph
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.quantize_linear import QUANTIZED, quantize_linear
from kvgraph.compiler.quantized import activations
from kvgraph.compiler.weights import Weights
from kvgraph.contract.dtypes import AS_STORED
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import KernelError
from kvgraph.ops import matrices
from kvgraph.ops.packed import E4M3, INTEGERS
from tests.support import quantized
from tests.support.programs import program_of, step

INT8 = {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int"}


def groups(*pairs: tuple[dict[str, Any], dict[str, Any] | None]) -> dict[str, Any]:
    given = {
        f"group_{i}": {"weights": weights, "input_activations": inputs}
        for i, (weights, inputs) in enumerate(pairs)
    }
    return {"quant_method": "compressed-tensors", "config_groups": given}


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 8),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, 0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_real"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, 0),
        (groups((FLOAT8, FLOAT8 | {"dynamic": True})), 8),
        (groups((INT8, INT8)), 8),
        (groups((INT8, {"num_bits": 8})), 8),
        (groups((INT8, INT8 | {"symmetric": False})), 0),
        ({"config_groups": {"fp8_dynamic": ["Linear"]}}, 8),
        ({"config_groups": {"w8a16": ["q"], "FP8": ["k"]}}, 0),
        (groups((INT8, None)), 0),
        (groups((INT8, FLOAT8)), 0),
        (groups((INT4, INT8)), 0),
        (groups((INT4, None), (FLOAT8, FLOAT8)), 8),
        (groups((FLOAT8, None), (FLOAT8, FLOAT8)), 0),
        ({"config_groups": {"FP8_DYNAMIC": ["Linear"]}}, 8),
        ({"config_groups": {"W8A16": ["Linear"]}}, 0),
        ({"config_groups": {"W4A8": ["Linear"]}}, 0),
        ({"config_groups": {"g": {"weights": None, "input_activations": "int8"}}}, 0),
        ({"config_groups": None}, 0),
    ],
    ids=str,
)
def test_a_configuration_says_whether_inputs_are_rounded(config: dict[str, Any], bits: int) -> None:
    assert activations.bits(config) == bits


def kept(
    plain: Path, folder: Path, dtype: str, *archs: str
) -> tuple[ExportedProgram, GraphSignature, Weights]:
    program, signature = program_of(plain, dtype, weightless=True)
    weights = Weights(huggingface.load(folder, dtype, weightless=True).checkpoint)
    drop_no_ops(program.graph)
    quantize_linear(program, AS_STORED, weights, archs)
    weights.fill(program)
    return program, signature, weights


def forms_of(program: ExportedProgram) -> set[tuple[object, ...]]:
    nodes = [node for node in program.graph.nodes if node.target is QUANTIZED]
    names = ("bits", "group", "codes", "x_bits")
    return {tuple(node.kwargs.get(name, 0) for name in names) for node in nodes}


@pytest.mark.parametrize(
    ("form", "dtype", "archs", "found"),
    [
        ("fp8-dynamic", "bfloat16", ["sm_90"], (8, 0, E4M3, 8)),
        ("fp8-dynamic", "float16", ["sm_89", "sm_120"], (8, 0, E4M3, 8)),
        ("fp8-dynamic", "bfloat16", ["sm_80"], (8, 0, E4M3, 0)),
        ("fp8-dynamic", "bfloat16", ["sm_90", "sm_80"], (8, 0, E4M3, 0)),
        ("fp8-dynamic", "float32", ["sm_90"], (8, 0, E4M3, 0)),
        ("fp8-dynamic", "bfloat16", [], (8, 0, E4M3, 0)),
        ("fp8-blocks", "bfloat16", ["sm_90"], (8, 0, E4M3, 8)),
        ("fp8-channel", "bfloat16", ["sm_90"], (8, 0, E4M3, 0)),
        ("fp8", "bfloat16", ["sm_90"], (8, 32, E4M3, 0)),  # no kernel multiplies groups of 32
        ("w8a8-dynamic", "bfloat16", ["sm_80", "sm_90"], (8, 0, INTEGERS, 8)),
        ("w8a8-dynamic", "float16", ["sm_75"], (8, 0, INTEGERS, 0)),
        ("w8a8", "bfloat16", ["sm_90"], (8, 0, INTEGERS, 0)),
    ],
)
def test_inputs_are_rounded_where_tensor_cores_take_such_numbers(
    form: str,
    dtype: str,
    archs: list[str],
    found: tuple[int, ...],
    plain: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = quantized.make(form, plain("llama"), tmp_path / "model")
    program, _, weights = kept(plain("llama"), folder, dtype, *archs)
    assert forms_of(program) == {found}
    assert bool(weights.inputs_rounded) == bool(found[-1])
    assert any("rounded to 8 bits" in note for note in weights.notes()) == bool(found[-1])


@pytest.mark.parametrize(("form", "codes"), [("fp8-dynamic", E4M3), ("w8a8-dynamic", INTEGERS)])
def test_logits_are_those_of_rounded_inputs(
    form: str, codes: int, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of transformers over the weights that are meant, whose layers get rounded rows. In float32,
    where the pass rounds nothing: in halves a number near the middle of two may become either."""
    folder = quantized.make(form, plain("llama"), tmp_path / "model", tmp_path / "meant")
    program, signature, _ = kept(plain("llama"), folder, "float32", "sm_90")
    for node in program.graph.nodes:
        if node.target is QUANTIZED:
            node.kwargs = {**node.kwargs, "x_bits": 8}
    program.graph_module.recompile()
    given = step(signature, "float32", [17])
    with torch.no_grad():
        found = program.module()(*given)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "meant", dtype=torch.float32)
    tokens = given[0].long().view(1, -1)

    def rounded(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        rows = args[0].flatten(0, -2).numpy()
        return (torch.from_numpy(matrices.rounded(rows, codes)).view_as(args[0]),)

    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and name.startswith("model."):
                layer.register_forward_pre_hook(rounded)
        expected = model(tokens).logits[0, -len(found) :]
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(("count", "layers"), [(1, "1 linear layer"), (2, "2 linear layers")])
def test_a_note_counts_the_layers(count: int, layers: str) -> None:
    (note,) = Weights(inputs_rounded={str(i) for i in range(count)}).notes()
    assert note.startswith(f"weights: inputs of {layers} are rounded to 8 bits")


def test_an_artifact_says_it(
    plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compile's own check rounds too, and all kernels are there."""
    folder = quantized.make("fp8-dynamic", plain("llama"), tmp_path / "model")
    given = {"dtype": "bfloat16", "page_size": 16}
    products, rounded = [], matrices.rounded

    def counted(x: np.ndarray, codes: int) -> np.ndarray:
        products.append(codes)
        return rounded(x, codes)

    monkeypatch.setattr(matrices, "rounded", counted)
    manifest = kvgraph.compile(folder, tmp_path / "a.kvg", target="cuda:sm_90", **given)
    assert set(products) == {E4M3}
    assert any(
        note == "weights: inputs of 14 linear layers are rounded to 8 bits, a scale for each row, "
        "since the checkpoint was made for rounded inputs"
        for note in manifest.notes
    )
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")
    names = {path.name.partition("-")[0] for path in (tmp_path / "a.kvg").rglob("*.cubin")}
    assert {"round_rows", "quantized_linear", "sum_linear"} <= names
    assert "expand_weight" not in names


def test_all_ranks_round(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """Kernels are compiled for the first rank alone; the second one has no program of its own."""
    folder = quantized.make("fp8-dynamic", plain("llama"), tmp_path / "model")
    out = tmp_path / "a.kvg"
    given = {"dtype": "bfloat16", "page_size": 16, "check": False, "tp": 2}
    kvgraph.compile(folder, out, target="cuda:sm_90", **given)
    assert forms_of(torch.export.load(out / "model.pt2")) == {(8, 0, E4M3, 8)}
    assert not (out / "rank1" / "model.pt2").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x_bits": 4}, "x_bits: expected 0 or 8, got 4"),
        ({"x_bits": 8, "group": 64, "codes": E4M3}, "x_bits: expected 0 for bits 8, group 64"),
        ({"x_bits": 8, "group": 128, "codes": 3}, "x_bits: expected 0 for bits 8, group 128"),
    ],
)
def test_what_no_kernel_multiplies_is_refused(changes: dict[str, int], said: str) -> None:
    groups = 128 // changes["group"] if "group" in changes else 1
    kind = torch.float8_e4m3fn if changes.get("codes") == E4M3 else torch.int8
    weight = torch.zeros(16, 128, dtype=kind)
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    attributes = {"out_features": 16, "bits": 8} | changes
    with pytest.raises(KernelError, match=said):
        QUANTIZED(x, weight, torch.ones(groups, 16), None, None, **attributes)


def test_a_row_of_zeros_and_one_that_is_not_finite() -> None:
    x = torch.randn(4, 32).numpy()
    x[1], x[2, 3], x[3, 0] = 0, float("nan"), float("inf")
    for codes in (E4M3, INTEGERS):
        found = matrices.rounded(x, codes)
        assert (found[1] == 0).all()
        assert not torch.from_numpy(found[2:]).isfinite().all(1).any()
        assert abs(found[0] - x[0]).max() <= abs(x[0]).max() / 16
