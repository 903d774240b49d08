"""Null pointers to what the entry points other than the ops read and write are refused by name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from kvgraph.contract.dims import Array
from kvgraph.ops import native

VOCAB, WIDTH = 10, 8


def said(entry: Callable[..., int], *given: object) -> str:
    """The sentence with which an entry point refuses; "" where it does not."""
    message = native.MESSAGE()
    status = entry(*given, message, native.MESSAGE_BYTES)
    assert (status != 0) == bool(message.value)
    return message.value.decode()


def addresses(memory: Mapping[str, Array], null: str | None) -> dict[str, int | None]:
    return {name: None if name == null else array.ctypes.data for name, array in memory.items()}


def sample(null: str | None, rows: int = 1) -> str:
    """With edits of its last row where there are two."""
    edits_of = {
        "banned": np.zeros(2, np.int32),
        "biased": np.zeros(1, np.int32),
        "bias": np.ones(1, np.float32),
        "tokens": np.zeros(3, np.int32),
    }
    counts = {"num_banned": 2, "num_biased": 1, "num_tokens": 3, "repetition": 1.0}
    edits = native.Edits(**addresses(edits_of, null), **counts)
    packed = native.DRAW.pack(0.0, 1.0, 0.0, 0, 0.0, 0)
    if rows == 2:
        packed += native.DRAW.pack(0.0, 1.0, 0.0, 0, 0.0, ctypes.addressof(edits))
    memory: dict[str, Array] = {
        "logits": np.zeros((rows, VOCAB), np.float32),
        "draws": np.frombuffer(packed, np.uint8),
        "drawn": np.zeros((rows, 2), np.int32),
    }
    at = addresses(memory, null)
    entry = native.library().dll.kvg_cpu_sample
    return said(entry, at["logits"], at["draws"], rows, VOCAB, at["drawn"])


@pytest.mark.parametrize("null", [None, "logits", "draws", "drawn"])
def test_of_a_sampler(null: str | None) -> None:
    sentence = f"sample: {null}: expected data, got a null pointer"
    assert sample(null) == (sentence if null else "")


@pytest.mark.parametrize("null", [None, "banned", "biased", "bias", "tokens"])
def test_of_edits(null: str | None) -> None:
    sentence = f"sample: row 1: {null}: expected data, got a null pointer"
    assert sample(null, 2) == (sentence if null else "")


@pytest.mark.parametrize("null", [None, "logits", "asked", "found"])
def test_of_log_probabilities(null: str | None) -> None:
    memory: dict[str, Array] = {
        "logits": np.zeros((1, VOCAB), np.float32),
        "asked": np.frombuffer(native.SCORED.pack(0, 1, 1), np.uint8),
        "found": np.zeros(native.MOST_LOGPROBS + 1, native.LOGPROB),
    }
    at = addresses(memory, null)
    entry = native.library().dll.kvg_cpu_logprobs
    sentence = f"logprobs: {null}: expected data, got a null pointer"
    answer = said(entry, at["logits"], 1, VOCAB, at["asked"], 1, at["found"])
    assert answer == (sentence if null else "")


@pytest.mark.parametrize("null", [None, "weights", "steps", "nibbles", "chosen"])
def test_of_groups(null: str | None) -> None:
    memory: dict[str, Array] = {
        "weights": np.ones(WIDTH, np.float32),
        "steps": np.ones(1, np.float32),
        "nibbles": np.zeros(WIDTH, np.int8),
        "chosen": np.zeros(1, np.uint8),
    }
    weights, steps, *written = addresses(memory, null).values()
    entry = native.library().dll.kvg_cpu_round_groups
    sentence = f"round_groups: {null}: expected data, got a null pointer"
    answer = said(entry, weights, steps, 1, WIDTH, 1, *written)
    assert answer == (sentence if null else "")


def test_of_nothing_they_may_be() -> None:
    dll = native.library().dll
    assert said(dll.kvg_cpu_sample, None, None, 0, VOCAB, None) == ""
    assert said(dll.kvg_cpu_logprobs, None, 0, VOCAB, None, 0, None) == ""
    assert said(dll.kvg_cpu_round_groups, None, None, 0, WIDTH, 1, None, None) == ""
