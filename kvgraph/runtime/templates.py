"""Chat templates: Jinja in its sandbox, with what transformers adds to it.

Decision: no bound on time. An artifact is code (docs/trust.md), and its template is a part of it.
The sandbox bounds `range` to 100,000, a text ends at MOST_CHARACTERS, and a macro that calls itself
without end fails. Nested loops may still run for long: a template of a stranger needs a process of
its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 16 << 20
"""Of a rendered text; no context of a model is as long."""

KEPT = 8
"""Compiled templates that are kept."""


class Generation(Extension):
    """`{% generation %}`: marks the model's own text for training; here a block like any other."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Jinja:
    """Compiles and renders templates; ValueError says in one line why one fails."""

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = strftime_now
        self._compiled = lru_cache(maxsize=KEPT)(environment.from_string)

    def compile(self, source: str) -> Template:
        with _in_one_line():
            return self._compiled(source)

    def render(self, source: str, variables: Mapping[str, object]) -> str:
        pieces, length = [], 0
        with _in_one_line():
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
    """JSON as json.dumps writes it; Jinja's own filter escapes what HTML does not take."""
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


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Expressions of a template raise what they like; a message of its own is all of the line."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        if not isinstance(error, TemplateError):
            text = f"{type(error).__name__}: {text}"
        if isinstance(error, TemplateSyntaxError):
            text = f"line {error.lineno}: {' '.join((error.message or '').split())}"
        raise ValueError(text or type(error).__name__) from error
