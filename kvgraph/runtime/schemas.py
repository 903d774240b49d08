"""JSON schemas as llguidance reads them: for the same texts, or for more in a lenient reading.

Three things are written in another way. A `oneOf` whose branches differ in a tag is an `anyOf` that
requires the tag: llguidance sees no tag through a `$ref`. Other parts that refer to such a branch
require the tag too. `propertyNames` with a list of names are the only keys. Keys without a meaning
are taken out: a `format` that llguidance does not know (JSON Schema has it as an annotation),
"uniqueItems": false, and "additionalItems" without a list of "items", for which llguidance would
drop "prefixItems".
"""

from __future__ import annotations

import json
import re
from typing import cast

from kvgraph.contract.plain import JsonObject
from kvgraph.errors import RequestError
from kvgraph.runtime.grammars import (
    BOUNDS,
    MOST_BYTES,
    MOST_DEPTH,
    MOST_INTEGER,
    MOST_KEYS,
    NAMED,
    PLAIN,
    VALUES,
    require_small,
    target_of,
)

FORMATS = (
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "unknown",
    "uri",
    "uuid",
)
"""Values of `format` that llguidance knows."""

UNREAD = (
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
)
"""Keys that llguidance refuses, next to some `oneOf` and `propertyNames`."""

ANNOTATIONS = (
    "$comment",
    "contentEncoding",
    "contentMediaType",
    "default",
    "deprecated",
    "description",
    "example",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
)
"""Keys that tell about a value, and do not limit it."""

STEP = re.compile(r"(\\[1-9bBkGZ]|\(\?(?:<?[=!]|>|P=))|\[\^?\]?(?:\\.|[^\]\\])*\]|\\.|.", re.DOTALL)
"""A step of a pattern; the group matches what llguidance refuses: a look-around, a reference to a
group, a boundary of words or of the text. A class is one step."""

MOST_HOPS = 8
"""Most references that are followed to one part."""


def read_schema(schema: JsonObject, *, is_exact: bool = True) -> JsonObject:
    """The schema as llguidance reads it. It must be within a grammar's limits of size and depth.

    `is_exact`: false takes out what would be refused, so that more texts fit: keys of UNREAD, some
    patterns and `propertyNames`, and bounds above 2**53; and `oneOf` is `anyOf`. What is left holds
    as before.
    ValueError if `propertyNames` make a schema that is too large.
    """
    return cast(JsonObject, _Reader(schema, is_exact).read(schema, schema))


def schema_as_read(place: str, schema: JsonObject, *, is_exact: bool) -> JsonObject:
    """The schema at a place in a request, without annotations, as `read_schema` reads it.

    RequestError, with the place, if it exceeds a grammar's limits.
    """
    plain = without_annotations(schema)
    require_small(place, plain)
    try:
        return read_schema(plain, is_exact=is_exact)
    except ValueError as error:
        raise RequestError(f"{place}: expected a schema within the limits, got {error}") from error


def without_annotations(schema: JsonObject) -> JsonObject:
    """The schema without keys of ANNOTATIONS, except objects: a reference may lead to one.

    A schema above a grammar's limits stays above them, but may keep its annotations."""
    room = MOST_BYTES

    def read(part: object, depth: int, is_by_name: bool = False) -> object:
        nonlocal room
        if not isinstance(part, dict | list) or depth > MOST_DEPTH:
            return part
        kept = part
        if isinstance(part, dict) and not is_by_name:
            kept = {
                key: value
                for key, value in part.items()
                if key not in ANNOTATIONS or isinstance(value, dict)
            }
        room -= len(kept)
        if room < 0:
            return part
        if isinstance(kept, list):
            return [read(each, depth + 1) for each in kept]
        return {
            key: value
            if key in PLAIN and not is_by_name
            else read(value, depth + 1, key in NAMED and not is_by_name)
            for key, value in kept.items()
        }

    return cast(JsonObject, read(schema, 0))


class _Reader:
    """Reads the parts of one schema. `root`: the part that a reference `#/...` starts from."""

    def __init__(self, schema: JsonObject, is_exact: bool) -> None:
        self._is_exact = is_exact
        self._room = MOST_BYTES
        self._unions: set[int] = set()
        """Ids of parts with a `oneOf` whose branches have a tag."""
        self._tags: dict[int, list[object]] = {}
        """Tags of each branch, by its id."""
        self._led_through: set[str] = set()
        """Keys that references lead through, which stay where they are."""
        self._find_tags(schema, schema)

    def _find_tags(self, part: object, root: JsonObject, is_by_name: bool = False) -> None:
        if isinstance(part, list):
            for each in part:
                self._find_tags(each, root)
        if not isinstance(part, dict):
            return
        root = _root(part, root)
        self._led_through.update(str(part.get("$ref", "")).split("/")[1:])
        if not is_by_name and "anyOf" not in part and isinstance(part.get("oneOf"), list):
            branches = [_followed(each, root) for each in part["oneOf"]]
            tag = _tag(part, branches, root)
            if tag is not None or len(branches) == 1:
                self._unions.add(id(part))
            for branch in branches if tag is not None and len(branches) > 1 else []:
                self._tags.setdefault(id(branch), []).append(tag)
        for key, each in part.items():
            if is_by_name or key not in PLAIN:
                self._find_tags(each, root, not is_by_name and key in NAMED)

    def read(self, part: object, root: JsonObject, is_by_name: bool = False) -> object:
        """A part as llguidance reads it. `is_by_name`: it maps names to schemas."""
        if isinstance(part, list):
            return [self.read(each, root) for each in part]
        if not isinstance(part, dict):
            return part
        root = _root(part, root)
        if is_by_name:
            return {name: self.read(each, root) for name, each in part.items()}
        made = {
            key: value if key in PLAIN else self.read(value, root, key in NAMED)
            for key, value in part.items()
            if not _is_void(key, part) and (self._is_exact or not self._is_unread(key, value))
        }
        if tags := self._tags.get(id(part)):
            own = cast(list[object], made.get("required", []))
            made["required"] = list(dict.fromkeys([*own, *tags]))
        is_coerced = not self._is_exact and "oneOf" in made and "anyOf" not in made
        if "oneOf" not in self._led_through and (id(part) in self._unions or is_coerced):
            made["anyOf"] = made.pop("oneOf")
        if "propertyNames" in made:
            self._close(made, root)
        if not self._is_exact:
            _open_unread(made)
        return made

    def _is_unread(self, key: str, value: object) -> bool:
        """Whether a key is refused next to any other key, and no reference leads through
        it."""
        if key == "pattern" and isinstance(value, str):
            return _is_unread_pattern(value)
        if key in BOUNDS and isinstance(value, int | float):
            return abs(value) > MOST_INTEGER
        return key in UNREAD and key not in self._led_through

    def _close(self, made: JsonObject, root: JsonObject) -> None:
        """Replace `propertyNames` by keys, if they are a list of names."""
        given = made.pop("propertyNames")
        if given is True or (isinstance(given, dict) and _keys(given) in ({}, {"type": "string"})):
            return
        names = None if made.get("patternProperties") else _names(_followed(given, root))
        fields, rest = made.get("properties"), made.get("additionalProperties", True)
        known = fields if isinstance(fields, dict) else {}
        if names is None or self._led_through & known.keys() - set(names):
            if self._is_exact:
                made["propertyNames"] = given
            return
        self._room -= len(json.dumps(names)) + len(names) * len(json.dumps(rest))
        if self._room < 0 or len(names) > MOST_KEYS:
            raise ValueError(f"propertyNames that make over {MOST_KEYS} keys or {MOST_BYTES} bytes")
        made["properties"] = {name: known.get(name, rest) for name in names}
        made["additionalProperties"] = False


def _root(part: JsonObject, root: JsonObject) -> JsonObject:
    own = part.get("$id")
    return part if isinstance(own, str) and own.partition("#")[0] else root


def _keys(part: JsonObject) -> dict[str, object]:
    """The keys of a part that limit its values."""
    return {key: value for key, value in part.items() if key not in ANNOTATIONS}


def _followed(part: object, root: JsonObject) -> object:
    """The part that a part stands for, which may be only a reference; None if there is none."""
    for _ in range(MOST_HOPS):
        if not isinstance(part, dict) or _keys(part).keys() != {"$ref"}:
            return part
        part = target_of(root, str(part["$ref"]))
    return None


def _values(part: object) -> list[object]:
    """The values that `const` or `enum` allow, if they are plain; empty for other parts."""
    if not isinstance(part, dict):
        return []
    values = [part["const"]] if "const" in part else part.get("enum")
    is_plain = isinstance(values, list) and all(isinstance(one, str | int) for one in values)
    return list(dict.fromkeys(values)) if values and is_plain else []


def _names(part: object) -> list[str] | None:
    """The names that a schema of names allows; None if they are not a list."""
    if not isinstance(part, dict):
        return None
    kept = _keys(part)
    if len(kept.keys() & set(VALUES)) != 1 or kept.keys() - {"type", *VALUES}:
        return None
    if kept.get("type", "string") != "string":
        return None
    return [name for name in _values(part) if isinstance(name, str)] or None


def _tag(part: JsonObject, branches: list[object], root: JsonObject) -> str | None:
    """The key in which the branches of a `oneOf` have different values; None if there is none."""
    fields = [
        branch["properties"]
        for branch in branches
        if isinstance(branch, dict)
        and branch.get("type") == "object"
        and isinstance(branch.get("properties"), dict)
        and isinstance(branch.get("required", []), list)
    ]
    if len(fields) < len(branches) or not fields:
        return None
    discriminator = part.get("discriminator")
    named = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    for tag in [named] if isinstance(named, str) else fields[0]:
        known = set[object]()
        for each in fields:
            values = _values(_followed(each.get(tag), root))
            if not values or not known.isdisjoint(values):
                break
            known.update(values)
        else:
            return str(tag)
    return None


def _is_void(key: str, part: JsonObject) -> bool:
    """Whether a key of a schema has no meaning in it."""
    if key == "additionalItems":
        return not isinstance(part.get("items"), list)
    if key == "format":
        return isinstance(part[key], str) and part[key] not in FORMATS
    return key == "uniqueItems" and part[key] is False


def _is_unread_pattern(pattern: str) -> bool:
    return any(step[1] for step in STEP.finditer(pattern))


def _open_unread(made: JsonObject) -> None:
    """Leave out names by patterns that llguidance refuses. Such names are additional ones then."""
    given = made.get("patternProperties")
    if not isinstance(given, dict) or not any(map(_is_unread_pattern, given)):
        return
    made["patternProperties"] = {
        name: each for name, each in given.items() if not _is_unread_pattern(name)
    }
    made.pop("additionalProperties", None)
