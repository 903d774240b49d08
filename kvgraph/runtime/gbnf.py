"""Grammars in GBNF, as llama.cpp has them, in Lark's form."""

from __future__ import annotations

import re

from kvgraph.signal_handlers import reraise_if_signalled

GBNF = re.compile(r"^[^\S\n]*[\w-]+[^\S\n]*::=", re.MULTILINE)
"""The start of a GBNF rule, `name ::=`. Grammars in Lark's form have no `::=`."""

NAMES = re.compile(
    r'"(?:[^"\\]|\\.)*+"|\[(?:[^\]\\]|\\.)*+\]|\{[^}]*+\}|#[^\n]*+|([\w-]+)', re.DOTALL
)
"""The name of a rule in GBNF, or a part in which words are no names."""


def as_lark(text: str) -> str:
    """`text` in Lark's form, converted if it is GBNF. ValueError if the conversion fails."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not GBNF.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter's own errors, and RecursionError
        reraise_if_signalled(error)
        if "already exists" in str(error):  # the converter would give two rules one name
            return as_lark(_renamed(text))
        raise ValueError(f"GBNF: {error}") from error


def _renamed(text: str) -> str:
    """GBNF with numbers in the names of all rules but `root`."""
    numbers: dict[str, int] = {}

    def rename(found: re.Match[str]) -> str:
        if (name := found[1]) is None or name == "root":
            return found[0]
        return f"r{numbers.setdefault(name, len(numbers))}"

    return NAMES.sub(rename, text)
