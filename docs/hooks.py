"""Hooks of mkdocs: pages of a folder in the navigation, and public names on the API pages.

The package's table of public names is read as text: building the docs needs none of its
dependencies.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "kvgraph"


def on_config(config: Any) -> Any:
    """`folder/*` in the navigation becomes the pages of the folder, the newest name first."""
    for section in config.nav:
        for title, pages in section.items():
            if isinstance(pages, list):
                section[title] = [path for page in pages for path in _pages(page)]
    return config


def _pages(page: Any) -> list[Any]:
    if not isinstance(page, str) or not page.endswith("/*"):
        return [page]
    found = sorted((DOCS / page).parent.glob("2*.md"), reverse=True)
    return [path.relative_to(DOCS).as_posix() for path in found]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`::: kvgraph.Name` with the module that defines the name; KeyError if it is not public. The
    page of decisions lists them."""
    if page.file.src_uri == "decisions/index.md":
        markdown += "\n".join(["", *_decisions()])
    modules = public_names()
    return re.sub(
        r"^::: kvgraph\.([A-Za-z_]+)$",
        lambda found: f"::: {modules[found[1]]}.{found[1]}",
        markdown,
        flags=re.MULTILINE,
    )


def _decisions() -> list[str]:
    """A line of a list for each, the newest first."""
    files = [DOCS / path for path in _pages("decisions/*")]
    titles = [file.read_text().partition("\n")[0].removeprefix("# ") for file in files]
    return [f"- [{title}]({file.name})" for title, file in zip(titles, files, strict=True)]


def public_names() -> dict[str, str]:
    """Public name -> module, as kvgraph/__init__.py lists them."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_EXPORTS":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    raise LookupError(f"{PACKAGE}/__init__.py: expected the table _EXPORTS, found none")
