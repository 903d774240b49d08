"""kvgraph.linear against its NumPy reference, for every instruction set of this processor."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraph.compiler.packed_weights import Packed
from kvgraph.ops import LINEAR, native, torch_ops
from kvgraph.ops._linear import linear
from kvgraph.ops.packed import MOST_SUMMED, quantize_rows, unpack
from tests.support.isa import forced_isa
from tests.support.linears import refusals, require_equal_rows
from tests.support.packed import pack

Array = npt.NDArray[Any]

ISAS = ["avx2", "avx512", "avx512_bf16", "amx"]
ROWS = [1, 2, 5, 8, 9, 12, 13, 25, 40, 400]
"""Through every height of a tile, both forms of int4, and two blocks of rows."""

# name: widths of the sections, inputs, attributes besides widths and bits, bias, residual
SHAPES: dict[str, tuple[tuple[int, ...], int, dict[str, int], bool, bool]] = {
    "one panel": ((16,), 64, {}, False, False),
    "ragged edges": ((41,), 100, {}, True, True),
    "q, k and v": ((48, 16, 33), 288, {}, True, False),
    "two sections": ((16, 17), 65, {}, False, False),
    "SwiGLU": ((40, 40), 96, {"silu_mul": 1}, True, True),
}


def call_of(
    shape: str, bits: int, rows: int, seed: int = 0
) -> tuple[list[Array | None], dict[str, float], list[Array]]:
    """Operands and attributes of a call, and the weights that were packed."""
    widths, inputs, extra, has_bias, has_residual = SHAPES[shape]
    random = np.random.default_rng(seed)
    weights = [random.standard_normal((n, inputs)).astype(np.float32) for n in widths]
    biases = [random.standard_normal(n).astype(np.float32) for n in widths] if has_bias else []
    packed = pack(weights, bits, biases, interleave=bool(extra))
    x = random.standard_normal((rows, inputs)).astype(np.float32)
    outs = widths[:1] if extra else widths
    residual = random.standard_normal((rows, widths[0])).astype(np.float32)
    names = ("out_features", "out_features_1", "out_features_2")
    attributes: dict[str, float] = {**dict(zip(names, outs, strict=False)), **extra, "bits": bits}
    return [x, *operands(packed), residual if has_residual else None], attributes, weights


def operands(packed: Packed) -> list[Array | None]:
    return [packed.weight, packed.scales, packed.group_bytes, packed.bias]


def outputs(result: Any) -> tuple[Array, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@pytest.mark.parametrize("isa", ISAS)
def test_is_the_reference(isa: str, bits: int, shape: str) -> None:
    with forced_isa(isa):
        for rows in ROWS:
            given_, attributes, _ = call_of(shape, bits, rows)
            expected = outputs(linear(*given_, **attributes))  # type: ignore[arg-type]
            found = outputs(native.run(LINEAR, *given_, **attributes))
            assert len(found) == len(expected)
            # Sums of bfloat16 differ by their order, those of integers do not.
            close = 2e-5 if bits >= 16 else 2e-6
            for mine, reference in zip(found, expected, strict=True):
                np.testing.assert_allclose(mine, reference, rtol=close, atol=close * 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_is_the_same_bits_at_every_height_and_thread_count(isa: str, bits: int) -> None:
    given_, attributes, _ = call_of("ragged edges", bits, 40)
    assert given_[-1] is not None
    require_equal_rows(isa, given_, attributes, (1, 7, 9))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("byte", [0x88, 0x77, 0x7F, 0x80])
@pytest.mark.parametrize("isa", ISAS)
def test_sums_of_the_largest_numbers_neither_saturate_nor_overflow(
    isa: str, byte: int, bits: int
) -> None:
    """int4 by its largest multipliers; rows of one sign, and of signs that change by pairs."""
    (_, lines, _, group_bytes, *_), attributes, _ = call_of("one panel", bits, 1)
    assert lines is not None
    lines = np.full_like(lines.view(np.uint8), byte).view(lines.dtype)
    if group_bytes is not None:
        group_bytes = np.full_like(group_bytes, -1)  # 16, less one, twice
    weights = unpack(lines, group_bytes, bits).astype(np.int64)
    scales = np.stack([np.ones(16), weights.sum(axis=1)])[None].astype(np.float32)
    signs = [[1], [-1], [1, -1], [1, 1, -1, -1], [-1, -1, 1, 1]]
    x = np.stack([np.resize(each, 64) for each in signs]).astype(np.float32)
    with forced_isa(isa):
        found = native.run(LINEAR, x, lines, scales, group_bytes, None, None, **attributes)
    np.testing.assert_allclose(found, x @ weights.T, rtol=1e-6, atol=0.01)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("isa", ISAS)
def test_the_most_inputs_are_summed_exactly_and_more_are_refused(isa: str, bits: int) -> None:
    for extra in (0, 1):
        x = np.ones((1, MOST_SUMMED + extra), np.float32)
        packed = pack([np.stack([x[0], -x[0]])], bits)
        given_ = [x, *operands(packed), None]
        attributes = {"out_features": 2, "bits": bits}
        with forced_isa(isa):
            if not extra:
                found = native.run(LINEAR, *given_, **attributes)
                np.testing.assert_array_equal(found, linear(*given_, **attributes))  # type: ignore[arg-type]
                np.testing.assert_allclose(found, [[MOST_SUMMED, -MOST_SUMMED]], rtol=1e-6)
            else:
                sentence = (
                    f"linear: x: dim in_features: expected at most {MOST_SUMMED} for {bits} bits "
                    f"without groups, got {MOST_SUMMED + 1}"
                )
                assert refusals(given_, attributes) == [sentence] * 2


@pytest.mark.parametrize("bits", [32, 16])
def test_floats_have_any_number_of_inputs(bits: int) -> None:
    x = np.ones((1, MOST_SUMMED + 1), np.float32)
    given_ = [x, *operands(pack([x], bits)), None]
    found = native.run(LINEAR, *given_, out_features=1, bits=bits)
    np.testing.assert_allclose(found, [[MOST_SUMMED + 1]], rtol=1e-5)


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_a_row_with_a_nan_is_nan_and_others_are_not(bits: int) -> None:
    given_, attributes, _ = call_of("one panel", bits, 12)
    x = given_[0]
    assert x is not None
    clean = native.run(LINEAR, *given_, **attributes)
    x[3, 5], x[7, 1] = np.nan, 0
    dirty = native.run(LINEAR, *given_, **attributes)
    assert np.isnan(dirty[3]).all()
    rows = [i for i in range(12) if i not in (3, 7)]
    np.testing.assert_array_equal(dirty[rows], clean[rows])
    assert np.isfinite(dirty[7]).all()


def test_rows_of_zeros_and_no_rows() -> None:
    for bits in (32, 16, 8, 4):
        given_, attributes, _ = call_of("one panel", bits, 3)
        zeros = np.zeros_like(given_[0])  # type: ignore[arg-type]
        assert not native.run(LINEAR, zeros, *given_[1:], **attributes).any()
        assert native.run(LINEAR, zeros[:0], *given_[1:], **attributes).shape == (0, 16)


@pytest.mark.parametrize(("bits", "most"), [(16, 0.003), (8, 0.012), (4, 0.11)])
def test_packing_loses_as_much_as_the_bits_say(bits: int, most: float) -> None:
    random = np.random.default_rng(1)
    weight = random.standard_normal((96, 512)).astype(np.float32)
    x = random.standard_normal((16, 512)).astype(np.float32)
    exact = x @ weight.T
    packed = pack([weight], bits)
    found = native.run(LINEAR, x, *operands(packed), out_features=96, bits=bits)
    assert np.abs(found - exact).mean() < most * np.abs(exact).mean()


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 200), st.floats(1e-6, 1e6), st.integers(0, 99))
def test_int4_stores_every_weight_to_half_a_step(
    columns: int, inputs: int, size: float, seed: int
) -> None:
    """The multiplier is at most what the group's largest weight needs, rounded up."""
    random = np.random.default_rng(seed)
    weight = (random.standard_normal((columns, inputs)) * size).astype(np.float32)
    packed = pack([weight], 4)
    assert packed.scales is not None
    stored = unpack(packed.weight, packed.group_bytes, 4)[:columns, :inputs].astype(np.float32)
    back = stored * packed.scales[:, 0].reshape(-1, 1)[:columns]
    largest = np.abs(weight).max(1, keepdims=True)
    assert (np.abs(back - weight) <= largest * (4 / 7 + 0.01)).all()  # one clipped by 4 multipliers
    assert np.square(back - weight).mean() <= 0.012 * np.square(largest).mean()
    np.testing.assert_array_equal(
        packed.scales[:, 1].reshape(-1)[:columns], stored.sum(1), "sums of the stored columns"
    )


def test_weights_of_zeros_stay_zeros() -> None:
    for bits in (32, 16, 8, 4):
        packed = pack([np.zeros((20, 70), np.float32)], bits)
        x = np.ones((2, 70), np.float32)
        found = native.run(LINEAR, x, *operands(packed), out_features=20, bits=bits)
        assert not found.any()


# Modes of fesetround on x86-64.
@pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00], ids=["down", "up", "to zero"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("isa", ISAS)
def test_a_thread_may_round_in_any_direction(isa: str, bits: int, mode: int) -> None:
    """Each input is then off by less than a step. Of some rows the largest one, which is 127 steps,
    is computed as a little more."""
    given_, attributes, (weights,) = call_of("ragged edges", bits, 40)
    x = given_[0]
    assert x is not None
    libm = ctypes.CDLL(None)
    with forced_isa(isa):
        expected = native.run(LINEAR, *given_, **attributes)
        assert libm.fesetround(mode) == 0
        try:
            found = native.run(LINEAR, *given_, **attributes)
        finally:
            libm.fesetround(0)
    steps = np.abs(x).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - expected) <= 1.1 * steps * np.abs(weights).sum(axis=1)).all()


def test_rows_are_rounded_half_to_even() -> None:
    stored, scales = quantize_rows(np.array([[127, 0.5, 1.5, -0.5]], np.float32))
    assert stored.tolist() == [[127, 0, 2, 0]]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize("largest", [1e-40, 3.7e-37, 3.8e-37])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_tiny_numbers_have_the_codes_of_the_reference(
    isa: str, bits: int, largest: float
) -> None:
    """Those whose scale has no finite inverse count as zeros. Weights of 1e38 show the codes."""
    x = np.array([[largest, 0, -largest, largest / 2]], np.float32)
    packed = pack([np.eye(4, dtype=np.float32) * np.float32(1e38)], bits)
    given_, attributes = [x, *operands(packed), None], {"out_features": 4, "bits": bits}
    with forced_isa(isa):
        found = native.run(LINEAR, *given_, **attributes)
    np.testing.assert_array_equal(found, linear(*given_, **attributes))  # type: ignore[arg-type]
    assert found.any() == (largest == 3.8e-37)


def test_torch_op_gives_sections_and_empty_tensors_for_the_rest() -> None:
    given_, attributes, _ = call_of("two sections", 8, 6)
    tensors = [None if a is None else torch.from_numpy(a) for a in given_]
    found = torch_ops.linear(*tensors, **attributes)
    expected = outputs(linear(*given_, **attributes))  # type: ignore[arg-type]
    for mine, reference in zip(found, expected, strict=False):
        np.testing.assert_allclose(mine.numpy(), reference, rtol=2e-6, atol=1e-5)
    assert found[2].numel() == 0


REFUSED: dict[str, tuple[dict[str, float], dict[int, Any], str]] = {
    "bits": ({"bits": 3}, {}, "linear: bits: expected 32, 16, 8 or 4, got 3"),
    "kind": ({"bits": 16}, {}, "linear: weight: expected bfloat16 for 16 bits, got int8"),
    "inputs": (
        {},
        {0: np.zeros((2, 200), np.float32)},
        "linear: weight: dim num_lines: expected 64 for 200 inputs of x, got 16",
    ),
    "no inputs": (
        {},
        {0: np.zeros((2, 0), np.float32)},
        "linear: x: dim in_features: expected at least 1, got 0",
    ),
    "width": (
        {"out_features": 40},
        {},
        "linear: weight: dim num_panels: expected 3 for out_features, got 1",
    ),
    "negative width": (
        {"out_features": -1},
        {},
        "linear: out_features: expected at least 0, got -1",
    ),
    "no scales": ({}, {2: None}, "linear: scales: expected some for 8 bits, got none"),
    "group_bytes": (
        {},
        {3: np.zeros((1, 2, 8), np.int8)},
        "linear: group_bytes: expected none for 8 bits, got some",
    ),
    "activations": (
        {},
        {0: np.zeros((2, 64), np.float16)},
        "linear: x: expected dtype float32, got float16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_operand_and_both_values(case: str) -> None:
    changed, replaced, sentence = REFUSED[case]
    given_, attributes, _ = call_of("one panel", 8, 2)
    for index, value in replaced.items():
        given_[index] = value
    assert refusals(given_, attributes | changed) == [sentence] * 2
