"""Find the first layer that differs, when the logits of a compile are not the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kvgraph.compiler.check.compare import Logits, Tokens, Tolerance, errors_of
from kvgraph.compiler.check.host import logits_of
from kvgraph.compiler.check.reference import eager, transformers_logits
from kvgraph.compiler.check.subject import decoder_layers
from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.traced import Traced

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def wrong_layer(
    traced: Traced, row: Tokens, allowed: Tolerance, chosen: Sequence[int] | None
) -> str:
    """Text for the end of an error message: the first layer that differs, or the lowered graph.

    Each layer's output under kvgraph's attention is compared with that under transformers' own. If
    all agree, the error is in the graph that was made of the program.
    `chosen`: indices of the layers in the whole model; None: all of them.
    """
    decoder = traced.model.module
    layers = None
    if isinstance(decoder, Decoder):
        layers = decoder_layers(decoder.model, len(traced.model.layers))
    if layers is None:
        return "in the lowered graph"
    theirs, ours = _Outputs(layers), _Outputs(layers)
    model: PreTrainedModel = decoder.model
    with theirs, eager(model):
        transformers_logits(model, row)
    with ours:
        logits_of(decoder, traced.signature, traced.plan.params, [row], chunk=len(row))
    for i, (a, b) in enumerate(zip(ours.values, theirs.values, strict=True)):
        if np.max(errors_of(a, b)) > allowed.error:
            place = chosen[i] if chosen is not None else i
            return f"from layer {place} ({type(layers[i]).__name__}) on"
    return "in the lowered graph; the layers' own code agrees"


class _Outputs:
    """A context manager that keeps what each layer returns, as `[T, hidden]` in `values`."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = layers
        self._hooks: list[RemovableHandle] = []
        self.values: list[Logits] = []

    def __enter__(self) -> None:
        self._hooks = [layer.register_forward_hook(self._keep) for layer in self._layers]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(
        self, layer: nn.Module, given: object, result: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> None:
        hidden: torch.Tensor = result[0] if isinstance(result, tuple) else result
        self.values.append(hidden.detach().float().reshape(-1, hidden.shape[-1]).numpy().copy())
