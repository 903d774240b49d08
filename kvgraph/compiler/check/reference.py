"""Reference logits: those of transformers' eager forward pass, or of the user's own module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from kvgraph.compiler.check.compare import Logits, Tokens
from kvgraph.compiler.check.host import logits_of
from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.frontends.huggingface import REPORTING
from kvgraph.compiler.quiet import quiet_loggers
from kvgraph.compiler.traced import Traced

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

WINDOW = 16
"""Tokens that attention windows are cut to, so that short rows reach beyond them."""


def reference_logits(traced: Traced, rows: Sequence[Tokens]) -> list[Logits]:
    """Reference logits of every token, one `[len(row), vocab]` array for each row.

    Each row runs alone and in one piece.
    """
    module = traced.model.module
    if isinstance(module, Decoder):
        with eager(module.model):
            return [transformers_logits(module.model, row) for row in rows]
    each = [
        logits_of(module, traced.signature, traced.plan.params, [row], chunk=len(row))
        for row in rows
    ]
    return [logits for (logits,) in each]


def transformers_logits(model: PreTrainedModel, row: Tokens) -> Logits:
    tokens = torch.as_tensor(row, dtype=torch.long)[None]
    with torch.no_grad():
        output = model(
            input_ids=tokens, position_ids=torch.arange(tokens.shape[1])[None], use_cache=False
        )
    found: Logits = output.logits[0].float().numpy()
    return found


@contextlib.contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Make the model run transformers' own eager attention, masks and experts while it is active.

    Eager experts run one after the other. `batched_mm`, which is exported, would copy the weights
    of each token's experts.
    """
    before = [
        (config, name, getattr(config, name))
        for config in _configs(model)
        for name in ("_attn_implementation", "_experts_implementation")
    ]
    try:
        for config, name, _ in before:
            setattr(config, name, "eager")
        with quiet_loggers(*REPORTING):
            yield
    finally:
        for config, name, implementation in before:
            setattr(config, name, implementation)


@contextlib.contextmanager
def cut_windows(model: nn.Module) -> Iterator[None]:
    """Cut attention windows and chunks, in configurations and modules, to at most WINDOW tokens
    while it is active."""
    holders = [*_configs(model), *model.modules()]
    before = [
        (holder, name, window)
        for holder in holders
        for name in ("sliding_window", "attention_chunk_size")
        if isinstance(window := getattr(holder, name, None), int)
    ]
    try:
        for holder, name, window in before:
            setattr(holder, name, min(window, WINDOW))
        yield
    finally:
        for holder, name, window in before:
            setattr(holder, name, window)


def _configs(model: nn.Module) -> list[PretrainedConfig]:
    """The configurations that parts of the model read, each once."""
    found: dict[int, PretrainedConfig] = {}
    for part in model.modules():
        config: PretrainedConfig | None = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())
