"""Jinja environment of chat templates, used by chats and by the compile's check of a template."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
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


Finalize: TypeAlias = CodeGenerator._FinalizeInfo


class Generator(CodeGenerator):
    """Generates code that computes an expression when its line is rendered.

    Jinja's own generator computes expressions of constants as it parses, such as `'a' * 10**9`,
    also in branches that never run.
    """

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Finalize) -> str:
        is_literal = isinstance(node, nodes.Const) and not frame.eval_ctx.volatile
        if is_literal or isinstance(node, nodes.TemplateData):
            return super()._output_child_to_const(node, frame, finalize)
        raise nodes.Impossible

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        """Emit an `{% autoescape %}`, the only statement of this kind."""
        if all(isinstance(keyword.value, nodes.Const) for keyword in node.options):
            return super().visit_EvalContextModifier(node, frame)
        for keyword in node.options:
            self.writeline(f"context.eval_ctx.{keyword.key} = ")
            self.visit(keyword.value, frame)
        frame.eval_ctx.volatile = True


class Environment(ImmutableSandboxedEnvironment):
    code_generator_class = Generator


def environment() -> ImmutableSandboxedEnvironment:
    """Sandboxed Jinja with the tags that transformers adds, and Jinja's own filters and globals.

    Nothing of a template runs when it is parsed. `lipsum` is left out: it has no bound.
    """
    made = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[Generation, loopcontrols],
    )
    del made.globals["lipsum"]
    return made


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
