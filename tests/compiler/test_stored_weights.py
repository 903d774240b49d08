"""Checkpoints in fewer bits, kept as they are stored, and what becomes of other layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph import ModelError, UnsupportedError
from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.compiler.values import Coded, Cut, Share, Values
from kvgraph.ops.packed import CODE_BITS, COLUMNS, E2M1, INT8, LEVELS, NVFP4, Form, decode
from tests.support import gguf_files, quantized
from tests.support.plans import plan

Node = tuple[str, dict[str, int], dict[str, np.ndarray[Any, Any]]]


def graph_of(folder: Path) -> onnx.GraphProto:
    return onnx.load(folder / "model.onnx", load_external_data=False).graph


def arrays_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Weights by name, the small ones that the graph holds too."""
    tensors = load_file(folder / "weights.safetensors")
    inline = (
        each
        for each in graph_of(folder).initializer
        if each.data_location != onnx.TensorProto.EXTERNAL
    )
    stored = {name: _bytes(tensor).numpy() for name, tensor in tensors.items()}
    return stored | {each.name: onnx.numpy_helper.to_array(each) for each in inline}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What NumPy has no dtype for, as bytes."""
    known = tensor.dtype in (torch.float32, torch.int8, torch.int32, torch.int64)
    return tensor if known else tensor.view(torch.uint8)


def nodes(folder: Path) -> list[Node]:
    """Our packed weights, experts' first and second layer apart: op, attributes without the stem of
    `up` or `down`, and arrays by operand."""
    arrays, found = arrays_of(folder), []
    for node in graph_of(folder).node:
        if node.op_type in ("linear", "experts"):
            attributes = {a.name: a.i for a in node.attribute}
            held = {name.rpartition(".")[2]: arrays[name] for name in node.input if name in arrays}
            for stem in ("up_", "down_") if node.op_type == "experts" else ("",):
                own = {name.removeprefix(stem): value for name, value in attributes.items()}
                found.append((node.op_type, own, held))
    return found


def weights_of(node: Node) -> np.ndarray[Any, Any]:
    """`[panels * COLUMNS, K]` of a linear node in groups."""
    _, attributes, held = node
    given = [held.get(name) for name in ("scales", "group_bytes")]
    found = decode(held["packed"], *given, attributes["group"], attributes["codes"])
    return found.astype(np.float32)


@pytest.mark.parametrize(
    ("form", "group", "codes", "has_offsets"),
    [
        ("gptq", 32, 0, True),
        ("gptq-v2", 32, 0, True),
        ("awq", 32, 0, True),
        ("w4a16", 32, 0, False),
        ("w4a16-zero-points", 32, 0, True),
        ("mxfp4-packed", 32, 1, True),
        ("nvfp4", 16, 4, True),
        ("nvfp4-packed", 16, 4, True),
        ("fp8", 32, 2, False),
        ("w8a16", 32, 3, False),
    ],
)
def test_every_number_is_the_checkpoints(
    form: str,
    group: int,
    codes: int,
    has_offsets: bool,
    plain: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """In panels, gate and up in turn; q, k and v one behind the other. What a number of NVFP4 is
    depends on the order of its two factors, in the last bit."""
    alike = partial(np.allclose, rtol=1e-6, atol=0) if codes == NVFP4 else np.array_equal
    folder = quantized.make(form, plain("llama"), tmp_path / "model", tmp_path / "meant")
    kvgraph.compile(folder, tmp_path / "a.kvg", page_size=16, check=False)
    expected = load_file(tmp_path / "meant" / "model.safetensors")
    linears = [node for node in nodes(tmp_path / "a.kvg") if node[1]["group"]]
    kinds = {tuple(n[1][name] for name in ("bits", "group", "codes")) for n in linears}
    assert kinds == {(CODE_BITS[codes], group, codes)}
    assert all(("group_bytes" in held) == has_offsets for _, _, held in linears)
    layers = len({name.split(".")[2] for name in expected if ".layers." in name})
    assert len(linears) == 4 * layers
    wanted = [
        f"model.layers.{i}.{name}.weight"
        for i in range(layers)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    found = [weights_of(node) for node in linears]
    for name in wanted:
        weight = expected[name].float().numpy()
        n, k = weight.shape
        shares = [w[:n, :k] for w in found if w.shape[0] >= n and w.shape[1] >= k]
        assert any(alike(w, weight) for w in shares if w.shape == weight.shape), name
    for i in range(layers):
        gate, up = (
            expected[f"model.layers.{i}.mlp.{name}_proj.weight"].float().numpy()
            for name in ("gate", "up")
        )
        both = np.stack([w.reshape(-1, COLUMNS, w.shape[1]) for w in (gate, up)], 1)
        both = both.reshape(-1, gate.shape[1])
        assert any(w.shape[0] == len(both) and alike(w[:, : both.shape[1]], both) for w in found)


def put_out_of_order(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_shape")]:
        index = torch.randperm(int(tensors[name][1])) // quantized.GROUP
        tensors[name.replace("_shape", "_g_idx")] = index.int()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_layers_without_a_form_are_rounded_and_named(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Inputs out of order (act-order), and 8 bits with zero points: four bits would round them
    again, by scales of other inputs."""
    for form in ("gptq-act-order", "w4a16", "gptq-8"):
        folder = quantized.make(form, plain("llama"), tmp_path / form)
        if form == "w4a16":
            put_out_of_order(folder)
        manifest = kvgraph.compile(folder, tmp_path / f"{form}.kvg", page_size=16)
        assert (
            "weights: 14 of the layers that the checkpoint has in fewer bits are rounded to int8, "
            "since no kernel takes their form, or that of a layer beside them"
        ) in manifest.notes
        assert all(not attributes["group"] for _, attributes, _ in nodes(tmp_path / f"{form}.kvg"))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("kind", "form"), [("Q8_0", Form(8, 32, INT8)), ("Q4_0", Form(4, 32))])
def test_blocks_of_gguf(
    kind: str, form: Form, architecture: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every number is the one that the gguf package reads; rows of queries and keys go back to
    their places."""
    path = gguf_files.make(plain(architecture), tmp_path / "model.gguf", kind)
    with as_folder(path) as folder:
        linears = [v for name, v in checkpoint(folder).items() if name.endswith("proj.weight")]
        assert len(linears) == 14
        for each in linears:
            assert each.form == form
            assert torch.equal(meant(each.open_coded()(0, each.count), form), each.read())
    manifest = kvgraph.compile(path, tmp_path / "a.kvg", page_size=16)
    assert not any("rounded" in note for note in manifest.notes)
    kept = [attributes for _, attributes, _ in nodes(tmp_path / "a.kvg") if attributes["group"]]
    assert {(a["bits"], a["group"], a["codes"]) for a in kept} == {(form.bits, 32, form.codes)}
    planned = plan(path, target="cpu", memory=1 << 30, max_seq_len=None)
    made = sum(array.nbytes for array in arrays_of(tmp_path / "a.kvg").values())
    assert planned.weights == pytest.approx(made, rel=0.02)


def test_a_damaged_scale_of_gguf(plain: Callable[[str], Path], tmp_path: Path) -> None:
    path = gguf_files.make(plain("qwen3"), tmp_path / "model.gguf", "Q8_0")

    def first_row() -> Coded:
        with as_folder(path) as folder:
            found = checkpoint(folder)
        name = next(name for name in found if name.endswith("0.mlp.up_proj.weight"))
        return found[name].open_coded()(0, 1)

    at = path.read_bytes().index(first_row().numbers[0, :32].numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(at - 2)
        file.write(np.float16(np.nan).tobytes())
    sentence = r"ffn_up.weight\[0\]: block 0: expected a finite scale, got nan"
    with pytest.raises(ModelError, match=f"{sentence}{quantized.INSTEAD}$"):
        first_row()


def test_layers_of_one_input_in_several_forms(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """They are nodes of their own; gate and up, which one node joins, are rounded."""
    folder = quantized.make("w4a16", plain("llama"), tmp_path / "four")
    eight = quantized.make("w8a16-channel", plain("llama"), tmp_path / "eight")
    quantized.mixed(folder, eight, "model.layers.0.self_attn.v_proj.")
    quantized.add_group(folder, "w8a16-channel", "model.layers.0.self_attn.v_proj.")
    quantized.mixed(folder, plain("llama"), "model.layers.1.self_attn.k_proj.")
    manifest = kvgraph.compile(folder, tmp_path / "a.kvg", page_size=16, check=False)
    kinds = [(a["bits"], a["group"]) for _, a, _ in nodes(tmp_path / "a.kvg")]
    assert sorted(kinds) == [(4, 32)] * 8 + [(8, 0)] + [(16, 0)] * 2
    assert not any("rounded" in note for note in manifest.notes)
    quantized.mixed(folder, eight, "model.layers.0.mlp.up_proj.")
    quantized.add_group(folder, "w8a16-channel", "model.layers.0.mlp.up_proj.")
    manifest = kvgraph.compile(folder, tmp_path / "b.kvg", page_size=16, check=False)
    assert any("2 of the layers" in n and "rounded to int8" in n for n in manifest.notes)


@pytest.mark.parametrize(
    ("architecture", "form", "rounded", "kept"),
    [
        # 16 inputs of a rank in the experts' second layer: half a group
        ("qwen3_moe", "gptq-act-order", "int4 int8", {False}),
        ("llama", "awq", "int4", {True, False}),  # 48 inputs of a rank: a group and a half
        ("llama", "nvfp4", "", {True, False}),
        ("qwen3_moe", "nvfp4", "", {True, False}),
        ("qwen3_moe", "fp8-channel", "", {True, False}),
    ],
)
def test_ranks(
    architecture: str,
    form: str,
    rounded: str,
    kept: set[bool],
    plain: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Compile's own check runs both; what is rounded has its tolerance."""
    folder = quantized.make(form, plain(architecture), tmp_path / form)
    manifest = kvgraph.compile(folder, tmp_path / "a.kvg", page_size=16, tp=2)
    said = [note for note in manifest.notes if "are rounded to" in note]
    assert [note.split("rounded to ")[1].split(",")[0] for note in said] == rounded.split()
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")
    assert {a["group"] > 0 for _, a, _ in nodes(tmp_path / "a.kvg")} == kept


def test_backend_torch(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("awq", plain("llama"), tmp_path / "awq")
    out = tmp_path / "a.kvg"
    kvgraph.compile(folder, out, page_size=16, backend="torch", weights="stored")
    found = load_file(out / "weights.safetensors")
    packed = sorted(str(each.dtype) for name, each in found.items() if name.endswith(".packed"))
    assert packed == ["torch.bfloat16"] + ["torch.int8"] * 8


def test_plain_checkpoints_are_refused(plain: Callable[[str], Path], tmp_path: Path) -> None:
    sentence = (
        "weights: expected a checkpoint whose weights are in fewer bits for 'stored', got a plain "
        "one; others are ['fp32', 'bf16', 'int8', 'int4']"
    )
    for target in ("cpu", "cuda:sm_90"):
        with pytest.raises(UnsupportedError) as raised:
            kvgraph.compile(plain("llama"), tmp_path / "a.kvg", weights="stored", target=target)
        assert str(raised.value) == sentence
    assert not (tmp_path / "a.kvg").exists()


def checkpoint(folder: Path) -> Mapping[str, Values]:
    found = huggingface.load(folder, "float32", weightless=True).checkpoint
    assert isinstance(found, Checkpoint)
    return found.values


@pytest.mark.parametrize(
    ("architecture", "form", "end"),
    [
        ("llama", "awq", "mlp.up_proj.weight"),
        ("llama", "w4a16-zero-points", "mlp.down_proj.weight"),
        ("llama", "w8a8", "mlp.down_proj.weight"),
        ("qwen3_moe", "awq", "experts.gate_up_proj"),
        ("qwen3_moe", "w4a16", "experts.down_proj"),
        ("gpt_oss", "mxfp4", "experts.gate_up_proj"),
        ("llama", "nvfp4", "mlp.down_proj.weight"),
        ("qwen3_moe", "nvfp4-packed", "experts.gate_up_proj"),
        ("qwen3_moe", "nvfp4", "experts.down_proj"),
        ("llama", "w8a16", "mlp.up_proj.weight"),
        ("qwen3_moe", "w8a16", "experts.gate_up_proj"),
        ("llama", "fp8", "mlp.down_proj.weight"),
        ("llama", "fp8-tensor", "mlp.down_proj.weight"),
        ("qwen3_moe", "fp8", "experts.gate_up_proj"),
    ],
)
def test_shares_of_ranks_have_the_numbers_that_they_would_read(
    architecture: str, form: str, end: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of outputs, of inputs where groups are whole, and of experts."""
    folder = quantized.make(form, plain(architecture), tmp_path / "model")
    given = checkpoint(folder)
    name = next(name for name in sorted(given) if name.endswith(end))
    whole = given[name]
    assert whole.form is not None
    last_bits = 1e-6 if whole.form.codes == NVFP4 else 0.0
    kept = 0
    for dim in range(len(whole.shape)):
        for rank in range(2):
            own = Cut(whole, Share(dim, (1,), 2, rank))
            if own.form is None:
                continue
            kept += 1
            coded = own.open_coded()(0, own.count)
            numbers = own.read()
            if own.is_coded_transposed:
                numbers = numbers.transpose(-1, -2)
            torch.testing.assert_close(meant(coded, own.form), numbers, rtol=last_bits, atol=0)
    assert kept >= 2


def meant(coded: Coded, form: Form) -> torch.Tensor:
    """The numbers that coded rows stand for."""
    scales = coded.scales
    if form.codes == E2M1:
        scales = torch.exp2(scales.float() - 127)
    if coded.factors is not None:
        scales = scales.view(torch.float8_e4m3fn).float() * coded.factors
    levels = torch.from_numpy(LEVELS[form.codes])
    numbers = levels[coded.numbers.long()] if form.group else coded.numbers.float()
    each = numbers.shape[-1] // scales.shape[-1]
    if coded.offsets is not None:
        numbers = numbers + coded.offsets.repeat_interleave(each, -1)
    return numbers * scales.repeat_interleave(each, -1)


def test_a_plan_counts_what_an_artifact_has(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """Within the head, and small parts that a plan does not see."""
    for form in (
        "awq",
        "w4a16",
        "mxfp4-packed",
        "nvfp4",
        "nvfp4-packed",
        "w8a8",
        "w8a16",
        "fp8",
        "fp8-channel",
    ):
        folder = quantized.make(form, plain("llama"), tmp_path / form)
        out = tmp_path / f"{form}.kvg"
        kvgraph.compile(folder, out, page_size=16, check=False)
        planned = plan(folder, target="cpu", memory=1 << 30, max_seq_len=None)
        assert planned.weights_dtype == "stored"
        made = sum(array.nbytes for array in arrays_of(out).values())
        assert planned.weights == pytest.approx(made, rel=0.02), form
