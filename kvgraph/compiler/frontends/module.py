"""A user's own nn.Module whose attention calls `kvgraph.ops`."""

from __future__ import annotations

from torch import nn

from kvgraph.compiler.model import CacheNeed, Model
from kvgraph.contract.params import KVCacheParams
from kvgraph.errors import UnsupportedError


def load(
    module: nn.Module,
    *,
    params: KVCacheParams | None,
    vocab_size: int | None,
    max_seq_len: int | None,
    dtype: str | None,
) -> Model:
    """Wrap `module`; its cache is what `params` says, since no configuration file does.

    UnsupportedError names an argument that is missing.
    """
    given = {"params": params, "vocab_size": vocab_size, "max_seq_len": max_seq_len}
    for name, value in given.items():
        if value is None:
            raise UnsupportedError(f"{name}: expected a value to compile an nn.Module, got None")
    assert params is not None
    assert vocab_size is not None
    assert max_seq_len is not None
    own = next((str(p.dtype).removeprefix("torch.") for p in module.parameters()), "float32")
    if dtype and dtype != own:
        raise UnsupportedError(f"dtype: expected {own} from the module's parameters, got {dtype}")
    name = type(module).__qualname__
    return Model(
        module=module,
        architecture=name,
        cache=CacheNeed(params.n_kv_heads, params.head_dim, params.num_layers, params.v_head_dim),
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        dtype=own,
        fingerprint=name.encode(),
    )
