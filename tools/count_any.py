"""`python -m tools.count_any`: how often kvgraph/ says `Any`; fails above the limit.

A name that is bound to `Any` itself counts at each use, and so does `Any` inside a quoted type.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "kvgraph"
LIMIT = 217


def count(sources: list[str]) -> int:
    """Uses of `Any`, and of names that stand for it, in all sources together."""
    trees = [ast.parse(source) for source in sources]
    names = {"Any"} | {alias for tree in trees for alias in _aliases(tree)}
    return sum(_uses(tree, names) for tree in trees)


def _aliases(tree: ast.AST) -> Iterator[str]:
    """Names that are `Any`: `Extent = Any`, `from typing import Any as Extent`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_any(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.module == "typing":
            yield from (n.asname for n in node.names if n.name == "Any" and n.asname)


def _is_any(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "Any"
    return isinstance(node, ast.Name) and node.id == "Any"


def _uses(tree: ast.AST, names: set[str]) -> int:
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return sum(_in_node(node, names) for node in ast.walk(tree) if id(node) not in prose)


def _in_node(node: ast.AST, names: set[str]) -> int:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return len(re.findall(r"(?<=\[)Any\b|^Any$|\bAny(?=\])", node.value))
    return _is_any(node)


def main() -> int:
    found = count([path.read_text() for path in PACKAGE.rglob("*.py")])
    print(f"{found} uses of Any in kvgraph/, at most {LIMIT}")
    return int(found > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
