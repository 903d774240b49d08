"""Shapes in tensorrt.json that no compile writes."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("onnx_ir", reason="needed to compile for TensorRT")

from kvgraph.compiler.targets.tensorrt.lower import shape_of
from kvgraph.kernels.shapes import AttentionShape, PoolShape, Rope

SHAPE = AttentionShape(PoolShape("bfloat16", "bfloat16", 4, 16, 16, 2), 8, 0.25, rope=Rope(16))


def test_a_shape_is_read_as_it_was_written() -> None:
    assert shape_of(asdict(SHAPE)) == SHAPE


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("cache.kv_heads", [], r"^cache.kv_heads: expected int, got \[\]$"),
        ("cache.kv_heads", None, "^cache.kv_heads: expected int, got None$"),
        ("cache.kv_heads", 0, "^num_heads: expected 1 to 128 query heads for each of 0 kv heads"),
        ("cache.kv_heads", -4, "^num_heads: expected 1 to 128 query heads for each of -4 kv heads"),
        ("cache.head_dim", "16", "^cache.head_dim: expected int, got '16'$"),
        ("cache.dtype", "zz", "^dtype: expected one of"),
        ("cache.page_size", 0, "^page_size: expected one of"),
        ("cache.num_layers", 1 << 40, "^num_layers: expected 0 to 2147483647, got"),
        ("cache.more", 1, "^cache.more: expected no field of this name"),
        ("scale", float("nan"), "^scale: expected a finite number, got nan$"),
        ("softcap", -1.0, "^softcap: expected a finite number >= 0, got -1.0$"),
        ("window", -1, "^window: expected 0 to 2147483647, got -1$"),
        ("rope.rotary_dim", 0, "^rotary_dim: expected 1 to 16, got 0$"),
        ("rope", 7, "^rope: expected "),
        ("causal", 1, "^causal: expected bool, got 1$"),
    ],
)
def test_a_shape_of_no_compile_is_refused(path: str, value: Any, sentence: str) -> None:
    fields = copy.deepcopy(asdict(SHAPE))
    *parts, last = path.split(".")
    at = fields
    for part in parts:
        at = at[part]
    at[last] = value
    with pytest.raises(ValueError, match=sentence):
        shape_of(fields)
