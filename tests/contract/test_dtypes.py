"""The table of element types agrees with every framework, and is the only one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import _TYPES as SAFETENSORS

from kvgraph.contract import dtypes
from kvgraph.contract.dtypes import ALL, DTYPES, DType

PACKAGE = Path(__file__).parents[2] / "kvgraph"

ELSEWHERE = {
    "compiler/check/compare.py: ROUNDED": "tolerances that the check measured",
    "bench/limits.py: main": "the products that are timed",
    "bench/peers/llama_cpp.py: PRECISIONS": "another engine's, and another interpreter's",
    "bench/peers/llama_cpp.py: KINDS": "another engine's, and another interpreter's",
    "bench/peers/openvino.py: PRECISIONS": "another engine's, and another interpreter's",
    "bench/peers/openvino.py: WEIGHTS": "another engine's, and another interpreter's",
    "kernels/trials.py: TOLERANCE": "tolerances that the trials measured",
    "kernels/trials.py: STORED": "tolerances that the trials measured",
    "ptx/operands.py: TYPES": "PTX's names of types, as its language defines them",
    "ptx/matrix.py: INPUTS": "PTX's names of types, as its language defines them",
    "compiler/passes/wide_indices.py: NARROW": "the integers that ONNX does not index with",
    "compiler/quantized/compressed_tensors.py: ZERO_POINTS": "what the format stores",
}
"""Literals of three or more dtypes that may stand outside the table, and why."""

LITERALS = (ast.Dict, ast.Tuple, ast.List, ast.Set)


@pytest.mark.parametrize("dtype", ALL, ids=lambda d: d.name)
def test_names_agree_with_the_frameworks(dtype: DType) -> None:
    theirs = getattr(torch, dtype.name)
    assert theirs.itemsize == dtype.numpy.itemsize == dtype.plain.itemsize == dtype.itemsize
    assert theirs.is_floating_point == (dtype.kind == "float")
    assert dtype.numpy.name == dtype.name
    assert onnx.helper.tensor_dtype_to_np_dtype(dtype.onnx) == dtype.numpy
    assert SAFETENSORS[dtype.safetensors] == theirs
    torch.from_numpy(np.zeros(1, dtype.plain))  # torch reads it


def test_names_are_of_one_dtype_each() -> None:
    for field in ("name", "onnx", "safetensors", "code", "short", "triton", "tensorrt"):
        found = [value for dtype in ALL if (value := getattr(dtype, field))]
        assert len(set(found)) == len(found)
    assert sorted(d.code for d in ALL if d.code) == list(range(1, 7))


def test_sets() -> None:
    assert dtypes.ACTIVATIONS == ("float32", "float16", "bfloat16")
    assert dtypes.QUANTIZED == ("int8", "float8_e4m3fn")
    assert DTYPES["int8"].largest == np.iinfo(np.int8).max
    assert DTYPES["float8_e4m3fn"].largest == ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max


def named(node: ast.AST) -> set[str]:
    """Dtypes that the strings and attributes in `node` name, by any of their names."""
    words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    words |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return {d.name for d in ALL if {d.name, d.safetensors, d.short, d.tensorrt} - {""} & words}


def tables(node: ast.AST, place: str) -> Iterator[str]:
    """Where literals, or the members of a class, name three or more dtypes: `file: what`."""
    for child in ast.iter_child_nodes(node):
        target = child.targets[0] if isinstance(child, ast.Assign) else child
        target = child.target if isinstance(child, ast.AnnAssign) else target
        name = getattr(target, "id", None) or getattr(target, "name", None)
        inner = f"{place.partition(':')[0]}: {name}" if name else place
        held: ast.AST | None = child if isinstance(child, LITERALS) else None
        if isinstance(child, ast.ClassDef):
            held = ast.Module([n for n in child.body if isinstance(n, ast.Assign)], [])
        if held is not None and len(named(held)) > 2:
            yield inner
        else:
            yield from tables(child, inner)


def test_no_other_table_of_dtypes() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    del files["contract/dtypes.py"]
    found = {at for name, path in files.items() for at in tables(ast.parse(path.read_text()), name)}
    assert found == set(ELSEWHERE)


def test_a_table_elsewhere_is_found() -> None:
    for code in (
        "NAMES: Any = {torch.float32: 'a', torch.int8: 'b', torch.bool: 'c'}",
        "def f():\n    NAMES = ('F32', 'bf16', 'FP8')",
        "class NAMES(Enum):\n    a = 'float32'\n    b = 'int8'\n    c = 'int32'",
    ):
        assert list(tables(ast.parse(code), "file.py")) == ["file.py: NAMES"]
