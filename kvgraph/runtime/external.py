"""Check that a `model.onnx` fits the weights that it points to, and the manifest's layers.

ONNX Runtime, the reference evaluator and TensorRT's parser read weights by place. So if another
program writes `weights.safetensors` again, with other places, they would read other bytes without
an error. The model is read as the wire format of protobuf, because deployment does not have the
package onnx.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvgraph.contract.file_names import ONNX_NAME, WEIGHTS_NAME
from kvgraph.contract.files import open_regular
from kvgraph.contract.plain import in_short
from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import ArtifactError
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.signal_handlers import ignoring

GRAPH, INITIALIZER, NAME, EXTERNAL_DATA = 7, 5, 8, 13
"""Numbers of fields of ModelProto, GraphProto and TensorProto (two)."""
NODE, OP_TYPE, ATTRIBUTE, ATTRIBUTE_NAME, INTEGER = 1, 4, 5, 1, 3
"""Numbers of fields of GraphProto, NodeProto (two) and AttributeProto (two)."""
ATTENTION = b"update_and_attend"

VARINT, BYTES, SIZES = 0, 2, {1: 8, 5: 4}
"""Wire types of protobuf; those with a fixed size, and the size."""


def require_model(artifact: ArtifactFolder) -> None:
    """Raise ArtifactError unless `model.onnx` of the artifact's rank fits the other files: the
    weights have every tensor that it points to, there, and attention has the manifest's windows.

    A model that is no protobuf passes: ONNX Runtime refuses it.
    """
    graph = _graph(artifact.file(ONNX_NAME))
    _require_places(graph, artifact.file(WEIGHTS_NAME))
    windows = _windows(graph)
    if windows is not None:
        artifact.require_windows(ONNX_NAME, windows)


def _graph(model: Path) -> bytes:
    """The graph in `model`; empty if the file is damaged or has none."""
    with ignoring(OSError, ValueError, LookupError), open_regular(model) as file:
        return b"".join(value for number, value in _fields(file.read()) if number == GRAPH)
    return b""


def _require_places(graph: bytes, weights: Path) -> None:
    layout, places = read_layout(weights), _places(graph, weights.name)
    # First those that are missing: they move the others.
    for name, (start, size) in sorted(places.items(), key=lambda place: place[0] in layout):
        found = layout.get(name)
        if found is None or (found.offset, found.nbytes) != (start, size):
            got = f"{found.nbytes} from byte {found.offset}" if found else "none"
            raise ArtifactError(
                f"{weights}: {in_short(name)}: expected {size} bytes from byte {start}, as "
                f"{ONNX_NAME} says, got {got}; compile the model again"
            )


def _windows(graph: bytes) -> list[int] | None:
    """The window of each node of attention; None if the graph is empty or damaged."""
    with ignoring(ValueError, LookupError):
        nodes = [list(_fields(value)) for number, value in _fields(graph) if number == NODE]
        windows = [_window(node) for node in nodes if _has(node, OP_TYPE, ATTENTION)]
        return windows if graph else None
    return None


def _window(node: list[tuple[int, memoryview]]) -> int:
    for attribute in (value for number, value in node if number == ATTRIBUTE):
        if _has(_fields(attribute), ATTRIBUTE_NAME, b"window"):
            return sum(value for number, value in _integers(attribute) if number == INTEGER)
    return 0


def _has(fields: Iterable[tuple[int, memoryview]], number: int, text: bytes) -> bool:
    return any(key == number and value == text for key, value in fields)


def _places(graph: bytes, location: str) -> dict[str, tuple[int, int]]:
    """First byte and size of each initializer in the file `location`; those in front of the first
    odd one if the graph is damaged."""
    found = {}
    with ignoring(ValueError, LookupError):
        for tensor in (value for number, value in _fields(graph) if number == INITIALIZER):
            fields = list(_fields(tensor))
            entries = [_fields(value) for number, value in fields if number == EXTERNAL_DATA]
            said = dict([str(text, "utf-8") for _, text in entry] for entry in entries)
            if said.get("location") == location:
                name = str(dict(fields)[NAME], "utf-8")
                found[name] = int(said.get("offset", 0)), int(said["length"])
    return found


def _fields(message: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and content of each field that holds bytes, in order. ValueError or LookupError for a
    damaged message."""
    return ((number, value) for number, value in _all(message) if isinstance(value, memoryview))


def _integers(message: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Number and value of each field that holds an integer, as `_fields` gives those of bytes."""
    return ((number, value) for number, value in _all(message) if isinstance(value, int))


def _all(message: bytes | memoryview) -> Iterator[tuple[int, memoryview | int]]:
    view, at = memoryview(message), 0
    while at < len(view):
        key, at = _varint(view, at)
        kind = key & 7
        if kind == BYTES:
            size, at = _varint(view, at)
            if at + size > len(view):
                raise ValueError(f"{size} bytes from byte {at} of {len(view)}")
            yield key >> 3, view[at : at + size]
            at += size
        elif kind == VARINT:
            value, at = _varint(view, at)
            yield key >> 3, value
        else:
            at += SIZES[kind]


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number at byte `at`, and the byte after it."""
    number = shift = 0
    while True:
        byte = view[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
