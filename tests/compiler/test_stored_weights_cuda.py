"""Checkpoints in fewer bits for CUDA: which numbers are kept, and what becomes of other layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.export import ExportedProgram
from torch.fx import Node

import kvgraph
from kvgraph.compiler import gpu_weights
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.kept_rows import in_groups
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_experts import FUSED, fuse_experts
from kvgraph.compiler.passes.parameters import stored_of
from kvgraph.compiler.passes.quantize_linear import QUANTIZED, quantize_linear
from kvgraph.compiler.values import Coded, CodedRows, Rows, Values
from kvgraph.compiler.weights import Weights
from kvgraph.contract.dtypes import AS_STORED
from kvgraph.contract.safetensors import read_layout
from kvgraph.ops import QUANTIZED_LINEAR, matrices, packed, packed_rules
from kvgraph.ops.packed import E2M1, E4M3, INT8, INTEGERS, LEVELS, Form
from kvgraph.ops.torch_arrays import array_over
from tests.support import quantized
from tests.support.packed import keep
from tests.support.plans import plan
from tests.support.programs import program_of, step

Array = np.ndarray[Any, Any]


def kept(
    plain: Path, folder: Path, dtype: str = "float32", *, rounded: int = 0
) -> tuple[ExportedProgram, PassReport]:
    """The program of `plain` over the weights of `folder`, as they are stored; `rounded`: layers
    that have no form."""
    program, _ = program_of(plain, dtype, weightless=True)
    weights = Weights(huggingface.load(folder, dtype, weightless=True).checkpoint)
    drop_no_ops(program.graph)
    fuse_experts(program, AS_STORED, weights)
    report = quantize_linear(program, AS_STORED, weights)
    weights.fill(program)
    assert sum(map(len, weights.rounded.values())) == rounded
    return program, report


def nodes(program: ExportedProgram, target: object = QUANTIZED) -> list[Node]:
    return [node for node in program.graph.nodes if node.target is target]


def form_of(node: Node, stem: str = "") -> tuple[int, int, int]:
    bits, group, codes = (node.kwargs.get(name, 0) for name in packed_rules.form_of(stem))
    return bits, group, codes  # type: ignore[return-value]


def forms_of_experts(program: ExportedProgram) -> set[tuple[int, int, int]]:
    return {form_of(n, stem) for n in nodes(program, FUSED) for stem in ("up_", "down_")}


def decoded(program: ExportedProgram, node: Node) -> Array:
    """The weight of a linear node."""
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    operands = QUANTIZED_LINEAR.arguments(node.args, {})
    given = [
        None if operands[name] is None else program.state_dict[str(names[operands[name].name])]
        for name in ("weight", "scales", "group_bytes")
    ]
    arrays = [None if each is None else array_over(each.detach()) for each in given]
    inputs = operands["x"].meta["val"].shape[-1]
    return matrices.decode(*arrays, inputs, *form_of(node))  # type: ignore[arg-type]


FORMS = {
    "gptq": (4, 32, INTEGERS),
    "awq": (4, 32, INTEGERS),
    "w4a16-zero-points": (4, 32, INTEGERS),
    "mxfp4-packed": (4, 32, E2M1),
    "w8a8": (8, 0, INTEGERS),
    "w8a16": (8, 32, INT8),
    "fp8": (8, 32, E4M3),
    "fp8-channel": (8, 0, E4M3),
    "fp8-tensor": (8, 0, E4M3),
}
"""Forms of checkpoints -> bits, inputs of a group and codes."""


@pytest.mark.parametrize("form", FORMS)
def test_every_number_is_the_checkpoints(
    form: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """q, k and v one behind the other; gate and up in turn; the head, which is plain, as it is."""
    folder = quantized.make(form, plain("llama"), tmp_path / "model", tmp_path / "meant")
    program, report = kept(plain("llama"), folder)
    linears = nodes(program)
    assert {form_of(n) for n in linears} == {FORMS[form]}
    assert any("dtype best" in why for why in report.unmatched)
    expected = load_file(tmp_path / "meant" / "model.safetensors")
    found = [decoded(program, node) for node in linears]
    layers = len({name.split(".")[2] for name in expected if ".layers." in name})
    assert len(found) == 4 * layers
    for weight in of_layers(expected, layers):
        assert any(np.array_equal(each, weight) for each in found)


def of_layers(expected: Mapping[str, torch.Tensor], layers: int) -> list[Array]:
    """What each node holds."""

    def named(layer: int, *names: str) -> list[Array]:
        stem = f"model.layers.{layer}."
        return [expected[f"{stem}{name}_proj.weight"].float().numpy() for name in names]

    wanted = []
    for i in range(layers):
        wanted.append(np.concatenate(named(i, "self_attn.q", "self_attn.k", "self_attn.v")))
        gate, up = named(i, "mlp.gate", "mlp.up")
        wanted.append(np.stack([gate, up], 1).reshape(-1, gate.shape[1]))
        wanted += named(i, "self_attn.o", "mlp.down")
    return wanted


@pytest.mark.parametrize(
    ("architecture", "form"), [("llama", "awq"), ("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")]
)
def test_logits_are_those_of_the_numbers(
    architecture: str, form: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Linear layers, and experts of which each has gate and up in turn."""
    folder = quantized.make(form, plain(architecture), tmp_path / "model", tmp_path / "meant")
    program, _ = kept(plain(architecture), folder)
    exact, signature = program_of(tmp_path / "meant", "float32")
    if architecture != "llama":
        wanted = (8, 32, E4M3) if form == "fp8" else (4, 32, E2M1)
        assert forms_of_experts(program) == {wanted}
    with torch.no_grad():
        found, expected = (
            each.module()(*step(signature, "float32", [5, 1, 20]))[0] for each in (program, exact)
        )
    assert (found - expected).norm() < 1e-4 * expected.norm()


def test_layers_of_one_input_in_several_forms(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """They are nodes of their own, gate and up too; what is plain keeps its dtype."""
    folder = quantized.make("w4a16", plain("llama"), tmp_path / "four")
    eight = quantized.make("w8a16-channel", plain("llama"), tmp_path / "eight")
    quantized.mixed(folder, eight, "model.layers.0.self_attn.v_proj.")
    quantized.add_group(folder, "w8a16-channel", "model.layers.0.self_attn.v_proj.")
    quantized.mixed(folder, eight, "model.layers.0.mlp.up_proj.")
    quantized.add_group(folder, "w8a16-channel", "model.layers.0.mlp.up_proj.")
    quantized.mixed(folder, plain("llama"), "model.layers.1.self_attn.k_proj.")
    program, report = kept(plain("llama"), folder, "bfloat16")
    kinds = [form_of(node)[:2] for node in nodes(program)]
    assert sorted(kinds) == [(4, 32)] * 8 + [(8, 0)] * 2
    assert sum("silu_mul" in node.kwargs for node in nodes(program)) == 1
    assert sum("dtype best" in why for why in report.unmatched) == 2  # and the head


class Held(Values):
    """Rows in memory, as they are stored."""

    where, dtype = "held", torch.float32

    def __init__(self, coded: Coded, form: Form) -> None:
        self.shape, self._coded, self._form = tuple(coded.numbers.shape), coded, form

    @property
    def form(self) -> Form:
        return self._form

    def open(self) -> Rows:
        raise NotImplementedError

    def open_coded(self) -> CodedRows:
        return lambda start, stop: self._coded.map(lambda part: part[start:stop])


@pytest.mark.parametrize(("group", "inputs"), [(256, 300), (96, 192), (384, 384)])
def test_larger_groups_repeat_their_scales(group: int, inputs: int) -> None:
    """The last group may be cut; one that 32 alone divides becomes groups of 32."""
    numbers = torch.randint(0, 16, (6, inputs), dtype=torch.uint8)
    groups = -(-inputs // group)
    coded = Coded(numbers, torch.rand(6, groups), torch.randint(-8, 9, (6, groups)).to(torch.int8))
    form = matrices.of_kernels(Form(4, group, has_offsets=True))
    assert form.group == (32 if group == 96 else 128)
    rows = in_groups(Held(coded, Form(4, group)), form.group)
    given = stored_of(rows(1, 5))
    found = gpu_weights.kept(given, form)
    arrays = [found[name].numpy() for name in ("weight", "scales", "group_bytes")]
    levels = torch.from_numpy(LEVELS[INTEGERS])[numbers[1:5].long()]
    assert coded.offsets is not None
    offsets, scales = (
        part[1:5].repeat_interleave(group, 1)[:, :inputs] for part in (coded.offsets, coded.scales)
    )
    wanted = ((levels + offsets) * scales).numpy()
    assert np.array_equal(matrices.decode(*arrays, inputs, 4, form.group), wanted)
    panels = keep([given], form)  # the same on a CPU
    operands = panels.weight, panels.scales, panels.group_bytes
    decoded = packed.decode(*operands, form.group, form.codes)[:4, :inputs]
    assert np.array_equal(decoded.astype(np.float32), wanted)


@pytest.mark.parametrize(("form", "bits"), [("gptq-act-order", 8), ("gptq-8", 8), ("nvfp4", 8)])
def test_layers_without_a_form_are_rounded(
    form: str, bits: int, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Inputs out of order, 8 bits with zero points, and groups of 16."""
    folder = quantized.make(form, plain("llama"), tmp_path / "model")
    program, _ = kept(plain("llama"), folder, rounded=14)
    assert {form_of(node) for node in nodes(program)} == {(bits, 0, INTEGERS)}


def test_float8_without_a_form_has_the_activations_dtype(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Blocks 48 wide, which no kernel takes: a note counts them."""
    folder = quantized.make("fp8-block", plain("llama"), tmp_path / "model")
    for target, dtype in (("cuda:sm_90", "bfloat16"), ("cpu", None)):
        out = tmp_path / target.partition(":")[0]
        given = {"dtype": dtype, "page_size": 16, "check": False}
        manifest = kvgraph.compile(folder, out, target=target, **given)  # type: ignore[arg-type]
        kind = dtype or "bf16"
        said = f"weights: 14 of the layers that the checkpoint has in FP8 have {kind}, since no"
        assert any(note.startswith(said) for note in manifest.notes), manifest.notes


def test_experts_without_a_form_are_rounded(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("nvfp4", plain("qwen3_moe"), tmp_path / "model")
    program, _ = kept(plain("qwen3_moe"), folder, rounded=12)
    assert forms_of_experts(program) == {(8, 0, INTEGERS)}


@pytest.mark.parametrize("form", ["fp8-channel", "nvfp4"])
def test_artifacts(form: str, plain: Callable[[str], Path], tmp_path: Path) -> None:
    """`stored` is the default, and a plan counts the same; compile's own check runs."""
    folder = quantized.make(form, plain("llama"), tmp_path / "model")
    out = tmp_path / "a.kvg"
    manifest = kvgraph.compile(folder, out, target="cuda:sm_80", dtype="bfloat16", page_size=16)
    assert (manifest.weights, manifest.dtype) == ("stored", "bfloat16")
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")
    assert any("rounded to int8" in note for note in manifest.notes) == (form == "nvfp4")
    held = read_layout(out / "weights.safetensors")
    nbytes = sum(at.nbytes for name, at in held.items() if "inv_freq" not in name)
    planned = plan(folder, target="cuda:sm_80", dtype="bfloat16", memory=1 << 30, max_seq_len=None)
    assert planned.weights_dtype == "stored"
    assert planned.weights == pytest.approx(nbytes, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        ("gpt_oss", "mxfp4"),
        ("qwen3_moe", "fp8-channel"),
        ("llama", "w8a8"),
        ("llama", "w8a16"),
        ("llama", "fp8-dynamic"),
    ],
)
def test_ranks(architecture: str, form: str, plain: Callable[[str], Path], tmp_path: Path) -> None:
    """Compile's own check runs both; nothing is rounded that has a form."""
    folder = quantized.make(form, plain(architecture), tmp_path / form)
    manifest = kvgraph.compile(
        folder, tmp_path / "a.kvg", target="cuda:sm_90", dtype="bfloat16", page_size=16, tp=2
    )
    kept = [note for note in manifest.notes if "are rounded to int8" in note]
    assert len(kept) == (form == "w8a16")  # down has 48 inputs of a rank, and its groups 32
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")
