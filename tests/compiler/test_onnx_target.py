"""What an ONNX artifact contains: schemas, symbols, weights once, equal bytes, no paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from safetensors import safe_open

import kvgraph
from kvgraph.contract.signature import output_name
from kvgraph.ops.onnx_ops import register_schemas
from tests.support.models import make_model

Compiled = Callable[..., Path]


def dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_plain_onnx_opens_and_infers_it(compiled: Compiled) -> None:
    register_schemas()
    path = compiled("gemma2") / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, data_prop=True)
    known = {value.name: value for value in model.graph.value_info}
    for node in model.graph.node:
        if node.domain == "kvgraph":
            assert dims(known[node.output[0]]) == ["total_seq_len", 4, 16]


def test_its_symbols_are_the_manifests(compiled: Compiled) -> None:
    folder = compiled("gemma2")
    signature = kvgraph.load(folder).signature
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    assert [(v.name, dims(v)) for v in graph.input] == [
        (s.name, list(s.shape)) for s in signature.inputs
    ]
    assert [(v.name, dims(v)) for v in graph.output] == [
        (output_name(s), list(s.shape)) for s in signature.outputs
    ]


def test_one_cache_node_per_layer_hands_the_pool_on(compiled: Compiled) -> None:
    graph = onnx.load(compiled("gemma2") / "model.onnx", load_external_data=False).graph
    nodes = [node for node in graph.node if node.domain == "kvgraph"]
    assert [node.op_type for node in nodes] == ["update_and_attend"] * 3
    for leaf, nodes_of_leaf in (("sliding", nodes[0::2]), ("full", nodes[1::2])):
        pools = [f"{leaf}.kv_blocks", *(node.output[1] for node in nodes_of_leaf)]
        assert [node.input[1] for node in nodes_of_leaf] == pools[:-1]
        assert pools[-1] == f"{leaf}.kv_blocks_out"
    found = [{a.name: a for a in node.attribute} for node in nodes]
    assert [(f["layer"].i, f["window"].i) for f in found] == [(0, 24), (0, 0), (1, 24)]


def test_tied_weights_are_stored_once(compiled: Compiled) -> None:
    with safe_open(compiled("gemma2") / "weights.safetensors", framework="numpy") as file:
        shapes = [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    assert shapes.count((160, 64)) + shapes.count((64, 160)) == 1


def test_weights_keep_their_parameters_names(compiled: Compiled) -> None:
    with safe_open(compiled("llama") / "weights.safetensors", framework="numpy") as file:
        names = list(file.keys())
    assert [name for name in names if not name.startswith("model.")] == ["kvgraph.cos_sin_0"]


def test_compiling_twice_gives_the_same_bytes(compiled: Compiled, tmp_path: Path) -> None:
    first = kvgraph.load(compiled("llama")).manifest
    model = make_model("llama", tmp_path / "the same model elsewhere")
    second = kvgraph.compile(model, tmp_path / "again", page_size=16, check=False)
    assert second == first


def test_nothing_of_this_machine_travels(compiled: Compiled) -> None:
    folder = compiled("llama")
    here = str(Path(__file__).parents[2]).encode()
    for path in folder.iterdir():
        assert here not in path.read_bytes(), path.name


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16"])
def test_bfloat16_on_onnx_is_converted_and_said(
    cache_dtype: str, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    manifest = kvgraph.compile(
        model_folder("llama"), tmp_path / "out", dtype="bfloat16", cache_dtype=cache_dtype
    )
    assert manifest.dtype == "float32"
    assert manifest.layout["dtype"] == cache_dtype
    assert "bfloat16 converted to float32" in manifest.notes[0]
    tokens = kvgraph.Engine(tmp_path / "out").generate([[5, 6, 7]])[0].token_ids
    assert len(tokens) > 0
