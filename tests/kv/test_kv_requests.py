"""TextContext: lengths, chunks, and bad input."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from kvgraph.errors import RequestError
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.requests import TextContext


def lengths(ctx: TextContext) -> tuple[int, int, int]:
    return ctx.processed_length, ctx.active_length, ctx.current_length


def test_prefill_then_decode() -> None:
    ctx = TextContext("a", [5, 6, 7])
    assert lengths(ctx) == (0, 3, 3)
    ctx.update(8)
    assert lengths(ctx) == (3, 1, 4)
    assert ctx.active_tokens.tolist() == [8]
    ctx.update(9, 10)
    assert lengths(ctx) == (4, 2, 6)
    assert ctx.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert ctx.tokens.dtype == np.int32


def test_chunks() -> None:
    ctx = TextContext("a", range(10))
    ctx.active_length = 4
    with pytest.raises(RequestError, match="ends at 4 of 10 tokens, got 1"):
        ctx.update(1)
    ctx.update()
    assert lengths(ctx) == (4, 6, 10)
    ctx.update(1)
    assert lengths(ctx) == (10, 1, 11)


def test_skip_and_rewind() -> None:
    ctx = TextContext("a", range(10))
    ctx.active_length = 2
    ctx.skip_processing(4)
    assert lengths(ctx) == (4, 6, 10)
    for count in (-1, 7):
        with pytest.raises(RequestError, match=f"expected 0 to 6 tokens, got {count}"):
            ctx.skip_processing(count)
    ctx.rewind()
    assert lengths(ctx) == (0, 10, 10)


@pytest.mark.parametrize("count", [1.5, "1", None, True, -1, 4])
def test_an_active_length_is_a_part_of_the_rest(count: Any) -> None:
    ctx = TextContext("a", [1, 2, 3])
    with pytest.raises(RequestError, match=r"^active_length of 'a': expected .*, got .*"):
        ctx.active_length = count
    assert lengths(ctx) == (0, 3, 3)
    given: Any = np.int64(2)
    ctx.active_length = given
    assert type(ctx.active_length) is int
    ctx.update()
    with pytest.raises(RequestError, match="expected 0 to 1 tokens, the rest of 3, got 2"):
        ctx.active_length = 2


@pytest.mark.parametrize("count", [0.5, "1", None, True])
def test_a_skip_is_a_whole_number(count: Any) -> None:
    ctx = TextContext("a", range(10))
    text = f"skip_processing of 'a': expected an integer, got {type(count).__name__} {count!r}"
    with pytest.raises(RequestError, match=f"^{text}$"):
        ctx.skip_processing(count)
    assert lengths(ctx) == (0, 10, 10)
    ctx.skip_processing(np.int64(4))  # type: ignore[arg-type]
    assert type(ctx.processed_length) is int


def test_tokens_grow_and_are_a_copy() -> None:
    given = np.arange(3, dtype=np.int32)
    ctx = TextContext("a", given)
    given[:] = 0
    for token in range(500):
        ctx.update(token)
    assert ctx.tokens.tolist() == [0, 1, 2, *range(500)]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([], r"at least one token.*shape \[0\]"),
        ([[1, 2]], r"one dimension.*shape \[1, 2\]"),
        ([1.5], "integers, got float64"),
        ([2**31], "int32 values, got 2147483648"),
        ([3, -1], "non-negative int32 values, got -1 to 3"),
        ([True], "integers, got bool"),
        ([[1], [1, 2]], "integers, got setting an array element"),
    ],
)
def test_bad_tokens(tokens: list[int], text: str) -> None:
    with pytest.raises(RequestError, match=f"tokens of 'a': expected .*{text}|{text}"):
        TextContext("a", tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ["a"]}, r"request_id: expected a hashable key, got \['a'\]"),
        ({"request_id": ("a", [])}, r"request_id: expected a hashable key, got \('a', \[\]\)"),
        ({"cache_salt": "s"}, "cache_salt of 'a': expected bytes, got str 's'"),
        ({"cache_salt": None}, "cache_salt of 'a': expected bytes, got NoneType None"),
        ({"adapter": b"x"}, "adapter of 'a': expected str, got bytes b'x'"),
        ({"adapter": "\ud800"}, r"adapter of 'a': expected text in Unicode, got str '\\ud800'"),
        ({"is_private": 1}, "is_private of 'a': expected bool, got int 1"),
    ],
)
def test_bad_types(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}$"):
        TextContext(**({"request_id": "a", "tokens": [1]} | fields))


def test_tokens_cannot_be_written_to() -> None:
    """A page is known by the tokens that it was computed of."""
    context = TextContext("a", [1, 2, 3])
    for count in (1, 70):  # in place, and grown
        for view in (context.tokens, context.active_tokens):
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 9
        context.update(*range(count))
        assert context.tokens[-1] == count - 1


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_goes_on_alone(copied: Any) -> None:
    context = TextContext("a", range(70))
    context.update(70)  # with room behind it
    other = copied(context)
    other.update(71)
    assert other.tokens[-3:].tolist() == [69, 70, 71]
    assert other.active_tokens.tolist() == [71]
    context.update(72)
    assert context.tokens[-2:].tolist() == [70, 72]
    assert other.tokens[-1] == 71
    with pytest.raises(ValueError, match="read-only"):
        other.tokens[0] = 9


def test_bad_generated_token_changes_nothing() -> None:
    ctx = TextContext("a", [1])
    token: Any
    for token in (2**31, 1.7, "x", None, -1):
        with pytest.raises(RequestError, match="int32 tokens, got"):
            ctx.update(token)
        assert lengths(ctx) == (0, 1, 1)
    ctx.update(np.int64(5))
    assert ctx.tokens.tolist() == [1, 5]


def test_metrics_add() -> None:
    total = KVCacheMetrics(input_tokens=3, evictions=1) + KVCacheMetrics(cache_tokens=1)
    assert total == KVCacheMetrics(input_tokens=3, cache_tokens=1, evictions=1)
    assert (total.prompt_tokens, total.cache_hit_rate) == (4, 0.25)
    assert KVCacheMetrics().cache_hit_rate == 0
