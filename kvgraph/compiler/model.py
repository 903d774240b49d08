"""What a frontend hands to the pipeline: a module over the graph's signature, and its facts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CacheNeed:
    """What a model's attention stores: the layout fields of KVCacheParams that it decides."""

    n_kv_heads: int
    head_dim: int
    num_layers: int
    v_head_dim: int = 0


@dataclass(frozen=True)
class Model:
    """A decoder ready for export.

    `module.forward(tokens, input_row_offsets, logits_indices, *cache)` takes the signature's
    inputs in order and returns logits `[num_logits, vocab_size]`; its attention goes through
    `kvgraph.ops`, layer i of the model under `layer=i`.
    """

    module: torch.nn.Module
    architecture: str
    cache: CacheNeed
    vocab_size: int
    max_seq_len: int
    dtype: str
    fingerprint: bytes = b""
    """What identifies the model beside its weights: its configuration."""
    files: dict[str, Path] = field(default_factory=dict)
    """Files that travel unchanged into the artifact: name there -> path here."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        self.module.eval()
