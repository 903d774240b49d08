"""Weights are made on threads: their order, what is begun before its turn, and errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from kvgraph.compiler.targets.weights import one_torch_thread
from kvgraph.compiler.threads import MOST, in_order


def made(number: int, seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return number


def test_results_come_in_the_order_of_their_calls() -> None:
    calls = [partial(made, number, 0.02 if number % 3 == 0 else 0.0) for number in range(20)]
    assert list(in_order(calls)) == list(range(20))
    assert list(in_order([])) == []


def test_few_calls_begin_before_their_turn() -> None:
    """So that a model's weights are in memory a few at a time."""
    taken: list[int] = []

    def calls() -> Iterator[Callable[[], int]]:
        for number in range(100):
            taken.append(number)
            yield partial(made, number)

    for number in in_order(calls()):
        assert len(taken) <= number + MOST + 1


def test_the_first_error_in_order_is_raised() -> None:
    def fail(number: int, seconds: float) -> int:
        time.sleep(seconds)
        raise ValueError(f"number {number}")

    found = in_order([partial(made, 0), partial(fail, 1, 0.05), partial(fail, 2, 0.0)])
    assert next(found) == 0
    with pytest.raises(ValueError, match="number 1"):
        next(found)
    assert list(in_order([partial(made, 3)])) == [3]


def test_torchs_own_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
