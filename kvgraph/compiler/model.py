"""What a frontend hands to the pipeline: a module over the graph's signature, and its facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.compiler.cache import CachePlan, LayerNeed

if TYPE_CHECKING:
    import torch

    from kvgraph.compiler.checkpoint import Checkpoint


@dataclass(frozen=True)
class Model:
    """A decoder ready for export.

    `module.forward(tokens, input_row_offsets, logits_indices, *cache)` takes the signature's
    inputs in order and returns logits `[num_logits, vocab_size]`; its attention goes through
    `kvgraph.ops`. `place(plan)` tells the module where each layer's cache is, before export.
    """

    module: torch.nn.Module
    architecture: str
    layers: tuple[LayerNeed, ...]
    """What each layer's attention stores; empty where the caller gives the cache's parameters."""
    vocab_size: int
    max_seq_len: int
    dtype: str
    place: Callable[[CachePlan], None] = lambda plan: None
    files: dict[str, Path | bytes] = field(default_factory=dict)
    """Files that travel into the artifact: name there -> path here, or content."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint: Checkpoint | None = None
    """Where the values are of a module whose parameters are fake."""
    stored_dtype: str = ""
    """Of the checkpoint's weights, where the module has them in another dtype."""
    is_quantized: bool = False
    """The checkpoint's weights are stored in fewer bits."""
    loaded: str = ""
    """Why a module has its values in memory that was asked for without them."""
    notes: tuple[str, ...] = ()
    """Sentences for the manifest."""

    def __post_init__(self) -> None:
        self.module.eval()
