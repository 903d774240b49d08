"""The sampler's kernel: likeliest tokens and total weight of rows, on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from isa import forced_isa

from kvgraph.errors import KernelError
from kvgraph.ops import native
from kvgraph.ops.native import LogitsRow

Array = np.ndarray[Any, Any]
ISAS = ["avx2", "avx512", "avx512_bf16"]


def row(kind: str, vocab: int) -> Array:
    random = np.random.default_rng(vocab)
    logits = (4 * random.standard_normal(vocab)).astype(np.float32)
    if kind == "spiked":
        logits[random.permutation(vocab)[:40]] += 20
    elif kind == "rounded":
        logits = np.round(logits)
    elif kind == "masked":
        logits[random.random(vocab) < 0.7] = -np.inf
    elif kind == "steep":
        logits *= 1e4
    return logits


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["normal", "spiked", "rounded", "masked", "steep"])
@pytest.mark.parametrize(
    ("vocab", "groups", "most"), [(2048, 1024, 128), (9001, 1024, 50), (33, 7, 7)]
)
def test_finds_what_reaches_the_mth_of_the_groups_maxima(
    isa: str, kind: str, vocab: int, groups: int, most: int
) -> None:
    logits = row(kind, vocab)
    with forced_isa(isa):
        (found,) = native.likeliest([LogitsRow(logits, groups, most, 0.7)], vocab, vocab)
    maxima = [logits[g::groups].max() for g in range(groups)]
    least = np.sort(maxima)[groups - most]
    np.testing.assert_array_equal(found.ids, np.flatnonzero(logits >= least))
    assert set(np.sort(logits)[-most:]) <= set(logits[found.ids])
    weights = np.exp((logits.astype(np.float64) - logits.max()) / 0.7)
    assert found.total == pytest.approx(weights.sum(), rel=6e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("at", [0, 5, 2046, 2050])
def test_a_nan_is_told_from_any_place(isa: str, at: int) -> None:
    logits, whole = row("normal", 2051), row("normal", 2051)
    logits[at] = np.nan
    rows = [LogitsRow(each, 1024, 8, 1.0) for each in (logits, whole)]
    with forced_isa(isa):
        broken, sound = native.likeliest(rows, 2051, 2051)
    assert broken.ids is None
    assert sound.ids is not None


def test_more_than_there_is_room_for() -> None:
    logits = np.zeros(4096, np.float32)
    (found,) = native.likeliest([LogitsRow(logits, 1024, 8, 0.0)], 4096, 4095)
    assert found.ids is None


def test_bad_rows() -> None:
    logits = np.zeros(4096, np.float32)
    with pytest.raises(KernelError, match=r"row 0: expected 1 to groups 8 of vocab 4096.* got 9"):
        native.likeliest([LogitsRow(logits, 8, 9, 0.0)], 4096, 64)
    with pytest.raises(KernelError, match=r"expected 4097 logits, got 4096"):
        native.likeliest([LogitsRow(logits, 8, 8, 0.0)], 4097, 64)
    with pytest.raises(KernelError, match=r"expected dense float32 logits, got float64"):
        native.likeliest([LogitsRow(logits.astype(np.float64), 8, 8, 0.0)], 4096, 64)
    with pytest.raises(KernelError, match=r"expected dense float32 logits, .* strides \(8,\)"):
        native.likeliest([LogitsRow(logits[::2], 8, 8, 0.0)], 2048, 64)
