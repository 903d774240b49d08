"""GGUF: one file with a configuration, a tokenizer and weights, read as a checkpoint folder.

transformers says what the configuration and the tokenizer are, the gguf package reads the file.
Only architectures are taken whose file says all that the configuration does: others leave
constants to llama.cpp's code (scales of Gemma's queries, say).
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvgraph.compiler.frontends.folder import CONFIG, GGUF_INSTEAD, is_gguf
from kvgraph.compiler.quiet import quiet_loggers
from kvgraph.errors import MissingDependencyError, ModelError, UnsupportedError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
OWN_FIELDS = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Fields that transformers leaves to its defaults -> their names in a configuration."""

HEADS = ("output.weight", "token_embd.weight")
"""Of the output projection: its own, or those of the embedding."""

ROTARY = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@contextmanager
def as_folder(model: Path) -> Iterator[Path]:
    """`model` itself; or of a GGUF file a folder with its configuration and its tokenizer, which
    is gone behind.

    ModelError or UnsupportedError for a file that is damaged, or says less than a compile needs.
    """
    if not (model.is_file() and is_gguf(model)):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="kvgraph-gguf-") as name:
        _write(model.absolute(), Path(name))
        yield Path(name)


def open_file(path: Path) -> GGUFReader:
    """ModelError for a damaged file."""
    try:
        import transformers  # noqa: F401
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name}: needed to read a GGUF file, not installed; pip install "
            "'kvgraph[compile]'"
        ) from error
    try:
        return GGUFReader(path)
    except Exception as error:  # it checks nothing
        raise ModelError(f"{path}: expected a GGUF file, got a damaged one") from error


def _write(path: Path, folder: Path) -> None:
    reader = open_file(path)
    kind = _field(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise _refuse(path, "general.architecture", f"one of {list(ARCHITECTURES)}", repr(kind))
    _require_readable(path, reader, kind)
    config = _config(path, reader, kind)
    matrices = {tensor.name: tensor for tensor in reader.tensors if len(tensor.shape) > 1}
    heads = [matrices[name] for name in HEADS if name in matrices]
    quantized = {"quant_method": "gguf", "file": str(path), **_stored(list(matrices.values()))}
    quantized["head"] = _stored(heads[:1])
    (folder / CONFIG).write_text(json.dumps(config | {"quantization_config": quantized}))
    if _field(reader, "tokenizer.ggml.model") is not None:
        _write_tokenizer(path, folder)


def is_decoded(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package decodes blocks of this type."""
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _require_readable(path: Path, reader: GGUFReader, kind: str) -> None:
    if int(_field(reader, "split.count") or 1) > 1:
        raise UnsupportedError(
            f"{path}: expected a whole GGUF file, got a part of one; join the parts with "
            "llama-gguf-split --merge"
        )
    for name in (f"{kind}.rope.scaling.type", f"{kind}.expert_count" if kind == "llama" else ""):
        if _field(reader, name) not in (None, "none", 0):
            raise _refuse(path, name, "none", repr(_field(reader, name)))
    for name in (f"{kind}.rope.scaling.factor", f"{kind}.rope.scale_linear"):
        if _field(reader, name) not in (None, 0, 1):  # llama.cpp's type is "linear" where none is
            raise _refuse(path, name, "1", repr(_field(reader, name)))
    for tensor in reader.tensors:
        if not is_decoded(tensor.tensor_type):
            wanted = "a type that the gguf package decodes"
            raise _refuse(path, tensor.name, wanted, tensor.tensor_type.name)


def _config(path: Path, reader: GGUFReader, kind: str) -> dict[str, object]:
    import transformers

    try:
        with quiet_loggers("transformers"):
            read = transformers.AutoConfig.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path}: cannot read the configuration: {first}") from error
    config: dict[str, object] = read.to_dict() | {"dtype": "bfloat16"}
    for field, name in OWN_FIELDS.items():
        given = _field(reader, f"{kind}.{field}")
        if given is not None and name in config:
            config[name] = int(given)
    scaled = next((tensor for tensor in reader.tensors if tensor.name == ROTARY), None)
    if scaled is not None:
        config["rope_parameters"] = _llama3(path, reader, kind, np.array(scaled.data))
    return config


def _llama3(path: Path, reader: GGUFReader, kind: str, stored: np.ndarray) -> dict[str, object]:
    """Parameters of the rotary embedding whose frequencies are divided by `stored`."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base = float(_field(reader, f"{kind}.rope.freq_base") or 10000.0)
    wanted: dict[str, object] = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": float(stored.max()),
        "original_max_position_embeddings": 8192,
        **LLAMA3,
    }
    dims = 2 * len(stored)
    config = transformers.LlamaConfig(head_dim=dims, rope_parameters=dict(wanted))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / base ** (np.arange(0, dims, 2) / dims)
    if not np.allclose(plain / scaled.numpy(), stored, rtol=1e-3):
        raise _refuse(path, ROTARY, "the factors of Llama 3.1", "others")
    return wanted


def _write_tokenizer(path: Path, folder: Path) -> None:
    import transformers

    try:
        with quiet_loggers("transformers"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
            tokenizer.save_pretrained(folder)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path}: cannot read the tokenizer: {first}") from error


def _stored(tensors: Sequence[ReaderTensor]) -> dict[str, object]:
    """Bits of most weights (None: floats), and the type of most blocks."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    most = max(counts, key=counts.__getitem__, default="")
    return {"bits": nearest_bits(tensors), "blocks": most}


def nearest_bits(tensors: Sequence[ReaderTensor]) -> int | None:
    """Of packed weights, those nearest to what tensors take; None: floats."""
    elements = sum(int(tensor.n_elements) for tensor in tensors)
    bits = 8 * sum(int(tensor.n_bytes) for tensor in tensors) / max(1, elements)
    return 4 if bits < 5.5 else 8 if bits < 10 else None


def _field(reader: GGUFReader, name: str) -> str | int | float | None:
    found = reader.get_field(name)
    given: str | int | float | None = None if found is None else found.contents()
    return given


def _refuse(path: Path, what: str, expected: str, got: str) -> UnsupportedError:
    return UnsupportedError(f"{path}: {what}: expected {expected}, got {got}; {GGUF_INSTEAD}")
