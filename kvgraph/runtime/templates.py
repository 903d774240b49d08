"""Renders chat templates: sandboxed Jinja, with the filters and functions of transformers.

Decision: no limit of time or memory. An artifact is code (docs/trust.md), and its template is a
part of it. Nothing of a template runs before it is rendered. The sandbox bounds `range` to 100,000,
endless recursion of macros fails, and a rendered text has at most MOST_CHARACTERS. Nested loops may
still run for long, and an expression may make a value of any size before a piece of text is
counted: run a stranger's template in a separate process, with limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache

from jinja2 import Template, TemplateError

from kvgraph.contract.templates import environment, in_one_line

MOST_CHARACTERS = 16 << 20
"""Most characters of a rendered text; longer than any model's context."""

KEPT = 8
"""Size of the cache of compiled templates."""


class Jinja:
    """Compiles and renders templates; ValueError gives the reason of a failure in one line."""

    def __init__(self) -> None:
        made = environment()
        made.filters["tojson"] = tojson
        made.globals["raise_exception"] = raise_exception
        made.globals["strftime_now"] = strftime_now
        self._compiled = lru_cache(maxsize=KEPT)(made.from_string)

    def compile(self, source: str) -> Template:
        with in_one_line():
            return self._compiled(source)

    def render(self, source: str, variables: Mapping[str, object]) -> str:
        pieces, length = [], 0
        with in_one_line():
            for piece in self._compiled(source).generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MOST_CHARACTERS:
                    raise_exception(f"a text of more than {MOST_CHARACTERS} characters")
        return "".join(pieces)


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as json.dumps writes it. Jinja's own filter would escape characters for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
