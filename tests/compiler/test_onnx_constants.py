"""Constants that are nearly 0 or 1 stay in ONNX graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript.optimizer
import pytest
from onnx import TensorProto, checker, helper
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph.compiler.targets.onnx_constants import kept_constants
from tests.support.models import make_model


def optimised(nodes: list[onnx.NodeProto], kind: int, constant: float) -> ir.Model:
    """The graph of `nodes` from `x` to `y`, with a scalar `c` of dtype `kind`, optimised."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [helper.make_tensor("c", kind, [], [constant])])
    opsets = [helper.make_opsetid("", 23)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    with kept_constants(model):
        onnxscript.optimizer.optimize_ir(model)
    return model


@pytest.mark.parametrize(
    ("op", "inputs", "constant", "stays"),
    [
        ("Add", "xc", 1e-8, True),
        ("Add", "cx", -3e-9, True),
        ("Sub", "xc", 1e-9, True),
        ("Mul", "xc", 1.000004, True),
        ("Mul", "cx", 0.999996, True),
        ("Div", "xc", 1.000004, True),
        ("Add", "xc", 0.0, False),
        ("Mul", "cx", 1.0, False),
    ],
)
def test_a_constant_stays_unless_it_is_neutral(
    op: str, inputs: str, constant: float, stays: bool
) -> None:
    nodes = [helper.make_node(op, list(inputs), ["y"])]
    model = optimised(nodes, TensorProto.FLOAT, constant)
    assert [node.op_type for node in model.graph] == [op if stays else "Identity"]
    assert all(node.domain == "" for node in model.graph)
    checker.check_model(ir.to_proto(model))
    if stays:
        assert np.float32(constant) in [
            each.const_value.numpy() for each in model.graph.initializers.values()
        ]


def test_a_constant_behind_a_cast_stays() -> None:
    cast = helper.make_node("Cast", ["c"], ["d"], to=TensorProto.FLOAT)
    add = helper.make_node("Add", ["x", "d"], ["y"])
    model = optimised([cast, add], TensorProto.DOUBLE, 1e-8)
    assert [node.op_type for node in model.graph] == ["Add"]


def test_an_epsilon_of_1e_8_is_added(tmp_path: Path) -> None:
    """Without it the norm of a zero row is not a number, and compile's check refuses the graph."""
    folder = make_model("helium", tmp_path / "model", rms_norm_eps=1e-8)
    held = load_file(folder / "model.safetensors")
    held["model.embed_tokens.weight"][::2] = 0
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    kvgraph.compile(folder, tmp_path / "out", page_size=16)
    with kvgraph.Engine(tmp_path / "out", num_pages=8) as engine:
        (done,) = engine.generate([[2, 4, 6]], kvgraph.SamplingParams(max_new_tokens=2))
    assert len(done.token_ids) == 2
