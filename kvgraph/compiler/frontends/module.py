"""A user's own nn.Module whose attention calls `kvgraph.ops`."""

from __future__ import annotations

from torch import nn

from kvgraph.compiler.model import Model
from kvgraph.errors import UnsupportedError


def load(
    module: nn.Module,
    *,
    vocab_size: int | None,
    max_seq_len: int | None,
    dtype: str | None,
) -> Model:
    """Wrap `module`; what no configuration file says comes from the caller.

    UnsupportedError names an argument that is missing.
    """
    if vocab_size is None or max_seq_len is None:
        missing = "vocab_size" if vocab_size is None else "max_seq_len"
        raise UnsupportedError(f"{missing}: expected a value to compile an nn.Module, got None")
    own = next((str(p.dtype).removeprefix("torch.") for p in module.parameters()), "float32")
    if dtype and dtype != own:
        raise UnsupportedError(f"dtype: expected {own} from the module's parameters, got {dtype}")
    name = type(module).__qualname__
    return Model(
        module=module,
        architecture=name,
        layers=(),
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        dtype=own,
        fingerprint=name.encode(),
    )
