"""What the native kernels refuse, and a trace ahead of them: one sentence, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvgraph.errors import KernelError
from kvgraph.ops import native, torch_ops
from tests.support.conformance import Case, Operands, build

Change = Callable[[Operands], None]

BASE = Case("update_and_attend", rows=((5, 2), (0, 3), (16, 0)), rope_style=0, rotary_dim=64)
NORMED = Case("update_and_attend", rows=((5, 2), (0, 3)), norm=0.0)
QUANTIZED = Case("update_and_attend", pool_dtype="int8", granularity=32, rows=((5, 2), (0, 3)))


def put(name: str, value: Any) -> Change:
    """Replaces an input, or changes it by a function of the array."""

    def change(operands: Operands) -> None:
        old = operands.inputs[name]
        operands.inputs[name] = value(old) if callable(value) else value

    return change


def entry(name: str, index: Any, value: int) -> Change:
    def change(operands: Operands) -> None:
        array = operands.inputs[name]
        assert array is not None
        array[index] = value

    return change


def attribute(name: str, value: float) -> Change:
    def change(operands: Operands) -> None:
        operands.attributes[name] = value

    return change


REFUSALS: list[tuple[str, Case, Change, str]] = [
    ("operand-missing", BASE, put("lookup_table", None),
     "lookup_table: expected a tensor, got none"),
    ("dtype", BASE, put("cache_lengths", lambda a: a.astype(np.float32)),
     "cache_lengths: expected dtype int32, got float32"),
    ("dtype-unknown", BASE, put("cache_lengths", lambda a: a.astype(np.int64)),
     "cache_lengths: expected dtype int32, got int64"),
    ("dtype-of-variable", BASE, put("k", lambda a: a.astype(np.float16)),
     "k: expected dtype float32 of q, got float16"),
    ("rank", BASE, put("q", lambda a: a[0]), "q: expected rank 3, got 2"),
    ("dim-shared", BASE, put("q", lambda a: a[..., :32].copy()),
     "kv_blocks: dim head_dim: expected 32 as q has it, got 64"),
    ("dim-derived", BASE, put("cache_lengths", lambda a: a[:2].copy()),
     "cache_lengths: dim batch_size: expected 3 as input_row_offsets has it, got 2"),
    ("dim-static", BASE, put("max_lengths", np.zeros((1, 3), np.int32)),
     "max_lengths: dim 1: expected 2, got 3"),
    ("kinds", BASE, put("kv_blocks", lambda a: a[:, :1].copy()),
     r"kv_blocks: dim kv_dim: expected 2 \(K, then V\), got 1"),
    ("heads", BASE, put("q", lambda a: a[:, :3].copy()),
     "q: dim num_heads: expected a multiple of the 2 kv heads of kv_blocks, got 3"),
    ("k-without-v", BASE, put("v", None),
     "update_and_attend: v: expected both k and v or neither, got only k"),
    ("offsets-start", BASE, entry("input_row_offsets", 0, 1),
     "input_row_offsets: expected 0 first, got 1"),
    ("offsets-descend", BASE, entry("input_row_offsets", 2, 1),
     "input_row_offsets: expected none below its predecessor, got 1 after 2"),
    ("offsets-end", BASE, entry("input_row_offsets", 3, 6),
     "input_row_offsets: expected total_seq_len 5 last, got 6"),
    ("length-negative", BASE, entry("cache_lengths", 1, -1),
     "cache_lengths: expected at least 0, got -1 in row 1"),
    ("table-narrow", BASE, entry("cache_lengths", 0, 60),
     "lookup_table: expected at least 4 pages wide for the 62 tokens of row 0, got 2"),
    ("page-beyond", BASE, entry("lookup_table", (1, 0), 99),
     r"lookup_table: expected page ids in \[0, 6\) of kv_blocks, got 99 at row 1, page 0"),
    ("page-negative", BASE, entry("lookup_table", (0, 0), -1),
     r"lookup_table: expected page ids in \[0, 6\) of kv_blocks, got -1 at row 0, page 0"),
    ("layer", BASE, attribute("layer", 3),
     "layer: expected one of the 3 layers of kv_blocks, got 3"),
    ("layer-negative", BASE, attribute("layer", -1),
     "layer: expected one of the 3 layers .*, got -1"),
    ("window", BASE, attribute("window", -2), "window: expected at least 0, got -2"),
    ("scale", BASE, attribute("scale", np.nan),
     "scale: expected a finite number in float32, got nan"),
    ("softcap", BASE, attribute("softcap", -1.0),
     "softcap: expected at least 0, and finite in float32, got -1"),
    ("chunked", BASE, attribute("chunked", 2), "chunked: expected 0 or 1, got 2"),
    ("chunked-without-window", BASE, attribute("chunked", 1),
     "chunked: expected 0 without a window, got 1"),
    ("softcap-infinite", BASE, attribute("softcap", np.inf),
     "softcap: expected at least 0, and finite in float32, got inf"),
    ("scale-beyond-float32", BASE, attribute("scale", 1e300),
     "scale: expected a finite number in float32, got 1e.300"),
    ("scale-lost", BASE, attribute("scale", -1e-46),
     "scale: expected 0, or a number that is not 0 in float32, got -1e-46"),
    ("softcap-lost", BASE, attribute("softcap", 1e-46),
     "softcap: expected 0, or a number that is not 0 in float32, got 1e-46"),
    ("causal", BASE, attribute("causal", 2), "causal: expected 0 or 1, got 2"),
    ("v-head-dim", Case("paged_attention"), attribute("v_head_dim", 65),
     "v_head_dim: expected at most head_dim 64, got 65"),
    ("v-head-dim-negative", Case("paged_attention"), attribute("v_head_dim", -1),
     "v_head_dim: expected at most head_dim 64, got -1"),
    ("v-head-dim-of-v", BASE, attribute("v_head_dim", 32),
     "out: dim v_head_dim: expected 64 as v has it, got 32"),
    ("rope-style", BASE, attribute("rope_style", 2), "rope_style: expected 0 .* or 1 .*, got 2"),
    ("rope-positions", BASE, put("cos_sin", lambda a: a[:6].copy()),
     "cos_sin: dim max_positions: expected at least the 7 tokens of row 0, got 6"),
    ("rope-odd", BASE, put("cos_sin", lambda a: a[:, :63].copy()),
     "cos_sin: dim rotary_dim: expected an even number of at most head_dim 64, got 63"),
    ("rope-wide", BASE, put("cos_sin", lambda a: np.repeat(a, 2, axis=1)),
     "cos_sin: dim rotary_dim: expected an even number of at most head_dim 64, got 128"),
    ("norms-only-q", NORMED, put("k_norm", None),
     "k_norm: expected both q_norm and k_norm or neither, got only q_norm"),
    ("norms-only-k", NORMED, put("q_norm", None),
     "q_norm: expected both q_norm and k_norm or neither, got only k_norm"),
    ("norms-without-k", Case("update_and_attend", stores=False),
     put("k_norm", np.ones(64, np.float32)), "k_norm: expected none without k, got one"),
    ("norms-narrow", NORMED, put("q_norm", np.ones(32, np.float32)),
     "q_norm: dim head_dim: expected 64 as q has it, got 32"),
    ("norms-dtype", NORMED, put("q_norm", np.ones(64, np.float16)),
     "q_norm: expected dtype float32 of q, got float16"),
    ("norm-epsilon", NORMED, attribute("norm_epsilon", -1e-5),
     "norm_epsilon: expected at least 0, and finite in float32, got -1e-05"),
    ("norm-offset", NORMED, attribute("norm_offset", np.inf),
     "norm_offset: expected a finite number in float32, got inf"),
    ("scales-missing", QUANTIZED, put("kv_scales", None),
     "kv_scales: expected scales with a pool of dtype int8, got none"),
    ("scales-unwanted", BASE, put("kv_scales", np.zeros((6, 2, 3, 16, 2, 2), np.float32)),
     "kv_scales: expected none with a pool of dtype float32, got scales"),
    ("scales-groups", QUANTIZED, put("kv_scales", np.zeros((5, 2, 3, 16, 2, 5), np.float32)),
     "kv_scales: dim scales_per_head: expected groups that divide head_dim 64 .*, got 5"),
    ("attribute-unknown", BASE, attribute("windows", 1),
     "expected attributes layer, scale and none"),
    ("read-only", BASE, put("kv_blocks", lambda a: _frozen(a)),
     "kv_blocks: expected writable memory, got read-only"),
    ("strides", BASE, put("q", lambda a: a.transpose(1, 0, 2)),
     "q: expected dense row-major memory, got strides"),
]  # fmt: skip


AT_RUN_TIME = (
    "operand-missing",  # torch's own schema says it
    "attribute-unknown",
    "offsets-",
    "length-negative",
    "table-narrow",
    "page-",
    "rope-positions",
    "read-only",
    "strides",
)
"""What only values and memory show, or torch refuses itself."""


def _frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("case", "change", "sentence"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_refused_and_nothing_written(case: Case, change: Change, sentence: str) -> None:
    operands = build(case)
    change(operands)
    before = operands.copy()
    with pytest.raises(KernelError, match=sentence):
        native.run(operands.spec, *operands.arrays, **operands.attributes)
    for name in operands.spec.mutated:
        got, want = operands.inputs[name], before.inputs[name]
        assert got is want is None or got.tobytes() == want.tobytes()  # type: ignore[union-attr]


@pytest.mark.parametrize("traced", [False, True], ids=["run", "traced"])
@pytest.mark.parametrize(
    ("case", "change", "sentence"),
    [r[1:] for r in REFUSALS if not r[0].startswith(AT_RUN_TIME)],
    ids=[r[0] for r in REFUSALS if not r[0].startswith(AT_RUN_TIME)],
)
def test_torch_refuses_it_in_the_same_words(
    case: Case, change: Change, sentence: str, traced: bool
) -> None:
    operands = build(case)
    change(operands)
    tensors = [None if a is None else torch.from_numpy(a) for a in operands.arrays]
    if traced:
        mode = FakeTensorMode()
        tensors = [None if t is None else mode.from_tensor(t) for t in tensors]
    op = getattr(torch_ops, case.op)
    with pytest.raises(KernelError, match=sentence):
        op(*tensors, **operands.attributes)


def test_an_operand_missing_from_a_call_is_refused() -> None:
    operands = build(BASE)
    with pytest.raises(KernelError, match="update_and_attend: expected 16 operands, got 1"):
        native.call(operands.spec, [None], operands.attributes)


def test_a_required_attribute_is_required() -> None:
    operands = build(BASE)
    del operands.attributes["scale"]
    with pytest.raises(KernelError, match="expected attributes layer, scale and none but"):
        native.run(operands.spec, *operands.arrays, **operands.attributes)


@pytest.mark.parametrize("address", ["another", "none"])
def test_two_buffers_for_one_pool_are_refused(address: str) -> None:
    operands = build(BASE)
    pool = operands.inputs["kv_blocks"]
    assert pool is not None
    before, other = pool.tobytes(), pool.copy()
    given = [None if a is None else (a.ctypes.data, str(a.dtype), a.shape) for a in operands.arrays]
    q = operands.inputs["q"]
    assert q is not None
    out = np.zeros_like(q)
    described = (str(pool.dtype), pool.shape)
    at = other.ctypes.data if address == "another" else 0
    outputs = [(out.ctypes.data, str(out.dtype), out.shape), (at, *described), None]
    sentence = (
        f"update_and_attend: kv_blocks_out: expected the address of kv_blocks "
        f"0x{pool.ctypes.data:x}, got {f'0x{at:x}' if at else '(nil)'}: "
        "bind one buffer to both, a copy of the pool is never made"
    )
    with pytest.raises(KernelError) as refusal:
        native.call(operands.spec, [*given, *outputs], operands.attributes)
    assert str(refusal.value) == sentence
    assert pool.tobytes() == before == other.tobytes()
    assert not out.any()

    outputs[1] = (pool.ctypes.data, *described)
    native.call(operands.spec, [*given, *outputs], operands.attributes)
    assert pool.tobytes() != before
