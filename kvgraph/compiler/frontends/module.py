"""A user's own nn.Module whose attention calls `kvgraph.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from kvgraph.compiler.frontends.text_files import (
    GENERATION,
    TOKENIZER,
    as_ids,
    end_tokens,
    require_tokenizer,
    text_files,
)
from kvgraph.compiler.model import Model
from kvgraph.errors import ModelError, UnsupportedError


def load(
    module: nn.Module,
    *,
    vocab_size: int | None,
    max_seq_len: int | None,
    dtype: str | None,
    tokenizer: str | Path | None = None,
    eos_token_ids: int | Sequence[int] | None = None,
    bos_token_id: int | None = None,
) -> Model:
    """Wrap `module`; what no configuration file says comes from the caller.

    `tokenizer`: a tokenizer.json, or a folder with one and the other files about text; its
    generation_config.json names the end tokens where `eos_token_ids` does not.
    UnsupportedError names an argument that is missing, ModelError a file that is.
    """
    if not isinstance(module, nn.Module):
        raise UnsupportedError(
            f"model: expected a folder, a GGUF file or an nn.Module, got {_kind(module)}"
        )
    if vocab_size is None or max_seq_len is None:
        missing = "vocab_size" if vocab_size is None else "max_seq_len"
        raise UnsupportedError(f"{missing}: expected a value to compile an nn.Module, got None")
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{name}: expected a parameter with values, got one on device meta")
    own = next((str(p.dtype).removeprefix("torch.") for p in module.parameters()), "float32")
    if dtype and dtype != own:
        raise UnsupportedError(f"dtype: expected {own} from the module's parameters, got {dtype}")
    files = _files(tokenizer)
    eos, bos = end_tokens(files.get(GENERATION, Path()))
    eos = eos if eos_token_ids is None else as_ids(eos_token_ids)
    bos = bos if bos_token_id is None else bos_token_id
    for name, ids in (("eos_token_ids", eos), ("bos_token_id", () if bos is None else (bos,))):
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise UnsupportedError(
                f"{name}: expected token ids below vocab_size={vocab_size}, got {outside[0]}"
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
    )


def _kind(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def _files(tokenizer: str | Path | None) -> dict[str, Path]:
    if tokenizer is None:
        return {}
    path = Path(tokenizer)
    files = text_files(path) if path.is_dir() else {TOKENIZER: path}
    if TOKENIZER not in files or not files[TOKENIZER].is_file():
        raise ModelError(f"{path}: expected {TOKENIZER} or a folder that has one, got none")
    require_tokenizer(files[TOKENIZER])
    return files
