"""The ONNX Runtime custom ops: in place on the pool, shapes passed through, refusals kept."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.conformance import Case, build, check

pytest.importorskip("onnx", reason="builds one-node models")
pytest.importorskip("onnxruntime", reason="runs them")

from tests.support import onnx_node

CASE = Case("update_and_attend", rows=((5, 2), (0, 3)), sinks=True)


def test_shapes_keep_their_names() -> None:
    pool = ["num_page_slots", "kv_dim", "num_layers", "page_size", "num_kv_heads"]
    session = onnx_node.session_of(build(CASE))
    out, kv_blocks = session.get_outputs()
    assert out.shape == ["total_seq_len", "num_heads", "head_dim"]
    assert kv_blocks.shape == [*pool, "head_dim"]
    quantized = Case("update_and_attend", pool_dtype="int8", granularity=32, v_head_dim=32)
    out, kv_blocks, kv_scales = onnx_node.session_of(build(quantized)).get_outputs()
    assert out.shape == ["total_seq_len", "num_heads", 32]
    assert kv_scales.shape == [*pool, "scales_per_head"]
    assert (kv_blocks.type, kv_scales.type) == ("tensor(int8)", "tensor(float)")


def test_one_session_takes_every_batch() -> None:
    for rows in (((0, 1),), ((0, 3), (5, 2)), ((70, 1),) * 9, ()):
        case = Case("update_and_attend", rows=rows)
        operands = build(case)
        check(case, onnx_node.run(operands), operands)


def test_two_buffers_for_one_pool_are_refused() -> None:
    operands = build(CASE)
    pool = operands.inputs["kv_blocks"]
    assert pool is not None
    other, before = pool.copy(), pool.tobytes()
    binding = onnx_node.session_of(operands).io_binding()
    for name, array in operands.inputs.items():
        if array is not None:
            binding.bind_ortvalue_input(name, onnx_node.as_value(array))
    binding.bind_output("out")
    binding.bind_ortvalue_output("kv_blocks_out", onnx_node.as_value(other))
    sentence = (
        f"kv_blocks_out: expected the address of kv_blocks 0x{pool.ctypes.data:x}, got "
        f"0x{other.ctypes.data:x}: bind one buffer to both, a copy of the pool is never made"
    )
    with pytest.raises(Exception, match=sentence):
        onnx_node.session_of(operands).run_with_iobinding(binding)
    assert pool.tobytes() == before == other.tobytes()


def test_a_kernels_sentence_reaches_the_caller() -> None:
    operands = build(CASE)
    table = operands.inputs["lookup_table"]
    assert table is not None
    table[0, 0] = 99
    with pytest.raises(Exception, match=r"page ids in \[0, 5\) of kv_blocks, got 99 at row 0"):
        onnx_node.run(operands)


def test_attributes_left_out_have_their_defaults() -> None:
    operands = build(CASE)
    full, short = operands.copy(), operands.copy()
    short.attributes = {"layer": 1, "scale": operands.attributes["scale"]}
    np.testing.assert_array_equal(onnx_node.run(short), onnx_node.run(full))


def test_a_required_attribute_is_required() -> None:
    operands = build(CASE)
    operands.attributes = {"layer": 1}
    with pytest.raises(Exception, match="scale"):
        onnx_node.session_of(operands)


@pytest.mark.parametrize(("name", "value"), [("window", 4.0), ("softcap", 2), ("window", "4")])
def test_an_attribute_of_another_type_is_refused(name: str, value: float) -> None:
    """It would be taken for one that is left out."""
    operands = build(Case("update_and_attend"))
    operands.attributes[name] = value
    with pytest.raises(Exception, match="name and type don't match"):
        onnx_node.session_of(operands)
