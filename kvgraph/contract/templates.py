"""Jinja environment of chat templates, used by chats and by the compile's check of a template."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvgraph.signal_handlers import reraise_if_signalled


class Generation(Extension):
    """`{% generation %}` marks the model's own text for training; here it is an ordinary block."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def environment() -> ImmutableSandboxedEnvironment:
    """Sandboxed Jinja with the tags that transformers adds, and Jinja's own filters and globals."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn any exception into a ValueError of one line: a template's expressions may raise any
    type. A message that the template itself raises is the whole line."""
    try:
        yield
    except Exception as error:
        reraise_if_signalled(error)
        text = " ".join(str(error).split())
        if not isinstance(error, TemplateError):
            text = f"{type(error).__name__}: {text}"
        if isinstance(error, TemplateSyntaxError):
            text = f"line {error.lineno}: {' '.join((error.message or '').split())}"
        raise ValueError(text or type(error).__name__) from error
