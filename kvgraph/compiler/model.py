"""The Model that a frontend gives to the pipeline: a module and facts about it."""

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
    inputs in order and returns logits `[num_logits, vocab_size]`; its attention calls
    `kvgraph.ops`. `place(plan)`, called before export, gives the module each layer's cache leaf.
    """

    module: torch.nn.Module
    architecture: str
    layers: tuple[LayerNeed, ...]
    """The cache need of each layer; empty for a user's own module, which comes with params."""
    vocab_size: int
    max_seq_len: int
    dtype: str
    place: Callable[[CachePlan], None] = lambda plan: None
    files: dict[str, Path | bytes] = field(default_factory=dict)
    """Files to copy into the artifact: name there -> path of the source, or content."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint: Checkpoint | None = None
    """Sources of the values of fake parameters; None: the module has its values."""
    stored_dtype: str = ""
    """dtype of the checkpoint's weights, if the module has them in another one; else empty."""
    is_own: bool = False
    """Whether the module is a user's own, not one of transformers behind a Decoder."""
    is_quantized: bool = False
    """Whether the checkpoint's weights are quantised."""
    loaded: str = ""
    """Why values are in memory although fake parameters were asked for; else empty."""
    notes: tuple[str, ...] = ()
    """Sentences for the manifest."""

    def __post_init__(self) -> None:
        self.module.eval()
