"""Checks of what a caller passes to an engine; all raise RequestError.

NumPy's scalars are taken as Python's. Booleans are neither integers nor numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from pathlib import PurePath
from typing import SupportsIndex, TypeVar, cast

from kvgraph.contract.values import (
    BOOLEANS,
    as_integer,
    require_boolean,
    require_integer,
    require_number,
    shown,
)
from kvgraph.errors import RequestError

T = TypeVar("T")

MOST_BIASES = 1024
LARGEST_BIAS = 100.0
"""OpenAI's range of a bias: -100 to 100."""


def integer(
    name: str, value: object, least: int, most: int | None = None, *, or_else: str = ""
) -> int:
    """`value` as an int from `least` to `most`. `or_else`: other allowed values, for the error."""
    return require_integer(name, value, RequestError, least=least, most=most, or_else=or_else)


def optional_integer(name: str, value: object, least: int, most: int | None = None) -> int | None:
    """`value` as an int of `least` to `most`, or None."""
    return None if value is None else integer(name, value, least, most, or_else=" or None")


def number(name: str, value: object) -> float:
    """`value` as a float."""
    return require_number(name, value, RequestError)


def flag(name: str, value: object) -> bool:
    """`value` as a bool."""
    return require_boolean(name, value, RequestError)


def instance(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise RequestError unless `value` is a `kind`; `expected` describes `kind` in the error."""
    if not isinstance(value, kind):
        raise RequestError(f"{name}: expected {expected}, got {shown(value)}")


def integers(name: str, values: object, least: int, most: int) -> tuple[int, ...]:
    """`values` as a tuple of at most `most` ints, each at least `least`."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{name}: expected integers >= {least}, got {shown(values)}")
    given = tuple(values)
    if len(given) > most:
        raise RequestError(f"{name}: expected at most {most}, got {len(given)}")
    return tuple([integer(name, value, least) for value in given])


def texts(name: str, values: object, most: int, most_characters: int) -> tuple[str, ...]:
    """`values` (one text or up to `most`) as a tuple of non-empty texts.

    `most_characters`: upper bound of their total length.
    """
    given = (values,) if isinstance(values, str) else values
    if not isinstance(given, list | tuple):
        raise RequestError(f"{name}: expected text, or a list of it, got {shown(values)}")
    if len(given) > most:
        raise RequestError(f"{name}: expected at most {most}, got {len(given)}")
    for text in given:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name}: expected text that is not empty, got {shown(text)}")
    if (length := sum(map(len, given))) > most_characters:
        raise RequestError(
            f"{name}: expected at most {most_characters} characters together, got {length}"
        )
    return tuple(given)


def biases(name: str, values: object) -> dict[int, float] | None:
    """`values` as a map from token id to the number added to its logit; None for None."""
    if values is None:
        return None
    instance(name, values, Mapping, "token ids with numbers")
    given = cast(Mapping[object, object], values)
    if len(given) > MOST_BIASES:
        raise RequestError(f"{name}: expected at most {MOST_BIASES} tokens, got {len(given)}")
    own = {}
    for token, value in given.items():
        token_id = integer(name, token, 0)
        bias = number(f"{name}[{token_id}]", value)
        if not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            raise RequestError(f"{name}[{token_id}]: expected in [-100, 100], got {bias}")
        own[token_id] = bias
    return own


def require_fields(
    kind: type, values: Sequence[object], given: Mapping[str, object], aliases: Mapping[str, str]
) -> None:
    """Raise TypeError, with the nearest field name, unless all names are fields of `kind`.

    `kind`: a dataclass. `values`, `given`: positional and keyword arguments of its constructor.
    `aliases`: alias -> field. RequestError if both a field and its alias are given.
    """
    names = list(getattr(kind, "__dataclass_fields__"))  # noqa: B009
    for name in given.keys() - names:
        nearest = get_close_matches(name, names, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise TypeError(f"{kind.__name__}: expected one of its fields, got {name!r}{hint}")
    for alias, name in aliases.items():
        if given.get(alias) is not None and (name in given or name in names[: len(values)]):
            raise RequestError(f"{name}, {alias}: expected one of the two, got both")


def token_ids(prompt: Iterable[object]) -> list[int]:
    """A prompt of token ids as a list of ints. RequestError for other or unordered values."""
    tokens = _listed(prompt, "prompt: expected text or token ids")
    try:
        if set(map(type, tokens)).isdisjoint(BOOLEANS):
            return list(map(operator.index, cast(list[SupportsIndex], tokens)))
    except TypeError:
        pass  # the sentence below names the token
    at, token = next((i, token) for i, token in enumerate(tokens) if as_integer(token) is None)
    raise RequestError(f"prompt: expected text or token ids, got {shown(token)} at position {at}")


def sequence(name: str, one: str, values: Iterable[T]) -> list[T]:
    """`values` as a list. RequestError for a single value; `one` is its kind, for the error."""
    if isinstance(values, str | PurePath):
        raise RequestError(f"{name}: expected a list, got one {one}; use [{one}]")
    return _listed(values, f"{name}: expected a list")


def one_for_each(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """One value for each of `count` prompts: `given` itself, or a single value repeated."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{name}: expected {count}, one for each prompt, got {len(given)}")
    return given


def _listed(values: Iterable[T], expected: str) -> list[T]:
    """An ordered iterable as a list; RequestError for bytes, sets, mappings and non-iterables."""
    if not isinstance(values, bytes | bytearray | memoryview | Set | Mapping):
        try:
            return list(values)
        except TypeError:
            pass  # not iterable
    raise RequestError(f"{expected}, got {shown(values)}")
