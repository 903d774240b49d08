"""The environment of chat templates: nothing runs before a template is rendered."""

from __future__ import annotations

import pytest
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvgraph.contract.templates import Generation, environment
from tests.runtime.chat_templates import CHATS, TEMPLATES

LONG = 10**7
"""Characters of a constant; Jinja's own environment holds them in the parsed template."""

EXPRESSIONS = (
    f"'a' * {LONG}",
    f"'a' | center({LONG})",
    f"('a' * {LONG}) ~ 'b'",
    f"[1] * {LONG}",
    f"'%{LONG}s' | format('a')",
    f"'a' * {LONG} == 'a'",
    f"not 'a' * {LONG}",
    f"('a' * {LONG})[0]",
    f"-(10 ** {LONG})",
    f"10 ** {LONG} < 1",
    f"{{'a': 'a' * {LONG}}}",
    f"('a' if 10 ** {LONG} else 'b')",
    f"10 ** {LONG} is even",
)

STATEMENTS = (
    "{{{{ {} }}}}",
    "{{% set a = {} %}}",
    "{{% set a %}}{{{{ {} }}}}{{% endset %}}",
    "{{% if {} %}}a{{% endif %}}",
    "{{% for a in [{}] %}}a{{% endfor %}}",
    "{{% macro a(b=({})) %}}{{{{ {} }}}}{{% endmacro %}}",
    "{{% filter replace('a', {}) %}}a{{% endfilter %}}",
    "{{% with a = {} %}}{{% endwith %}}",
    "{{% autoescape {} %}}{{{{ {} }}}}{{% endautoescape %}}",
    "{{% generation %}}{{{{ {} }}}}{{% endgeneration %}}",
)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Constant expressions that Jinja computes while it parses."""
    found: list[str] = []
    for kind in vars(nodes).values():
        is_expression = isinstance(kind, type) and issubclass(kind, nodes.Expr)
        is_literal = kind in (nodes.Const, nodes.TemplateData)
        if is_expression and not is_literal and "as_const" in vars(kind):
            monkeypatch.setattr(kind, "as_const", lambda *_, kind=kind: found.append(kind.__name__))
    return found


@pytest.mark.parametrize("statement", STATEMENTS)
def test_no_expression_is_computed_when_a_template_is_parsed(
    statement: str, computed: list[str]
) -> None:
    for expression in EXPRESSIONS:
        environment().from_string(statement.format(expression, expression))
    assert not computed


def test_what_never_runs_is_never_computed() -> None:
    endless = "(10 ** 9) ** (10 ** 9)"
    source = f"{{% if false %}}{{{{ {endless} }}}}{{% else %}}text{{% endif %}}"
    assert environment().from_string(source).render() == "text"


@pytest.mark.parametrize(
    "source",
    [
        *TEMPLATES.values(),
        "{{ none }}|{{ missing }}|{{ 1 }}|{{ 1.5 }}|{{ -2 }}|{{ true }}|{{ 10 ** 30 }}{{ 7 // 2 }}",
        "{{ 'a<' }}{{ '<b' | e }}{{ '<' ~ ('>' | e) }}{{ ('<' | e) + '>' }}{{ '<' | safe }}",
        "{{ [1, 'a', none] }}{{ {'a': (1, 2)} }}{{ 'x' * 3 }}{{ 'a' in 'abc' }}{{ [3, 1] | sort }}",
        "{{ 'b' if 1 < 2 else 'c' }}{{ 3 if no }}{{ '%s-%d' | format('a', 2) }}{{ 'a' 'b' }}",
        "{{ 'a' | upper | replace('A', 'é') }}{{ 'a' is string }}{{ not 1 }}{{ 'abc'[1:] }}",
        "{% macro m(a, b=1 + 2) %}{{ a }}{{ b }}{% endmacro %}{{ m('<') }}{{ m(1, 2) ~ '<' }}",
        "{% set ns = namespace(a=1 + 1) %}{% set ns.a = ns.a * 3 %}{{ ns.a }}{{ loop is defined }}",
        "{% set a %}<{{ 1 + 1 }}>{% endset %}{{ a }}{{ dict(a=1) }}{{ cycler(1, 2).next() }}",
        "{% set j = joiner(', ') %}{% for i in range(2 + 1) %}{{ j() }}{{ i }}{% endfor %}",
        "{% autoescape true %}<{{ '<' }}{{ '<' ~ '>' }}{{ none }}{{ x }}{% endautoescape %}",
        "{% autoescape not x %}<{{ x }}{{ '<' | e }}{% endautoescape %}{{ '<' }}",
        "{% for m in messages if m.role == 'us' ~ 'er' %}{{ m.content | trim }}{% endfor %}",
    ],
)
def test_texts_are_those_of_jinjas_own_generator(source: str) -> None:
    theirs = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    ours = environment()
    for made in (theirs, ours):
        made.globals["strftime_now"] = made.globals["raise_exception"] = str.upper
    given = {"messages": CHATS["three"], "x": "<x>", "bos_token": "<s>", "eos_token": "</s>"}
    assert ours.from_string(source).render(given) == theirs.from_string(source).render(given)


def test_lipsum_is_no_global() -> None:
    assert sorted(environment().globals) == ["cycler", "dict", "joiner", "namespace", "range"]
    assert "lipsum" in ImmutableSandboxedEnvironment().globals
