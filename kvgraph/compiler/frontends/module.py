"""Make a Model of a user's own nn.Module, whose attention calls `kvgraph.ops`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kvgraph.compiler.frontends.text_files import (
    TOKENIZER,
    Files,
    as_id,
    as_ids,
    end_tokens,
    text_files,
)
from kvgraph.compiler.model import Model
from kvgraph.contract.files import as_path
from kvgraph.contract.generation import GENERATION
from kvgraph.contract.manifest_values import MOST
from kvgraph.contract.tokenizer import read_tokenizer
from kvgraph.contract.values import require_integer
from kvgraph.errors import ModelError, UnsupportedError

PACKED = (
    "{}: expected weights as plain tensors, got {}; give the module before torch.ao quantises it, "
    "and weights='int8'"
)


def load(
    module: nn.Module,
    *,
    vocab_size: int | None,
    max_seq_len: int | None,
    dtype: str | None,
    tokenizer: str | Path | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
    bos_token_id: int | None = None,
) -> Model:
    """Make a Model of `module`, with the facts that the caller gives in place of a config.json.

    `tokenizer`: a tokenizer.json, or a folder with one and other text files. The folder's
    generation_config.json names the end tokens if `eos_token_ids` is None.
    UnsupportedError: an argument is missing or does not fit. ModelError: a file is missing.
    """
    if not isinstance(module, nn.Module):
        raise UnsupportedError(
            f"model: expected a folder, a GGUF file or an nn.Module, got {_kind(module)}"
        )
    if vocab_size is None or max_seq_len is None:
        missing = "vocab_size" if vocab_size is None else "max_seq_len"
        raise UnsupportedError(f"{missing}: expected a value to compile an nn.Module, got None")
    for name, value in (("vocab_size", vocab_size), ("max_seq_len", max_seq_len)):
        require_integer(name, value, UnsupportedError, least=1, most=MOST)
    _require_python(module)
    _require_values(module)
    own, first = _dtype(module)
    if dtype and dtype != own:
        raise UnsupportedError(f"dtype: expected {own} from the module's {first}, got {dtype}")
    files = _files(tokenizer, vocab_size)
    generation = files.get(GENERATION)
    eos, bos = end_tokens(generation if isinstance(generation, Path) else Path())
    if eos_token_ids is not None:
        eos = as_ids("eos_token_ids", eos_token_ids, UnsupportedError)
    if bos_token_id is not None:
        bos = as_id("bos_token_id", bos_token_id, UnsupportedError)
    for name, ids in (("eos_token_ids", eos), ("bos_token_id", () if bos is None else (bos,))):
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise UnsupportedError(
                f"{name}: expected token ids in [0, {vocab_size}), got {outside[0]}"
            )
    return Model(
        module=module,
        architecture=type(module).__qualname__,
        layers=(),
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        dtype=own,
        files=files,
        eos_token_ids=eos,
        bos_token_id=bos,
        is_own=True,
    )


def _kind(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def _files(tokenizer: str | Path | None, vocab_size: int) -> Files:
    if tokenizer is None:
        return {}
    path = as_path("tokenizer", tokenizer)
    if path.is_file():
        read_tokenizer(path, ModelError)
        return {TOKENIZER: path}
    files = text_files(path, vocab_size)
    if TOKENIZER not in files:
        raise ModelError(f"{path}: expected {TOKENIZER} or a folder that has one, got none")
    return files


def _dtype(module: nn.Module) -> tuple[str, str]:
    """The dtype of the first floating parameter, and its name for an error message."""
    for name, parameter in module.named_parameters():
        if parameter.dtype.is_floating_point:
            return str(parameter.dtype).removeprefix("torch."), f"first parameter {name!r}"
    return "float32", "parameters"


def _require_python(module: nn.Module) -> None:
    """Raise UnsupportedError for TorchScript modules, which a trace cannot follow."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{name or 'model'}: expected an nn.Module in Python, got a torch.jit.ScriptModule"
            )


def _require_values(module: nn.Module) -> None:
    """Raise ModelError for parameters or buffers without values, and UnsupportedError for sparse or
    packed ones."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name}: expected a tensor with values, got one that is not initialised; run the "
                "module once"
            )
        if tensor.is_meta:
            raise ModelError(f"{name}: expected a tensor with values, got one on device meta")
        if tensor.layout is not torch.strided:
            raise UnsupportedError(f"{name}: expected a dense tensor, got {tensor.layout}")
        if tensor.is_quantized:
            raise UnsupportedError(PACKED.format(name, tensor.dtype))
    for part, each in module.named_modules():
        for value in vars(each).values():
            if isinstance(value, torch.ScriptObject) and "quantized" in str(value._type()):
                raise UnsupportedError(
                    PACKED.format(part or "model", f"packed ones of {value._type()}")
                )
