"""Write the graph after each pass as a numbered text file: `compile --dump-passes DIR`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraph.compiler.output import absolute
from kvgraph.contract.files import PARTIAL, can_write, kind_of, open_regular, replacing
from kvgraph.errors import RequestError

if TYPE_CHECKING:
    import onnx_ir
    from torch.fx import Graph

    from kvgraph.compiler.traced import Traced

FIRST_LINE = b"# kvgraph: the graph after "


class PassDump:
    """Writes `NN-name.txt` into `folder` for each step that changed a graph, from 00-export.txt on.

    Dumps of an earlier compile are removed when the first one is written.
    """

    def __init__(self, folder: Path, out: Path) -> None:
        """Raise RequestError unless `folder` is new or holds only dumps, and neither `folder` nor
        the artifact `out` contains the other."""
        self._folder = folder
        self._count = 0
        _require_apart(folder, out)
        _require_ours(folder)

    def __call__(self, step: str, traced: Traced) -> None:
        if not self._count:
            self._folder.mkdir(exist_ok=True)
            for path in _require_ours(self._folder):
                path.unlink()
        path = self._folder / f"{self._count:02}-{step}.txt"
        with replacing(path) as file:
            file.write(FIRST_LINE + f"{step}\n".encode())
            file.writelines(f"{line}\n".encode() for line in _lines(traced))
        self._count += 1


def _require_apart(folder: Path, out: Path) -> None:
    mine, other = absolute(folder).resolve(), absolute(out).resolve()
    if mine.is_relative_to(other) or other.is_relative_to(mine):
        raise RequestError(
            f"dump_passes: expected a folder apart from the artifact {out}, got {folder}"
        )


def _require_ours(folder: Path) -> list[Path]:
    """The dumps in `folder`. RequestError if it cannot be made or written, or holds other files."""
    kind = kind_of(folder)
    if kind not in (None, "a folder"):
        raise RequestError(f"{folder}: expected a folder for dumps of passes, got {kind} (kept)")
    where = folder if kind else absolute(folder).parent
    if not where.is_dir() or not can_write(where):
        got = where if where.is_dir() else f"none at {where}"
        raise RequestError(f"{folder}: expected a folder that can be written, got {got}")
    found = sorted(folder.iterdir()) if kind else []
    for path in found:
        if not _is_dump(path):
            raise RequestError(
                f"{folder}: expected a new folder, or one of dumps of passes to replace, got one "
                f"with {path.name} (kept); give another name"
            )
    return found


def _is_dump(path: Path) -> bool:
    """Whether `path` is a dump that a compile wrote, or a partial file of one."""
    if kind_of(path) != "a file":
        return False
    with open_regular(path) as file:
        return file.read(len(FIRST_LINE)) == FIRST_LINE or bool(PARTIAL.fullmatch(path.name))


def _lines(traced: Traced) -> Iterator[str]:
    """Lines of the graph in its newest form: ONNX once a backend has made it, else the program."""
    if traced.onnx_proto is not None:
        import onnx_ir

        return _onnx_lines(onnx_ir.from_proto(traced.onnx_proto))
    if traced.onnx_model is not None:
        return _onnx_lines(traced.onnx_model)
    return _program_lines(traced.graph)


def _program_lines(graph: Graph) -> Iterator[str]:
    """One line a node, `name: type = target(arguments)`; inputs and weights have no target."""
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {node.args[0]}"
            continue
        given = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
        call = "" if node.op == "placeholder" else f" = {node.target}({', '.join(given)})"
        kind = "" if node.meta.get("val") is None else f": {_type(node.meta['val'])}"
        yield f"{node.name}{kind}{call}"


def _type(value: Any) -> str:
    """Text for a value's type: `dtype[dims]` of a tensor, or of each tensor in a list."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_type, value))})"
    if not hasattr(value, "dtype"):
        return type(value).__name__
    dims = ", ".join(map(str, value.shape))
    return f"{str(value.dtype).removeprefix('torch.')}[{dims}]"


def _onnx_lines(model: onnx_ir.Model) -> Iterator[str]:
    graph = model.graph
    for value in [*graph.inputs, *graph.initializers.values()]:
        yield _onnx_value(value)
    for node in graph:
        given = ["" if x is None else str(x.name) for x in node.inputs]
        given += [f"{a.name}={a.value}" for a in node.attributes.values()]
        name = ".".join(filter(None, (node.domain, node.op_type)))
        yield f"{', '.join(map(_onnx_value, node.outputs))} = {name}({', '.join(given)})"
    yield f"return [{', '.join(str(value.name) for value in graph.outputs)}]"


def _onnx_value(value: onnx_ir.Value) -> str:
    dims = "" if value.shape is None else ", ".join(map(str, value.shape))
    return f"{value.name}: {str(value.dtype).lower()}[{dims}]"
