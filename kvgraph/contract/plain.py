"""Conversion between dataclasses and plain data (JSON types); types are checked on reading.

Decision: no validation library. A deployment machine has kvgraph's wheel and the packages of its
framework. It reads only manifests, and their types are few.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeAlias, TypeVar, Union

T = TypeVar("T")

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, as it was read."""

MOST_SAID = 600
"""Most characters of what a message says of a value that a file has."""


def to_plain(value: object) -> Any:
    """Convert dataclasses to dictionaries in field order and tuples to lists, at any depth."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return value


def from_plain(kind: type[T], value: object, where: str = "") -> T:
    """Make a `kind` from plain data. ValueError names the first missing or wrongly typed field.

    Fields that `kind` does not have are ignored.
    """
    return typing.cast(T, _convert(kind, value, where))


def to_json(
    value: object, *, indent: int | None = None, sort: bool = False, errors: str = "strict"
) -> bytes:
    """`value` as JSON in UTF-8: no spaces without `indent`, keys in their order or sorted.

    UnicodeEncodeError for text that UTF-8 cannot encode, such as a path of other bytes; with
    `errors` "backslashreplace" such text is written as JSON's escapes.
    """
    separators = (",", ": ") if indent else (",", ":")
    text = json.dumps(
        value, indent=indent, separators=separators, sort_keys=sort, ensure_ascii=False
    )
    return text.encode(errors=errors)


def from_json(text: bytes) -> JsonObject:
    """The object that JSON text holds. ValueError for another value, and if an object names a key
    twice: readers differ in which value they take, and a hash covers one of them."""
    parsed = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(parsed, dict):
        raise ValueError(f"expected an object, got {in_short(json.dumps(parsed))}")
    return parsed


def _unique(pairs: list[tuple[str, object]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"expected each key once in an object, got {twice!r} twice")
    return found


def in_short(said: object) -> str:
    """`said` as a part of a message: of a long text the beginning and the end."""
    text = str(said)
    return text if len(text) <= MOST_SAID else f"{text[: MOST_SAID - 100]} ... {text[-90:]}"


def _convert(kind: object, value: object, where: str) -> object:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is object:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is list:
        items = _require(list, value, where)
        return [_convert(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(items)]
    if origin is dict:
        entries = _require(dict, value, where)
        return {
            key: _convert(arguments[1], each, f"{where}.{key}") for key, each in entries.items()
        }
    if dataclasses.is_dataclass(kind):
        return _convert_fields(kind, _require(dict, value, where), where)
    return _require(kind, value, where)


def _convert_union(kinds: tuple[object, ...], value: object, where: str) -> object:
    for kind in kinds:
        try:
            return _convert(kind, value, where)
        except ValueError:
            continue
    names = " or ".join(_name(kind) for kind in kinds)
    raise ValueError(f"{where.lstrip('.')}: expected {names}, got {_said(value)}")


def _convert_fields(kind: Any, given: dict[str, object], where: str) -> Any:
    hints, values = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        path = f"{where}.{field.name}"
        if field.name in given:
            values[field.name] = _convert(hints[field.name], given[field.name], path)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{path.lstrip('.')}: expected {_name(hints[field.name])}, got none")
    return kind(**values)


def _require(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{where.lstrip('.')}: expected float, got {_said(value)}") from None
    if type(value) is not kind:  # so that True is no integer
        raise ValueError(f"{where.lstrip('.')}: expected {_name(kind)}, got {_said(value)}")
    return value


def _name(kind: object) -> str:
    if isinstance(kind, type) and not typing.get_args(kind):
        return "null" if kind is type(None) else kind.__name__
    return str(kind)


def _said(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} {text[:50]}..."
