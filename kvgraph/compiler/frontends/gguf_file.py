"""Opens a GGUF file: its fields, its tensors, and how it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvgraph.compiler.frontends.folder import GGUF_INSTEAD
from kvgraph.errors import MissingDependencyError, ModelError, UnsupportedError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader

UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
"""Of a tensor, in the gguf package's words."""


def open_file(path: Path) -> GGUFReader:
    """ModelError for a damaged file. UnsupportedError for one in another machine's byte order, or
    with a type of tensors that the gguf package does not know."""
    try:
        import transformers  # noqa: F401
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name}: needed to read a GGUF file, not installed; pip install "
            "'kvgraph[compile]'"
        ) from error
    try:
        reader = GGUFReader(path)
    except Exception as error:  # it checks nothing
        unknown = UNKNOWN_TYPE.search(str(error))
        if unknown is not None:
            wanted = "one that the gguf package knows"
            raise refuse(path, "type of a tensor", wanted, f"number {unknown[1]}") from error
        raise ModelError(f"{path}: expected a GGUF file, got a damaged one") from error
    if reader.byte_order != "I":
        raise UnsupportedError(
            f"{path}: expected a little-endian GGUF file, got a big-endian one; convert it with "
            "gguf-convert-endian FILE little"
        )
    return reader


def is_decoded(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package decodes blocks of this type."""
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def field(reader: GGUFReader, name: str) -> str | int | float | None:
    found = reader.get_field(name)
    given: str | int | float | None = None if found is None else found.contents()
    return given


def entries(reader: GGUFReader, name: str) -> list[object]:
    """Of a field that is a list."""
    found = reader.get_field(name)
    return [] if found is None else list(found.contents())


def refuse(path: Path, what: str, expected: str, got: str) -> UnsupportedError:
    return UnsupportedError(f"{path}: {what}: expected {expected}, got {got}; {GGUF_INSTEAD}")
