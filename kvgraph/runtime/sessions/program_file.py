"""Rejects a program's archive if loading it could run code.

torch.export.load unpickles some entries of an archive, evaluates the expressions of its symbolic
dims with sympy, loads libraries that lie in it, and reads an older form with pickles if it finds no
program. So an archive may have only the entries that compile writes, and plain expressions.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from kvgraph.errors import ArtifactError

PROGRAM = "model/models/model.json"
SAMPLES = "model/data/sample_inputs/model.pt"
"""Inputs that the program was traced with: a pickle, which is empty as compile writes it."""
ENTRIES = re.compile(
    r"model/(models/model\.json|data/sample_inputs/model\.pt|kvgraph/weights\.json"
    r"|data/(weights|constants)/(weight_\d+|tensor_\d+|model_(weights|constants)_config\.json)"
    r"|archive_format|archive_version|byteorder|version|\.format_version|\.storage_alignment"
    r"|\.data/(version|serialization_id))"
)
CONFIG = "_config.json"
OBJECTS = ("custom_obj_", "opaque_obj_")
"""Prefixes of the names of constants that are not tensors."""

SYMBOL = re.compile(r"[a-z]+\d*")
"""Names in `Symbol('s1')`; sympy only keeps them."""
NAME = re.compile(r"[su]\d+|true|false")
"""Names that stand alone: symbols, and truth values."""
FUNCTIONS = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|Abs|floor|ceiling|Eq|Ne|Lt|Le|Gt|Ge"
    r"|And|Or|Not|Where|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan"
    r"|FloorDiv|CeilDiv|CleanDiv|ModularIndexing|PythonMod|FloorToInt|CeilToInt|TruncToInt"
    r"|TruncToFloat|ToFloat|IntTrueDiv|FloatTrueDiv|RoundToInt|RoundDecimal|PowByNatural|Identity"
    r"|LShift|RShift"
)
"""Functions of sympy and torch that an expression of dims may call: all of them compute numbers."""


def require_no_code(path: Path) -> None:
    """Raise ArtifactError if archive `path` has an entry that could run code; name it."""
    with zipfile.ZipFile(path) as archive:
        for name in _suspects(archive):
            raise ArtifactError(
                f"{path}: expected a program without pickles, code and other files, as compile "
                f"writes it, got {name[:200]!r}"
            )


def _suspects(archive: zipfile.ZipFile) -> Iterator[str]:
    seen: dict[str, None] = {}
    for entry in archive.infolist():
        name = entry.filename
        if not ENTRIES.fullmatch(name) or name in seen or (name == SAMPLES and entry.file_size):
            yield name
        seen[name] = None
    if PROGRAM not in seen:
        yield f"no {PROGRAM}"
    for name in seen:
        if name.endswith(CONFIG):
            yield from _of_config(name, json.loads(archive.read(name)))
    yield from _of_program(json.loads(archive.read(PROGRAM)))


def _of_config(name: str, config: dict[str, dict[str, dict[str, object]]]) -> Iterator[str]:
    for tensor, payload in config["config"].items():
        if payload.get("use_pickle") or str(payload["path_name"]).startswith(OBJECTS):
            yield f"{tensor} of {name}"


def _of_program(program: object) -> Iterator[str]:
    """Expressions of the program's symbolic dims that do more than arithmetic."""
    left = [program]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            expression = value.get("expr_str")
            if expression is not None and not _is_arithmetic(expression):
                yield f"{expression} of {PROGRAM}"
            left += value.values()
        elif isinstance(value, list):
            left += value


def _is_arithmetic(expression: object) -> bool:
    try:
        return isinstance(expression, str) and _computes(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _computes(node: ast.expr) -> bool:
    """Whether a node is a number, a symbol, or an operator or one of FUNCTIONS on such nodes."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Name):
        return NAME.fullmatch(node.id) is not None
    if isinstance(node, ast.UnaryOp):
        return _computes(node.operand)
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Pow):
        return _computes(node.left) and _computes(node.right)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    arguments = [*node.args, *(each.value for each in node.keywords)]
    if node.func.id == "Symbol" and arguments and isinstance(name := arguments[0], ast.Constant):
        if not (isinstance(name.value, str) and SYMBOL.fullmatch(name.value)):
            return False
        arguments = arguments[1:]
    return FUNCTIONS.fullmatch(node.func.id) is not None and all(map(_computes, arguments))
