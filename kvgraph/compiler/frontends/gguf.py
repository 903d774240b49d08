"""GGUF: read one file with a configuration, a tokenizer and weights as a checkpoint folder.

The gguf package reads the file. An architecture is supported only if its files, and the constants
in llama.cpp's code, make the whole configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.compiler.checkpoint_files import CONFIG
from kvgraph.compiler.frontends.folder import GGUF, is_gguf
from kvgraph.compiler.frontends.gguf_architectures import ARCHITECTURES
from kvgraph.compiler.frontends.gguf_config import configuration
from kvgraph.compiler.frontends.gguf_fields import (
    OF_FILE,
    field,
    refuse,
    require_counts,
    require_fields,
    require_kinds,
)
from kvgraph.compiler.frontends.gguf_file import (
    generation,
    is_decoded,
    open_file,
    told_of,
)
from kvgraph.compiler.frontends.gguf_tokenizer import write_tokenizer
from kvgraph.compiler.quiet import quiet_loggers
from kvgraph.contract.generation import GENERATION
from kvgraph.contract.leftovers import scratch
from kvgraph.errors import UnsupportedError

if TYPE_CHECKING:
    from kvgraph.compiler.frontends.gguf_reader import Reader

OTHER_FILES = {
    "adapter": (
        "a LoRA adapter; merge it into its base model with llama-export-lora and give that file"
    ),
    **dict.fromkeys(
        ("clip", "mmproj"),
        "the part of a model that reads images or sound; give the file of its language part",
    ),
    "controlvector": "a control vector; give the file of the model",
    "imatrix": "the importance of weights; give the file of the model",
}
"""What a file holds that is no model, by its `general.type` or its architecture."""


@contextmanager
def as_folder(model: Path) -> Iterator[Path]:
    """The folder `model` itself, or a temporary folder with a GGUF file's configuration and
    tokenizer. Errors name the file.

    ModelError or UnsupportedError if the file is damaged, or compile cannot take it.
    """
    if not (model.is_file() and is_gguf(model)):
        yield model
        return
    with scratch("gguf") as folder, told_of(model, str(folder)):
        with quiet_loggers("transformers"):
            _write(model.absolute(), folder)
        yield folder


def _write(path: Path, folder: Path) -> None:
    reader = open_file(path)
    kind = _require_readable(path, reader)
    config = configuration(path, reader, kind)
    quantized = {"quant_method": GGUF, "file": str(path)}
    (folder / CONFIG).write_text(
        json.dumps(config | {"quantization_config": quantized}), encoding="utf-8"
    )
    if given := generation(reader):
        (folder / GENERATION).write_text(json.dumps(given), encoding="utf-8")
    if field(reader, "tokenizer.ggml.model") is not None:
        write_tokenizer(path, reader, folder)


def _require_model(path: Path, reader: Reader) -> None:
    """Raise UnsupportedError for a file that is no model."""
    given, of = field(reader, "general.type"), field(reader, "general.architecture")
    what = OTHER_FILES.get(str(given)) or OTHER_FILES.get(str(of))
    if what is None and given not in (None, "model"):
        what = f"one of general.type {given!r:.40}; give the file of the model"
    if what is not None:
        raise UnsupportedError(f"{path}: expected a GGUF file of a model, got {what}")


def _require_readable(path: Path, reader: Reader) -> str:
    """The architecture of a file that can be read. UnsupportedError for any other."""
    require_kinds(path, reader, OF_FILE)
    _require_model(path, reader)
    kind = str(field(reader, "general.architecture"))
    if kind not in ARCHITECTURES:
        raise refuse(path, "general.architecture", f"one of {list(ARCHITECTURES)}", repr(kind))
    require_fields(path, reader, kind)
    require_counts(path, reader, kind)
    for tensor in reader.tensors:
        if not is_decoded(tensor.tensor_type):
            wanted = "a type that the gguf package decodes"
            raise refuse(path, tensor.name, wanted, tensor.tensor_type.name)
    return kind
