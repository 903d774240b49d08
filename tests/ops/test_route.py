"""kvgraph.route against its NumPy reference, and against routers as models write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from kvgraph.contract.dtypes import DTYPES
from kvgraph.errors import KernelError
from kvgraph.ops import OPSET_DOMAIN, OPSET_VERSION, ROUTE, native, torch_ops
from kvgraph.ops._route import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, route
from kvgraph.ops.onnx_ops import reference_ops, register_schemas
from tests.support.routes import as_written

Array = npt.NDArray[Any]
DEFAULTS = {a.name: a.default for a in ROUTE.attributes}

DEEPSEEK = {
    "num_active": 8,
    "scores": SIGMOID,
    "normalize": 1,
    "epsilon": 1e-20,
    "scale": 2.5,
    "num_groups": 8,
    "active_groups": 4,
    "group_best": 2,
}

# name: rows, experts, bias, attributes
CASES: dict[str, tuple[int, int, bool, dict[str, float]]] = {
    "softmax": (1, 32, False, {"num_active": 4}),
    "normalized": (70, 60, False, {"num_active": 6, "normalize": 1}),
    "softmax of the chosen": (9, 32, False, {"num_active": 4, "scores": SOFTMAX_OF_CHOSEN}),
    "all chosen": (5, 7, False, {"num_active": 7, "scores": SOFTMAX_OF_CHOSEN}),
    "one expert": (3, 1, False, {"num_active": 1, "normalize": 1}),
    "sigmoid and a bias": (9, 16, True, {"num_active": 2, "scores": SIGMOID, "normalize": 1}),
    "softmax, bias and a least total": (
        9,
        64,
        True,
        {"num_active": 6, "normalize": 1, "least_total": 0.5},
    ),
    "groups by their two best": (300, 256, True, DEEPSEEK),
    "groups by their best": (
        20,
        160,
        False,
        {"num_active": 6, "num_groups": 8, "active_groups": 3, "scale": 16.0},
    ),
    "as many experts as there may be": (2, 4096, True, {"num_active": 64, "scores": SIGMOID}),
}


def call_of(case: str, seed: int = 0) -> tuple[list[Array | None], dict[str, float]]:
    rows, experts, has_bias, attributes = CASES[case]
    random = np.random.default_rng(seed)
    logits = random.standard_normal((rows, experts)).astype(np.float32) * 3
    bias = random.standard_normal(experts).astype(np.float32) if has_bias else None
    return [logits, bias], attributes


def run(given: list[Array | None], attributes: dict[str, float]) -> tuple[Array, Array]:
    indices, weights = native.run(ROUTE, *given, **attributes)
    return indices, weights


@pytest.mark.parametrize("case", CASES)
def test_is_the_reference(case: str) -> None:
    given, attributes = call_of(case)
    indices, weights = run(given, attributes)
    expected = route(*given, **attributes)  # type: ignore[arg-type]
    assert (indices.dtype, weights.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_is_what_models_write(case: str) -> None:
    given, attributes = call_of(case)
    indices, weights = run(given, attributes)
    logits, bias = (None if array is None else torch.from_numpy(array).double() for array in given)
    assert logits is not None
    expected = as_written(logits, bias, attributes)
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=3e-6, atol=1e-7)


def test_a_row_is_the_same_bits_beside_any_others() -> None:
    given, attributes = call_of("groups by their two best")
    logits, bias = given
    assert logits is not None
    dll = native.library().dll
    before = native.num_threads()
    try:
        dll.kvg_cpu_set_num_threads(1)
        expected = run(given, attributes)
        dll.kvg_cpu_set_num_threads(2)
        for some in (slice(None), slice(0, 1), slice(7, 200), slice(None, None, -1)):
            found = run([np.ascontiguousarray(logits[some]), bias], attributes)
            for part, whole in zip(found, expected, strict=True):
                np.testing.assert_array_equal(part, whole[some])
    finally:
        dll.kvg_cpu_set_num_threads(before)


@pytest.mark.parametrize("kind", [SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN])
def test_of_equal_scores_the_first_experts_are_taken(kind: int) -> None:
    logits = np.array([[1, 2, 1, 2, 2, 1]], np.float32)
    indices, _ = run([logits, None], {"num_active": 4, "scores": kind})
    assert indices.tolist() == [[1, 3, 4, 0]]
    groups = {"num_groups": 3, "active_groups": 2, "group_best": 2}
    indices, _ = run([np.zeros((1, 6), np.float32), None], {"num_active": 3, **groups})
    assert indices.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_not_finite_choose_experts_and_leave_others_alone(case: str) -> None:
    given, attributes = call_of(case)
    logits, bias = given
    assert logits is not None
    rows = np.repeat(logits[:1], 6, axis=0)
    rows[1, 0], rows[2], rows[3], rows[4, -1] = np.nan, np.nan, -np.inf, np.inf
    indices, weights = run([rows, bias], attributes)
    expected = route(rows, bias, **attributes)  # type: ignore[arg-type]
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=2e-6, atol=1e-7)
    experts = rows.shape[1]
    assert all(len({*row}) == len(row) for row in indices.tolist())
    assert ((indices >= 0) & (indices < experts)).all()
    for part, clean in zip((indices, weights), run([rows[:1], bias], attributes), strict=True):
        np.testing.assert_array_equal(part[[0, 5]], clean[[0, 0]])


def test_a_bias_that_is_not_finite_chooses_experts() -> None:
    given, attributes = call_of("groups by their two best")
    given[1] = np.tile(np.array([np.inf, -np.inf, np.nan, 1], np.float32), 64)
    indices, _ = run(given, attributes)
    np.testing.assert_array_equal(indices, route(*given, **attributes)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", ["normalized", "softmax of the chosen"])
def test_logits_in_halves_are_widened(case: str, dtype: str) -> None:
    given, attributes = call_of(case)
    assert given[0] is not None
    given[0] = given[0].astype(DTYPES[dtype].numpy)
    wide = [given[0].astype(np.float32), given[1]]
    for part, expected in zip(run(given, attributes), run(wide, attributes), strict=True):
        np.testing.assert_array_equal(part, expected)
    for part, expected in zip(route(*given, **attributes), route(*wide, **attributes), strict=True):  # type: ignore[arg-type]
        np.testing.assert_array_equal(part, expected)


def test_no_rows() -> None:
    indices, weights = run([np.empty((0, 8), np.float32), None], {"num_active": 2})
    assert indices.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("case", ["softmax", "groups by their two best"])
def test_in_onnx_runtime_and_its_reference(case: str) -> None:
    register_schemas()
    given, attributes = call_of(case)
    inputs = {"logits": given[0]} | ({"bias": given[1]} if given[1] is not None else {})
    typed = onnx.helper.make_tensor_value_info
    kinds = onnx.TensorProto
    node = onnx.helper.make_node(
        "route", [*inputs], ["indices", "weights"], domain=OPSET_DOMAIN, **attributes
    )
    graph = onnx.helper.make_graph(
        [node],
        "route",
        [
            typed(name, kinds.FLOAT, [*["rows"][: array.ndim - 1], array.shape[-1]])
            for name, array in inputs.items()
            if array is not None
        ],
        [onnx.helper.make_empty_tensor_value_info(name) for name in ("indices", "weights")],
    )
    opsets = [onnx.helper.make_opsetid(*each) for each in (("", 23), (OPSET_DOMAIN, OPSET_VERSION))]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    outputs = [out.type.tensor_type for out in inferred.graph.output]
    assert [out.elem_type for out in outputs] == [kinds.INT32, kinds.FLOAT]
    assert [out.shape.dim[1].dim_value for out in outputs] == [attributes["num_active"]] * 2
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(native.library_path("onnxruntime")))
    session = ort.InferenceSession(
        inferred.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    evaluator = ReferenceEvaluator(inferred, new_ops=reference_ops())
    for found in (session.run(None, inputs), evaluator.run(None, inputs)):
        for part, expected in zip(found, run(given, attributes), strict=True):
            np.testing.assert_allclose(part, expected, rtol=2e-6)


REFUSALS: dict[str, tuple[dict[int, Any], dict[str, float], str]] = {
    "no expert": (
        {},
        {"num_active": 0},
        "num_active: expected 1 to the 16 experts of logits, got 0",
    ),
    "too many": (
        {},
        {"num_active": 17},
        "num_active: expected 1 to the 16 experts of logits, got 17",
    ),
    "too many experts": (
        {0: np.zeros((1, 4097), np.float32), 1: None},
        {},
        "logits: dim num_experts: expected at most 4096, got 4097",
    ),
    "scores": ({}, {"scores": 3}, "scores: expected 0, 1 or 2, got 3"),
    "normalize": ({}, {"normalize": 2}, "normalize: expected 0 or 1, got 2"),
    "epsilon": (
        {},
        {"epsilon": -1.0},
        "epsilon: expected at least 0, and finite in float32, got -1",
    ),
    "total": (
        {},
        {"least_total": np.inf},
        "least_total: expected at least 0, and finite in float32, got inf",
    ),
    "scale": ({}, {"scale": np.nan}, "scale: expected a finite number in float32, got nan"),
    "groups": (
        {},
        {"num_groups": 3},
        "num_groups: expected groups that divide the 16 experts of logits, got 3",
    ),
    "no group": (
        {},
        {"num_groups": 0},
        "num_groups: expected groups that divide the 16 experts of logits, got 0",
    ),
    "active groups": (
        {},
        {"num_groups": 4, "active_groups": 5},
        "active_groups: expected 1 to num_groups 4, got 5",
    ),
    "best of a group": (
        {},
        {"num_groups": 4, "group_best": 5},
        "group_best: expected 1 to the 4 experts of a group, got 5",
    ),
    "more than the groups have": (
        {},
        {"num_groups": 16, "num_active": 2},
        "num_active: expected at most the 1 experts of active groups, got 2",
    ),
    "bias": (
        {1: np.zeros(15, np.float32)},
        {},
        "bias: dim num_experts: expected 16 as logits has it, got 15",
    ),
    "dtype": (
        {0: np.zeros((1, 16), np.int8)},
        {},
        "logits: expected dtype float32 or float16 or bfloat16, got int8",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_operand_and_both_values(case: str) -> None:
    """The kernel and the fake, which a trace runs, in one sentence."""
    changed, other, sentence = REFUSALS[case]
    given, attributes = call_of("sigmoid and a bias")
    for index, value in changed.items():
        given[index] = value
    with pytest.raises(KernelError) as refusal:
        run(given, attributes | other)
    assert str(refusal.value) == f"route: {sentence}"
    tensors = [None if array is None else torch.from_numpy(array) for array in given]
    with pytest.raises(KernelError) as refusal:
        torch_ops.fake(ROUTE)(*tensors, **DEFAULTS | attributes | other)
    assert str(refusal.value) == f"route: {sentence}"
