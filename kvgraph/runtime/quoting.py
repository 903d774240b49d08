r"""JSON schemas for llguidance, without the keys and texts that it reads wrongly.

llguidance matches strings in their JSON form. It writes a class of characters that has all control
characters as one that has `\"` and `\\` too, so `[^"]` takes a quote. So classes lose NUL here,
which no text needs. An open key may spell a named one, as `"\u0067"` for `"g"`, so such schemas
have no `\u` in strings.
"""

from __future__ import annotations

import json
import re

from kvgraph.contract.plain import JsonObject
from kvgraph.runtime.grammars import NAMED, PLAIN
from kvgraph.runtime.schemas import read_schema

OPTIONS: JsonObject = {"whitespace_flexible": False}
"""llguidance's options for every schema."""

SHORT_ESCAPES = 'nrbtf\\"'
"""What may stand after a backslash in a string, without `u`."""

NAMES_CONTROLS = re.compile(r"\\u00(?:[01]|7f)|\x7f|\\\\[xuUavpP]|:cntrl:", re.IGNORECASE)
"""Matches a schema, as text, that may ask for a control character: it needs `\\u`."""

OUTSIDE = re.compile(r"\\[pP]\{[^}]*\}|\\[pP]?.?|\[\^?(?:-+|\])?|[^\\\[]+", re.DOTALL)
"""A step outside of classes: an escape, the start of a class with its literal first characters, or
plain text."""

INSIDE = re.compile(
    r"\[\^?(?:-+|\])?|\]|&&|--|~~|(?:\\.|[^\[\]\\-])-(?:\\.|[^\]\\-])|\\.|.", re.DOTALL
)
"""A step in a class: the start or end of a class, an operator, a range, or a character. A range may
end in a bracket."""

SPACED = re.compile(r"\(\?[a-zA-Z-]*x")
"""Matches an expression with flag x, in which spaces and comments are no text."""


def as_quoted(text: str) -> tuple[str, JsonObject]:
    """Return the schema `text` as llguidance reads it right, and its options.

    ValueError as from `read_schema`.
    """
    schema = read_schema(json.loads(text))
    options = OPTIONS
    if _has_open_names(schema) and not NAMES_CONTROLS.search(text):
        options = OPTIONS | {"json_allowed_escapes": SHORT_ESCAPES}
    return json.dumps(_quoted(schema)), options


def without_nul(pattern: str) -> str:
    """A regular expression with NUL taken from each of its classes.

    It is unchanged if it has flag x, or a class without an end.
    """
    made, part, depth, at = list[str](), "", 0, 0
    while step := (INSIDE if depth else OUTSIDE).match(pattern, at):
        at, text = step.end(), step[0]
        if text.startswith("["):
            depth += 1
        elif text == "]" and depth:
            depth -= 1
        part += text
        if not depth:
            is_class = part.startswith(("[", r"\p", r"\P"))
            made.append(f"[{part}&&[^\\x00]]" if is_class else part)
            part = ""
    return pattern if depth or SPACED.search(pattern) else "".join(made)


def _quoted(part: object, is_by_name: bool = False) -> object:
    """A part of a schema, as llguidance reads it right. `is_by_name`: it maps names to schemas."""
    if isinstance(part, list):
        return [_quoted(each) for each in part]
    if not isinstance(part, dict):
        return part
    made: dict[str, object] = {}
    for key, value in part.items():
        if is_by_name:
            made[key] = _quoted(value)
        elif key == "pattern" and isinstance(value, str):
            made[key] = without_nul(value)
        elif key == "patternProperties" and isinstance(value, dict):
            made[key] = {without_nul(name): _quoted(each) for name, each in value.items()}
        else:
            made[key] = value if key in PLAIN else _quoted(value, key in NAMED)
    return made


def _has_open_names(part: object) -> bool:
    """Whether some object of a schema has named keys, and may have others."""
    if isinstance(part, list):
        return any(_has_open_names(each) for each in part)
    if not isinstance(part, dict):
        return False
    is_open = part.get("additionalProperties") is not False
    has_names = any(part.get(key) for key in ("properties", "patternProperties", "required"))
    return (is_open and has_names) or any(_has_open_names(each) for each in part.values())
