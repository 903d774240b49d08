"""`make generate`: the blocks of the sources that follow from a table, for type checkers, and the
page of commands.

A block stands between `# generated: NAME` and `# end of generated`; a test compares.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent, wrap

import kvgraph
from kvgraph import ops
from tools import commands

PACKAGE = Path(__file__).parents[1] / "kvgraph"
END = "# end of generated\n"
STUB_WIDTH = 88
"""Width of a docstring's lines, so that they fit when they are indented."""


def names() -> str:
    """Public names as a type checker imports them."""
    lines = [
        f"    from {module} import {name} as {name}" for name, module in kvgraph._EXPORTS.items()
    ]
    return "if TYPE_CHECKING:\n" + "\n".join(lines) + "\n"


def signatures() -> str:
    """The ops as functions over torch tensors."""
    functions = "\n".join(_stub(spec) for spec in ops.ALL_SPECS)
    body = "    from torch import Tensor\n\n" + "".join(
        f"    {line}\n" if line else "\n" for line in functions.splitlines()
    )
    return "if TYPE_CHECKING:\n" + body


def _stub(spec: ops.OpSpec) -> str:
    """The op as a function for type checkers, without a body."""
    parameters = [
        f"{o.name}: Tensor | None = None" if o.optional else f"{o.name}: Tensor"
        for o in spec.inputs
    ]
    parameters += ["*"] if spec.attributes else []
    parameters += [
        f"{a.name}: {a.kind}" + ("" if a.default is None else f" = {a.default}")
        for a in spec.attributes
    ]
    count = len(spec.results)
    returned = "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
    body = "\n".join([*wrap(f'"""{spec.doc}"""', STUB_WIDTH), "..."])
    head = f"def {spec.name}({', '.join(parameters)}) -> {returned if count else None}:"
    return f"{head}\n{indent(body, '    ')}\n"


BLOCKS: dict[Path, tuple[str, Callable[[], str]]] = {
    PACKAGE / "__init__.py": ("names", names),
    PACKAGE / "ops" / "__init__.py": ("signatures", signatures),
}


def generated(path: Path) -> str:
    """The source at `path` with its block made again, formatted."""
    name, make = BLOCKS[path]
    begin = f"# generated: {name}\n"
    head, rest = path.read_text().split(begin)
    source = head + begin + make() + END + rest.partition(END)[2]
    sort = ["check", "--select", "I", "--fix", "--quiet", f"--stdin-filename={path}", "-"]
    return _ruff(_ruff(source, *sort), "format", f"--stdin-filename={path}", "-")


def _ruff(source: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    for path in BLOCKS:
        path.write_text(generated(path))
    commands.PAGE.write_text(commands.page())
