"""Nibbles of the least squared error: the native function against the same steps in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraph.contract.dims import Array
from kvgraph.errors import KernelError
from kvgraph.ops.native import round_groups


def reference(weights: Array, steps: Array) -> tuple[Array, Array]:
    nibbles = np.zeros(weights.shape, np.int8)
    chosen, least = np.zeros(len(weights), np.uint8), np.full(len(weights), np.inf, np.float32)
    for number, tried in enumerate(steps.T):
        step = np.where(tried == 0, np.float32(1), tried)[:, None]
        rounded = np.rint(np.clip(weights / step, -8, 7))
        squares = np.square(rounded * step - weights)
        error = _sum(squares[:, ::2]) + _sum(squares[:, 1::2])
        better = error < least
        least[better], chosen[better] = error[better], number
        nibbles[better] = rounded[better]
    return nibbles, chosen


def _sum(terms: Array) -> Array:
    """Of each row, from its first term to its last."""
    total: Array = np.cumsum(terms, axis=1, dtype=np.float32)[:, -1]
    return total


@pytest.mark.parametrize("width", [2, 32, 48, 256])
@pytest.mark.parametrize("tries", [1, 5])
def test_bytes_are_those_of_the_reference(width: int, tries: int) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2003, width)).astype(np.float32)
    weights[::7] *= np.float32(1e-30)
    weights[::11] = 0
    largest = np.abs(weights).max(1, keepdims=True)
    shares = np.linspace(1, 0.5, tries, dtype=np.float32) / np.float32(7)
    steps = largest * shares * rng.choice([-1, 1], (2003, 1)).astype(np.float32)
    for got, expected in zip(round_groups(weights, steps), reference(weights, steps), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_ties_go_to_the_even_nibble_and_to_the_first_step() -> None:
    weights = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.5, -8.5] * 2], np.float32)
    nibbles, chosen = round_groups(weights, np.array([[1, 1]], np.float32))
    assert nibbles[0, :8].tolist() == [0, 2, 2, 0, -2, -2, 7, -8]
    assert chosen.tolist() == [0]


def test_weights_beyond_the_nibbles_are_clipped() -> None:
    weights = np.array([[1e30, -1e30] * 8], np.float32)
    nibbles, _ = round_groups(weights, np.array([[1e-3]], np.float32))
    assert nibbles[0, :2].tolist() == [7, -8]


@pytest.mark.parametrize("exponent", [1, 60, 100, 124])
def test_choices_do_not_depend_on_the_size_of_large_weights(exponent: int) -> None:
    """Most squares of such weights do not fit float32."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((99, 32)).astype(np.float32)
    steps = np.abs(weights).max(1, keepdims=True) / np.array([7, 8, 9, 10, 11], np.float32)
    expected = reference(weights, steps)
    assert expected[1].any()
    factor = np.float32(2) ** exponent
    for got, wanted in zip(round_groups(weights * factor, steps * factor), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_first_step_of_which_none_fits() -> None:
    """Every product of a nibble and a step is infinite."""
    weights = np.full((1, 16), np.finfo(np.float32).max)
    steps = np.array([[weights.max() * np.float32(0.6), weights.max() * np.float32(0.55)]])
    nibbles, chosen = round_groups(weights, steps)
    assert nibbles[0].tolist() == [2] * 16
    assert chosen.tolist() == [0]


@pytest.mark.parametrize(
    ("weights", "steps", "message"),
    [
        (np.zeros((2, 25), np.float32), np.ones((2, 1), np.float32), "width: .* to 256, got 25"),
        (np.zeros((2, 258), np.float32), np.ones((2, 1), np.float32), "width: .* to 256, got 258"),
        (np.zeros((2, 16), np.float32), np.ones((2, 0), np.float32), "tries: .*1 to 256, got 0"),
        (np.zeros((2, 16), np.float32), np.ones((3, 1), np.float32), "steps of 2 groups, got 3"),
        (np.zeros((2, 16)), np.ones((2, 1), np.float32), r"weights \[groups, inputs\], got fl"),
        (np.zeros((2, 16), np.float32), np.ones((2, 2), np.float32)[:, :1], "strides"),
        (np.zeros((2, 32), np.float32)[:, ::2], np.ones((2, 1), np.float32), "strides"),
    ],
)
def test_refused(weights: Array, steps: Array, message: str) -> None:
    with pytest.raises(KernelError, match=f"^round_groups: .*{message}"):
        round_groups(weights, steps)
