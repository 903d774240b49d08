"""Linear layers over packed weights: what becomes one node, how near it stays, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

import kvgraph
from kvgraph import ops
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.drop_batch_dim import drop_batch_dim
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_rope import fuse_rope
from kvgraph.compiler.passes.pack_linear import PACKED, pack_linear
from kvgraph.compiler.values import Converted
from kvgraph.compiler.weights import Weights
from kvgraph.contract.dtypes import AS_STORED
from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import ModelError, UnsupportedError
from kvgraph.ops.packed import MOST_SUMMED, Form
from tests.support.models import layers, make_model
from tests.support.programs import packed_by, program_of, step

LAYERS, POSITIONS = 4, 512
TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"

# Architecture -> nodes of a layer, and layers of it that silu_mul or a residual goes into.
NODES: dict[str, tuple[int, int, int]] = {
    "llama": (4, 1, 2),  # qkv, o with its residual, gate and up, down with its residual
    "qwen2": (4, 1, 2),
    "qwen3": (4, 1, 2),
    "mistral": (4, 1, 2),
    "phi3": (4, 1, 2),  # one weight for q, k and v, and one for gate and up, which is cut in two
    "gemma2": (4, 0, 0),  # gelu; norms before the sums
    "gemma3_text": (4, 0, 0),
    "gpt2": (4, 0, 2),  # weights are stored transposed
    "gpt_oss": (2, 0, 1),  # the router and the experts keep their weights
}


def packed(name: str, bits: int, folder: Path) -> tuple[ExportedProgram, Any, Any, PassReport]:
    """The program after the pass, the module before it, the signature, the report."""
    program, signature = program_of(make_model(name, folder / name), "float32")
    before = program.module()
    fuse_rope(program, signature, POSITIONS)
    drop_no_ops(program.graph)
    drop_batch_dim(program.graph)
    return program, before, signature, packed_by(pack_linear, program, bits)


def nodes(program: ExportedProgram) -> list[Node]:
    return [node for node in program.graph.nodes if node.target is PACKED]


@pytest.mark.parametrize("name", NODES)
def test_layers_of_one_input_become_one_node(name: str, tmp_path: Path) -> None:
    program, _, _, report = packed(name, 8, tmp_path)
    found = nodes(program)
    per_layer, gated, residuals = NODES[name]
    count = layers(name)
    assert len(found) == per_layer * count + 1  # and the head
    assert sum("silu_mul" in node.kwargs for node in found) == gated * count
    assert sum(node.args[5] is not None for node in found) == residuals * count
    left = Counter(n.target for n in program.graph.nodes)[torch.ops.aten.linear.default]
    assert left == (count if name == "gpt_oss" else 0)
    assert (report.unmatched == []) == (name != "gpt_oss")
    assert all("a router" in why for why in report.unmatched)
    names = set(program.state_dict)
    given = ("q_proj.weight", "qkv_proj.weight", "gate_up_proj.weight", "c_fc.weight")
    assert not [n for n in names if n.endswith(given)]  # stored once
    for spec in program.graph_signature.input_specs:
        assert spec.target is None or spec.target in names | set(program.constants) | set(
            program.graph_signature.buffers
        )


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize(("bits", "most"), [(16, 0.03), (8, 0.09), (4, 0.6)])
def test_logits_stay_near(name: str, bits: int, most: float, tmp_path: Path) -> None:
    """Error over spread of the logits. These are random weights of 64 columns, the hardest case;
    a trained model's perplexity is in test_quality.py."""
    program, before, signature, _ = packed(name, bits, tmp_path)
    after: Any = program.module()
    inputs = [step(signature, "float32", [5, 1, 20]) for _ in range(2)]
    with torch.no_grad():
        expected, found = before(*inputs[0])[0], after(*inputs[1])[0]
    error = (found - expected).abs().mean() / expected.std()
    assert error < most
    assert error > 0  # the packed weights are what is used


Compiled = Callable[..., Path]


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_artifacts_of_both_backends_agree(backend: str, weights: str, compiled: Compiled) -> None:
    out = compiled("tiny-llama", backend, weights=weights)
    manifest = kvgraph.load(out).manifest
    assert manifest.weights == weights
    assert manifest.ops["kvgraph.linear"] == 4 * LAYERS + 1
    sampling = kvgraph.SamplingParams(max_new_tokens=12)
    text = kvgraph.Engine(out).generate(["The with statement"], sampling)[0].text
    plain = compiled("tiny-llama")
    exact = kvgraph.Engine(plain).generate(["The with statement"], sampling)[0].text
    assert weights == "int4" or text == exact
    assert len(text) > 10


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_tokens_do_not_depend_on_the_batch(weights: str, tmp_path: Path) -> None:
    """Ragged rows in one batch, in chunks, and each alone: the same tokens."""
    kvgraph.compile(TINY, tmp_path / "a.kvg", weights=weights)
    prompts = [[5 + (7 * i * j) % 900 for j in range(3 + 11 * i)] for i in range(6)]
    sampling = kvgraph.SamplingParams(max_new_tokens=12, ignore_eos=True)

    def tokens(given: list[list[int]], **settings: int) -> list[list[int]]:
        engine = kvgraph.Engine(tmp_path / "a.kvg", **settings)  # type: ignore[arg-type]
        return [done.token_ids for done in engine.generate(given, sampling)]

    together = tokens(prompts)
    assert together == [tokens([prompt])[0] for prompt in prompts]
    assert together == tokens(prompts, max_batch_tokens=16)


@pytest.mark.parametrize(
    ("backend", "table"),
    [("onnx", "model.lm_head.weight"), ("torch", "model.lm_head.weight_float16")],
)
def test_each_weight_is_stored_once_and_the_table_in_float16(
    backend: str, table: str, compiled: Compiled
) -> None:
    layout = read_layout(compiled("tiny-llama", backend, weights="int8") / "weights.safetensors")
    stored = {name: at.dtype for name, at in layout.items() if at.nbytes > 4096}
    assert Counter(stored.values()) == {"I8": 4 * LAYERS + 1, "F16": 1, "F32": LAYERS + 2}
    assert stored[table] == "F16"
    assert "F32" not in {stored[n] for n in stored if not n.endswith(("scales", "cos_sin_0"))}
    assert all(at.offset % 64 == 0 for name, at in layout.items() if name in stored)


def test_a_bfloat16_checkpoint_keeps_its_weights_on_onnx(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "half", dtype="bfloat16")
    assert kvgraph.compile(folder, tmp_path / "a.kvg").weights == "bf16"
    assert kvgraph.compile(folder, tmp_path / "b.kvg", dtype="float32").weights == "fp32"
    assert kvgraph.compile(TINY, tmp_path / "c.kvg").weights == "fp32"


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_model("llama", tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 2] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for weights in ("int8", "fp32"):
        with pytest.raises(ModelError) as raised:
            kvgraph.compile(folder, tmp_path / "a.kvg", weights=weights)
        assert str(raised.value) == (
            f"{folder}/model.safetensors: {name}[3, 2]: expected a finite number in float32, "
            "got nan"
        )
        assert not (tmp_path / "a.kvg").exists()


def swiglu(gate: Any, up: Any, *_: Any) -> Any:
    return nn.functional.silu(gate) * up


# How one layer's result is cut, what is made of the parts, and whether the layer computes that.
HALVES: dict[str, tuple[Callable[[Any], Any], Callable[..., Any], int]] = {
    "gate first": (lambda y: y.chunk(2, -1), swiglu, 1),
    "up first": (lambda y: y.chunk(2, -1), lambda up, gate: up * nn.functional.silu(gate), 1),
    "split": (lambda y: y.split(40, -1), swiglu, 1),
    "split by sizes": (lambda y: y.split((40, 40), -1), swiglu, 1),
    "three parts": (lambda y: y.split((30, 30, 20), -1), swiglu, 0),
    "by rows": (lambda y: y.chunk(2, 0), swiglu, 0),
    "squared": (lambda y: y.chunk(2, -1), lambda gate, up: swiglu(gate, gate) + up, 0),
    "up used twice": (lambda y: y.chunk(2, -1), lambda gate, up: swiglu(gate, up) + up, 0),
    "whole used too": (
        lambda y: (*y.chunk(2, -1), y),
        lambda gate, up, y: swiglu(gate, up) + y.amax(),
        0,
    ),
}


class Halves(nn.Module):
    """A product by a parameter that is no layer's, then a layer, whose result is cut."""

    def __init__(self, cut: Callable[[Any], Any], mix: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.mix, self.fused = cut, mix, nn.Linear(80, 80)
        self.raw = nn.Parameter(torch.randn(80, 64) / 8)

    def forward(self, x: Any) -> Any:
        return self.mix(*self.cut(self.fused(nn.functional.linear(x, self.raw))))


@pytest.mark.parametrize("case", HALVES)
def test_halves_of_one_layer(case: str) -> None:
    """40 columns: the last panel of gate and of up is padded."""
    cut, mix, gated = HALVES[case]
    module, x = Halves(cut, mix), torch.randn(6, 64)
    program = torch.export.export(module, (x,))
    expected = module(x)
    report = packed_by(pack_linear, program, 16)
    assert sum("silu_mul" in node.kwargs for node in nodes(program)) == gated
    assert report.applied == len(nodes(program)) == 2
    after: Any = program.module()
    with torch.no_grad():
        error = (after(x) - expected).abs().mean() / expected.std()
    assert 0 < error < 0.03


class Head(nn.Module):
    """A module of one's own, whose last linear layer is what it returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(48, 32), nn.Linear(32, 48)
        self.qkv = nn.Linear(32, 64)

    def forward(self, tokens: Any, offsets: Any, chosen: Any, pool: Any, *index: Any) -> Any:
        lengths, table, most = index
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
        x = (x + out.reshape(x.shape[0], -1) @ self.qkv.weight[:32])[chosen.long()]
        return self.head(x)


class Gated(nn.Module):
    """A layer of one output, whose weight is a row."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row = nn.Parameter(torch.rand(64, dtype=dtype))
        self.layer = nn.Linear(64, 64, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * nn.functional.linear(x[None], self.row)[0].sigmoid()[:, None]


def test_a_layer_whose_weight_is_a_row_stays() -> None:
    report = packed_by(pack_linear, torch.export.export(Gated(), (torch.rand(5, 64),)), 16)
    assert report.applied == 1
    assert report.unmatched == ["linear_1: expected a matrix of weights, got 1 dims"]


def test_a_module_of_one_s_own(tmp_path: Path) -> None:
    params = kvgraph.KVCacheParams("float32", n_kv_heads=2, head_dim=8, num_layers=1, page_size=4)
    tokens = []
    for backend in ("onnx", "torch"):
        out = tmp_path / backend
        manifest = kvgraph.compile(
            Head(),
            out,
            backend=backend,
            weights="int8",
            params=params,
            vocab_size=48,
            max_seq_len=64,
        )
        assert manifest.ops["kvgraph.linear"] == 2
        entry = next(entry for entry in manifest.passes if entry.name == "pack_linear")
        assert entry.applied == 2
        engine = kvgraph.Engine(out, num_pages=16)
        tokens.append(engine.generate([[1, 2, 3, 4, 5]])[0].token_ids)
    assert tokens[0][:8] == tokens[1][:8]  # then a near tie of random weights falls apart
    assert len(tokens[0]) == len(tokens[1]) == 59


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "unknown": (
        {"weights": "int2"},
        "weights: expected one of ['fp32', 'bf16', 'int8', 'int4', 'stored'], got 'int2'",
    ),
    "on a GPU": (
        {"weights": "bf16", "target": "cuda:sm_90"},
        "weights: expected one of ['int8', 'int4', 'stored'] for target cuda, where others have "
        "the activations' --dtype, got 'bf16'",
    ),
    "with activations of another dtype": (
        {"weights": "int4", "backend": "torch", "dtype": "bfloat16"},
        "dtype: expected float32 activations with weights 'int4', got 'bfloat16'; leave it "
        "out with such weights",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_a_target_cannot_do(case: str, tmp_path: Path) -> None:
    settings, sentence = REFUSED[case]
    with pytest.raises(UnsupportedError) as raised:
        kvgraph.compile(TINY, tmp_path / "a.kvg", **settings)  # type: ignore[arg-type]
    assert str(raised.value) == sentence


def test_equal_compiles_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        kvgraph.compile(TINY, tmp_path / name, weights="int4")
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_the_graph_over_packed_weights_equals_its_reference(tmp_path: Path) -> None:
    """ONNX Runtime with native kernels against onnx's evaluator with the NumPy references."""
    kvgraph.compile(TINY, tmp_path / "a.kvg", weights="int4")
    prompt = list(range(5, 25))
    texts = [
        kvgraph.Engine(tmp_path / "a.kvg", session=session).generate(
            [prompt], kvgraph.SamplingParams(max_new_tokens=6)
        )[0]
        for session in ("onnxruntime", "reference")
    ]
    assert texts[0].token_ids == texts[1].token_ids
    assert np.array(texts[0].token_ids).size == 6


@pytest.mark.parametrize(("extra", "expected"), [(0, 8), (1, 16)])
def test_more_inputs_than_int32_sums_are_kept_in_bfloat16(extra: int, expected: int) -> None:
    x = torch.ones(3, MOST_SUMMED + extra)
    program = torch.export.export(nn.Linear(x.shape[1], 2), (x,))
    weights = Weights()
    pack_linear(program, 8, weights)
    weights.fill(program)
    (node,) = nodes(program)
    assert node.kwargs["bits"] == expected
    assert weights.notes() == extra * [
        "weights: bf16 for 1 layer, since kernels sum at most 131072 inputs in int8 or int4 "
        "without groups"
    ]


class InInt8(Converted):
    """A weight stored in int8 with a scale for each row."""

    @property
    def form(self) -> Form:
        return Form(8)


def test_int8_of_a_checkpoint_is_kept_up_to_what_int32_sums() -> None:
    stored = InInt8("a", (2, 4), torch.float32, lambda: torch.zeros(2, 4), 8)
    for inputs, expected in ((MOST_SUMMED, (Form(8), True)), (MOST_SUMMED + 1, (Form(16), False))):
        weights = Weights()
        found = weights.form_of([stored], AS_STORED, takes=lambda form, n=inputs: form.sums(n))
        assert found == expected
        assert bool(weights.notes()) == (not found[1])
