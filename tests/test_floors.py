"""The floors of the house: a file imports from its own floor's package and from below, never up."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from kvgraph import _EXPORTS

PACKAGE = Path(__file__).parents[1] / "kvgraph"

EXPORTS = {f"kvgraph.{name}": module for name, module in _EXPORTS.items()}
"""A public name -> the module that defines it."""

FLOORS = {
    "errors": 0,
    "signal_handlers": 0,
    "plural": 0,
    "progress": 0,
    "contract": 1,
    "ops": 2,
    "kernels": 3,
    "ptx": 2,
    "kv": 3,
    "_torch": 4,
    "compiler": 4,
    "runtime": 4,
    "bars": 5,
    "bench": 5,
    "onnx": 5,
    "build": 5,
    "quality": 5,
    "rebuild": 5,
    "serve": 5,
    "cli": 6,
    "__main__": 7,
}

FRAMEWORKS = {
    "torch",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "onnx_ir",
    "transformers",
    "safetensors",
}
FRAMEWORK_FREE = ("_torch", "errors", "contract", "kv", "onnx", "bench", "quality", "cli")
"""Parts that import no framework when they are imported themselves."""

POOL_USES = ("kvgraph.kv.pool.", "kvgraph.kv.requests.", "kvgraph.kv.metrics.")
"""What the bookkeeping of pages knows of `kv/`: no tier, no manager."""


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "expected an import with the name of a module"
            assert not node.level, f"{node.module}: expected an absolute import"
            named = (f"{node.module}.{alias.name}" for alias in node.names)
            names += [node.module, *(EXPORTS.get(name, name) for name in named)]
    return names


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def test_no_file_is_above_400_lines() -> None:
    root = PACKAGE.parent
    folders = ("kvgraph", "plugins", "tests", "benchmarks", "tools", "examples")
    files = [path for folder in folders for path in (root / folder).rglob("*")]
    lines = {
        str(path.relative_to(root)): path.read_bytes().count(b"\n")
        for path in files
        if path.suffix in (".py", ".h", ".cpp", ".c")
    }
    assert len(lines) > 400
    assert not {name: count for name, count in lines.items() if count > 400}


def in_the_locale(tree: ast.AST) -> list[int]:
    """Lines of calls that read or write text in the encoding of the user's locale."""
    nodes = list(ast.walk(tree))
    entered = {id(node.context_expr) for node in nodes if isinstance(node, ast.withitem)}
    return [n.lineno for n in nodes if isinstance(n, ast.Call) and _lacks(n, id(n) in entered)]


def _lacks(call: ast.Call, is_entered: bool) -> bool:
    named = {word.arg: word.value for word in call.keywords}
    if "encoding" in named:
        return False
    if isinstance(call.func, ast.Name):
        owner, name = "", call.func.id
    elif isinstance(call.func, ast.Attribute):
        owner, name = ast.unparse(call.func.value), call.func.attr
    else:
        return False
    if owner and name in ("read_text", "write_text"):
        return len(call.args) <= (name == "write_text")  # the encoding is the next argument
    if name not in ("open", "fdopen") or (owner, name) == ("os", "open"):
        return False
    place = 0 if name == "open" and owner else 1
    mode = named.get("mode", call.args[place] if len(call.args) > place else None)
    if mode is None:  # other things than paths have a method `open` too
        return not owner or name == "fdopen" or (is_entered and not call.args)
    if not (isinstance(mode, ast.Constant) and isinstance(mode.value, str)):
        return not owner or name == "fdopen"
    return "b" not in mode.value and set(mode.value) <= set("rwxat+")


@pytest.mark.parametrize(
    "line",
    [
        "path.read_text()",
        "path.read_text(errors='replace')",
        "(folder / name).write_text(text)",
        "open(path)",
        "open(path, 'w')",
        "open(path, mode)",
        "os.fdopen(file, 'w')",
        "path.open('a')",
        "with path.open() as file: ...",
    ],
)
def test_text_in_the_locale_is_found(line: str) -> None:
    tree = ast.parse(line)
    assert in_the_locale(tree) == [1]
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            call.keywords.append(ast.keyword("encoding", ast.Constant("utf-8")))
    assert in_the_locale(tree) == []


@pytest.mark.parametrize(
    "line",
    [
        "path.read_text('ascii')",
        "read_text(path, ModelError)",
        "open(path, 'rb')",
        "path.open('xb')",
        "os.open(path, flags)",
        "os.fdopen(file, 'rb')",
        "folder.open(name, flags)",
        "rows = source.open()",
    ],
)
def test_what_is_no_text_in_the_locale(line: str) -> None:
    assert in_the_locale(ast.parse(line)) == []


def test_text_files_are_utf_8_in_every_locale() -> None:
    found = {p.relative_to(PACKAGE): in_the_locale(ast.parse(p.read_text("utf-8"))) for p in FILES}
    assert not {str(name): lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import kvgraph.cli", ["kvgraph.cli"]),
        ("from kvgraph import cli", ["kvgraph", "kvgraph.cli"]),
        ("from kvgraph import Engine", ["kvgraph", "kvgraph.runtime.engine"]),
    ],
)
def test_what_a_line_imports(line: str, expected: list[str]) -> None:
    assert imports(ast.parse(line)) == expected


@pytest.mark.parametrize("line", ["from . import rows", "from .rows import Row"])
def test_a_relative_import_is_refused(line: str) -> None:
    with pytest.raises(AssertionError, match=r"expected an"):
        imports(ast.parse(line))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_downwards(path: Path) -> None:
    mine = part_of(path)
    assert mine in FLOORS, f"{path.name}: a new part needs a floor"
    for name in imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "kvgraph" and len(parts) > 1 and parts[1] in FLOORS:
            theirs = parts[1]
            allowed = theirs == mine or FLOORS[theirs] < FLOORS[mine]
            assert allowed, f"{mine} (floor {FLOORS[mine]}) imports {name} (floor {FLOORS[theirs]})"


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if part_of(p) in FRAMEWORK_FREE],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_frameworks_are_imported_inside_functions_only(path: Path) -> None:
    top = ast.parse(path.read_text()).body
    plain = [node for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {name.split(".")[0] for node in plain for name in imports(node)} & FRAMEWORKS
    assert not found


def test_compiler_and_runtime_meet_only_in_the_artifact() -> None:
    for path in FILES:
        names = imports(ast.parse(path.read_text()))
        other = {"compiler": "kvgraph.runtime", "runtime": "kvgraph.compiler"}.get(part_of(path))
        assert not other or not any(name.startswith(other) for name in names)


def test_no_circle_of_imports() -> None:
    """Imports of types, and inside functions, count."""
    files = {module_of(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        used = graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
                used |= {one if one in files else node.module for one in named}
        used &= files.keys() - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_the_pool_of_pages_knows_no_tier_and_no_manager() -> None:
    for path in (PACKAGE / "kv" / "pool").glob("*.py"):
        for name in imports(ast.parse(path.read_text())):
            assert not name.startswith("kvgraph.kv") or f"{name}.".startswith(POOL_USES), path.name
