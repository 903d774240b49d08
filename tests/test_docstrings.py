"""Docstrings are read in an editor or on a page, without the name above them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvgraph

PACKAGE = Path(kvgraph.__file__).parent

FRAGMENTS = {"As", "By", "In", "Of", "That", "Those", "With"}
"""First words of texts that go on with the name of what they describe."""


def docstrings(tree: ast.AST) -> Iterator[str]:
    """The docstrings of modules, classes and functions, and texts below what is assigned."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, each in zip([None, *body], body, strict=False):
            is_described = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and is_described:
                text = each.value.value
                if isinstance(text, str):
                    yield text


@pytest.mark.parametrize("folder", sorted(p.name for p in PACKAGE.iterdir() if p.is_dir()))
def test_no_docstring_is_a_fragment(folder: str) -> None:
    files = (PACKAGE / folder).rglob("*.py")
    texts = [text for file in files for text in docstrings(ast.parse(file.read_text()))]
    assert not [text for text in texts if text.split(maxsplit=1)[0].rstrip(",:") in FRAGMENTS]


def test_a_fragment_is_found() -> None:
    source = 'NAME = 3\n"""Of a page."""\n\ndef f():\n    """Return 3."""\n    return NAME\n'
    assert list(docstrings(ast.parse(source))) == ["Of a page.", "Return 3."]
