"""Quantised storage of keys and values whose magnitudes are extreme."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgraph.contract.dtypes import DTYPES, QUANTIZED
from kvgraph.ops import STORE_KV, native
from kvgraph.ops.matrices import rounded
from kvgraph.ops.packed import E4M3, INT8

LEAST = float(np.finfo(np.float32).smallest_subnormal)
DENORMAL = [190 * LEAST, 670 * LEAST, 1e-41, 1e-40]
"""Magnitudes whose scale is denormal. Divided by it they may exceed the largest storable."""


def stored(x_TKD: Any, dtype: str, by: Any) -> list[Any]:
    """The pool, keys and their negatives in one page, and its scales."""
    tokens, kv_heads, head_dim = x_TKD.shape
    pool = np.zeros((1, 2, 1, tokens, kv_heads, head_dim), DTYPES[dtype].numpy)
    scales = np.zeros((*pool.shape[:-1], 2), np.float32)
    index = np.array([0, tokens], np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    by(STORE_KV, pool, x_TKD, -x_TKD, *index, scales, layer=0)
    return [pool, scales]


def reference(spec: Any, *arrays: Any, **attributes: Any) -> Any:
    return spec.reference(*arrays, **attributes)


@pytest.mark.parametrize("largest", DENORMAL)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_tiny_numbers_are_stored_as_numbers(dtype: str, largest: float) -> None:
    x_TKD = np.full((2, 2, 16), largest, np.float32)
    x_TKD[1, :, ::2] *= -0.5
    pool, scales = stored(x_TKD, dtype, native.run)
    wanted, wanted_scales = stored(x_TKD, dtype, reference)
    assert pool.tobytes() == wanted.tobytes()
    assert scales.tobytes() == wanted_scales.tobytes()
    meant_TKD = (pool.astype(np.float32) * np.repeat(scales, 8, -1))[0, 0, 0]
    assert np.isfinite(meant_TKD).all()
    assert (np.sign(meant_TKD) != -np.sign(x_TKD)).all()


@pytest.mark.parametrize("by", [native.run, reference])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_nan_stays_one_and_others_do_not_become_one(dtype: str, by: Any) -> None:
    x_TKD = np.ones((2, 1, 16), np.float32)
    x_TKD[0, 0, 3] = np.nan
    with np.errstate(invalid="ignore"):  # a reference casts NaN to int8
        pool, scales = stored(x_TKD, dtype, by)
    meant_TD = (pool.astype(np.float32) * np.repeat(scales, 8, -1))[0, 0, 0, :, 0]
    assert np.isnan(meant_TD[0, 3])
    assert np.isfinite(meant_TD[0, 8:]).all()
    np.testing.assert_array_equal(meant_TD[1], x_TKD[1, 0])


@pytest.mark.parametrize("largest", DENORMAL)
@pytest.mark.parametrize("codes", [INT8, E4M3])
def test_rows_of_tiny_numbers_are_rounded_to_numbers(codes: int, largest: float) -> None:
    x_MK = np.array([[largest, -largest, largest / 2]], np.float32)
    found = rounded(x_MK, codes)
    assert np.isfinite(found).all()
    assert (np.sign(found) != -np.sign(x_MK)).all()


def test_a_magnitude_above_the_largest_is_a_nan_in_float8() -> None:
    """Why quotients are clamped."""
    assert np.isnan(np.float32(670).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
