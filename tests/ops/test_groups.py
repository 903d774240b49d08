"""Weights in groups, as checkpoints store them: ops against their NumPy references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kvgraph.compiler.packed_weights import Packed, StoredRows, shapes
from kvgraph.ops import EXPERTS, LINEAR, native
from kvgraph.ops._experts import experts
from kvgraph.ops._linear import linear
from kvgraph.ops.packed import (
    E2M1,
    E4M3,
    EIGHTHS,
    INT8,
    INTEGERS,
    IQ4_NL,
    LEVELS,
    NVFP4,
    Form,
    decode,
)
from tests.support.isa import forced_isa
from tests.support.linears import refusals, require_equal_rows
from tests.support.packed import keep

Array = npt.NDArray[Any]

ISAS = ["avx2", "avx512", "avx512_bf16", "amx"]
ROWS = [1, 2, 3, 6, 7, 12, 13, 25, 400]
"""Through every height of a tile, and two blocks of rows."""

FORMS = {
    "AWQ": Form(4, 128, INTEGERS, True),
    "GPTQ": Form(4, 64),
    "groups of 32": Form(4, 32, INTEGERS, True),
    "a group a row": Form(4, 288),
    "MXFP4": Form(4, 32, E2M1),
    "NVFP4": Form(4, 16, NVFP4),
    "Q4_K": Form(4, 32, EIGHTHS, True),
    "IQ4_NL": Form(4, 32, IQ4_NL),
    "FP8": Form(8, 128, E4M3),
    "FP8 rows": Form(8, 288, E4M3),
    "int8": Form(8, 32, INT8),
    "int8 in groups of 128": Form(8, 128, INT8),
}


def stored_of(form: Form, columns: int, inputs: int, seed: int = 0) -> StoredRows:
    random = np.random.default_rng(seed)
    groups = -(-inputs // form.group)
    numbers = random.integers(0, 1 << form.bits, (columns, inputs)).astype(np.uint8)
    if form.codes == E4M3:
        numbers[(numbers & 127) == 127] = 0  # a NaN
    if form.codes == E2M1:
        return StoredRows(numbers, random.integers(118, 130, (columns, groups)).astype(np.uint8))
    if form.codes == NVFP4:
        scales = random.integers(0, 127, (columns, groups)).astype(np.uint8)  # subnormals too
        factors = random.uniform(1e-4, 1e-3, (columns, 1)).astype(np.float32)
        return StoredRows(numbers, scales, factors=factors)
    scales = random.uniform(0.01, 0.1, (columns, groups)).astype(np.float32)
    most = 127 if form.codes == EIGHTHS else 8
    offsets = random.integers(-most, most + 1, (columns, groups)).astype(np.int8)
    return StoredRows(numbers, scales, offsets if form.has_offsets else None)


def meant(stored: StoredRows, form: Form) -> Array:
    """The numbers that it stands for, in float64."""
    scales = stored.scales.astype(np.float64)
    if form.codes == E2M1:
        scales = np.ldexp(1.0, stored.scales.astype(np.int64) - 127)
    if stored.factors is not None:
        scales = stored.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * stored.factors
    numbers = LEVELS[form.codes][stored.numbers].astype(np.float64)
    if stored.offsets is not None:
        unit = 8 if form.codes == EIGHTHS else 1
        numbers += stored.offsets.repeat(form.group, 1)[:, : numbers.shape[1]] / unit
    return numbers * scales.repeat(form.group, 1)[:, : numbers.shape[1]]


def call_of(
    name: str, widths: tuple[int, ...], inputs: int, rows: int, **extra: int
) -> tuple[list[Array | None], dict[str, float], list[Array]]:
    form = FORMS[name]
    parts = [stored_of(form, n, inputs, seed) for seed, n in enumerate(widths)]
    packed = keep(parts, form, interleave=bool(extra))
    x = np.random.default_rng(9).standard_normal((rows, inputs)).astype(np.float32)
    outs = widths[:1] if extra else widths
    names = ("out_features", "out_features_1", "out_features_2")
    attributes: dict[str, float] = {
        **dict(zip(names, outs, strict=False)),
        **form.attributes(),
        **extra,
    }
    operands = [x, packed.weight, packed.scales, packed.group_bytes, None, None]
    return operands, attributes, [meant(part, form) for part in parts]


@pytest.mark.parametrize("name", FORMS)
def test_packing_keeps_every_number(name: str) -> None:
    form, inputs = FORMS[name], 288
    stored = stored_of(form, 41, inputs)
    packed = keep([stored], form)
    back = decode(packed.weight, packed.scales, packed.group_bytes, form.group, form.codes)
    np.testing.assert_array_equal(back[:41, :inputs], meant(stored, form))
    assert not back[41:].any()
    made = shapes([41], inputs, form, has_bias=False)
    found = {n: (a.shape, a.dtype.name) for n in made if (a := getattr(packed, n)) is not None}
    assert found == made


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("isa", ISAS)
def test_is_the_reference(isa: str, name: str) -> None:
    inputs = FORMS[name].group * 3 if FORMS[name].group < 288 else 288
    shapes_: list[tuple[tuple[int, ...], dict[str, int]]] = [
        ((41,), {}),
        ((48, 16, 33), {}),
        ((40, 40), {"silu_mul": 1}),
    ]
    with forced_isa(isa):
        for widths, extra in shapes_:
            for rows in ROWS:
                given, attributes, weights = call_of(name, widths, inputs, rows, **extra)
                expected = linear(*given, **attributes)  # type: ignore[arg-type]
                found = native.run(LINEAR, *given, **attributes)
                pairs = (
                    zip(found, expected, strict=True) if len(widths) > 2 else [(found, expected)]
                )
                for mine, reference in pairs:
                    near = 1e-5 * np.abs(reference).max()
                    np.testing.assert_allclose(mine, reference, rtol=5e-5, atol=near)
                if len(widths) == 1:
                    x = given[0].astype(ml_dtypes.bfloat16).astype(np.float64)  # type: ignore[union-attr]
                    exact = x @ weights[0].T
                    np.testing.assert_allclose(expected, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["AWQ", "MXFP4", "NVFP4", "Q4_K", "IQ4_NL", "FP8", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_is_the_same_bits_at_every_height_and_thread_count(isa: str, name: str) -> None:
    given, attributes, _ = call_of(name, (41,), 384, 40)
    require_equal_rows(isa, given, attributes, (1, 5, 7, 13))


@pytest.mark.parametrize(
    ("name", "of_down"),
    [
        *((name, name) for name in ("AWQ", "MXFP4", "NVFP4", "Q4_K", "IQ4_NL", "FP8", "int8")),
        ("AWQ", "int8"),
        ("FP8", "MXFP4"),
        ("NVFP4", "FP8"),
        ("int8", "groups of 32"),
    ],
)
@pytest.mark.parametrize("isa", ISAS)
def test_experts(isa: str, name: str, of_down: str) -> None:
    """Gate and up, then down, of each row's experts."""
    form, down_form, width, inner, count = FORMS[name], FORMS[of_down], 128, 256, 3
    up = [
        keep([stored_of(form, inner, width, 2 * e + s) for s in (0, 1)], form, interleave=True)
        for e in range(count)
    ]
    down = [keep([stored_of(down_form, width, inner, 50 + e)], down_form) for e in range(count)]

    def stacked(parts: list[Packed], name: str) -> Array | None:
        each = [getattr(part, name) for part in parts]
        return None if each[0] is None else np.stack(each)

    random = np.random.default_rng(3)
    x = (random.standard_normal((20, width)) / 8).astype(np.float32)
    indices = np.stack([random.permutation(count)[:2] for _ in x]).astype(np.int32)
    indices[4, 0] = -1
    weights = random.uniform(0.1, 1, indices.shape).astype(np.float32)
    rest = [stacked(p, n) for p in (up, down) for n in ("scales", "group_bytes", "bias")]
    given = [x, indices, weights, stacked(up, "weight"), stacked(down, "weight"), *rest]
    forms = form.attributes("up_") | down_form.attributes("down_")
    attributes = {"inner_features": inner, **forms}
    with forced_isa(isa):
        found = native.run(EXPERTS, *given, **attributes)
        expected = experts(*given, **attributes)  # type: ignore[arg-type]
        # A number of the middle may round to another bfloat16.
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=2e-3 * np.abs(expected).max())


def test_a_row_with_a_nan_is_nan_and_others_are_not() -> None:
    for name in ("AWQ", "GPTQ", "MXFP4", "NVFP4", "Q4_K", "IQ4_NL", "FP8"):
        given, attributes, _ = call_of(name, (16,), 128, 12)
        x = given[0]
        assert x is not None
        clean = native.run(LINEAR, *given, **attributes)
        x[3, 5] = np.nan
        dirty = native.run(LINEAR, *given, **attributes)
        assert np.isnan(dirty[3]).all()
        others = [i for i in range(12) if i != 3]
        np.testing.assert_array_equal(dirty[others], clean[others])


REFUSED: dict[str, tuple[str, dict[str, float], dict[int, Any], str]] = {
    "group": ("AWQ", {"group": 48}, {}, "linear: group: expected a multiple of 32, got 48"),
    "bits": (
        "AWQ",
        {"bits": 16},
        {},
        "linear: group: expected 0 for 16 bits, got 128",
    ),
    "codes": ("AWQ", {"codes": 2}, {}, "linear: codes: expected 0, 1, 4, 5 or 6 for 4 bits, got 2"),
    "codes without groups": (
        "MXFP4",
        {"group": 0},
        {},
        "linear: codes: expected 0 for 4 bits without groups, got 1",
    ),
    "codes of 8 bits": (
        "AWQ",
        {"bits": 8},
        {},
        "linear: codes: expected 2 or 3 for 8 bits, got 0",
    ),
    "bytes of FP8": (
        "FP8",
        {},
        {3: np.zeros((1, 1, 16), np.int8)},
        "linear: group_bytes: expected none for 8 bits, got some",
    ),
    "no scales": (
        "AWQ",
        {},
        {2: None},
        "linear: scales: expected some for 4 bits, got none",
    ),
    "scales of groups": (
        "AWQ",
        {},
        {2: np.zeros((1, 2, 16), np.float32)},
        "linear: scales: dim num_scales: expected 1, got 2",
    ),
    "no exponents": (
        "MXFP4",
        {},
        {3: None},
        "linear: group_bytes: expected some for 4 bits, got none",
    ),
    "scales of exponents": (
        "MXFP4",
        {},
        {2: np.zeros((1, 4, 16), np.float32)},
        "linear: scales: expected none for 4 bits, got some",
    ),
    "group of NVFP4": (
        "NVFP4",
        {"group": 8},
        {},
        "linear: group: expected a multiple of 16, got 8",
    ),
    "group of MXFP4": (
        "MXFP4",
        {"group": 16},
        {},
        "linear: group: expected a multiple of 32, got 16",
    ),
    "no factors": (
        "NVFP4",
        {},
        {2: None},
        "linear: scales: expected some for 4 bits, got none",
    ),
    "factors of groups": (
        "NVFP4",
        {},
        {2: np.zeros((1, 8, 16), np.float32)},
        "linear: scales: dim num_scales: expected 1, got 8",
    ),
    "bytes of levels": (
        "IQ4_NL",
        {},
        {3: np.zeros((1, 4, 16), np.int8)},
        "linear: group_bytes: expected none for 4 bits, got some",
    ),
    "no eighths": (
        "Q4_K",
        {},
        {3: None},
        "linear: group_bytes: expected some for 4 bits, got none",
    ),
    "no bytes of scales": (
        "NVFP4",
        {},
        {3: None},
        "linear: group_bytes: expected some for 4 bits, got none",
    ),
    "offsets of groups": (
        "AWQ",
        {},
        {3: np.zeros((1, 4, 16), np.int8)},
        "linear: group_bytes: dim num_groups: expected 1, got 4",
    ),
    "bytes": (
        "AWQ",
        {},
        {3: np.zeros((1, 1, 8), np.int8)},
        "linear: group_bytes: dim num_bytes: expected 16, got 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_operand_and_both_values(case: str) -> None:
    name, changed, replaced, sentence = REFUSED[case]
    given, attributes, _ = call_of(name, (16,), 128, 2)
    for index, value in replaced.items():
        given[index] = value
    assert refusals(given, attributes | changed) == [sentence] * 2
