"""Run a decoder of transformers over the graph's signature, with attention over the paged cache.

The model is built with kvgraph's attention implementation, which stores into and reads from the
paged cache. If the model asks for a mask, it gets a description of it (`masks.py`). Tokens of all
rows run as one sequence, with each token's position in its row as position id. The model's own code
does everything else.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from kvgraph import progress
from kvgraph.compiler.cache import CachePlan, LayerNeed
from kvgraph.compiler.frontends import masks
from kvgraph.compiler.frontends.caches import PaddedCache, PagedCache, Probe, make_cache
from kvgraph.compiler.frontends.masks import AskedMask
from kvgraph.compiler.frontends.positions import embeddings, numbered
from kvgraph.compiler.quiet import quiet_loggers
from kvgraph.compiler.refusals import Reason, unsupported
from kvgraph.errors import UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

WITHOUT_EFFECT = (
    "dropout",  # 0 outside training
    "position_ids",  # applied to q and k already
    "use_cache",
    "cache_position",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
)
"""Keywords that models pass to their attention and that have no effect here."""


class Decoder(nn.Module):
    """A causal language model of transformers over the graph's signature."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._plan: CachePlan | None = None
        self._attention: list[nn.Module] = []  # filled by the first run

    def over_same_weights(self) -> Decoder:
        """A copy that shares parameters and buffers with this one.

        Its list of attention modules starts empty, and is filled as the copy runs: layers may have
        been removed since this one ran.
        """
        shared = (*self.parameters(), *self.buffers())
        memo: dict[int, object] = {id(tensor): tensor for tensor in shared}
        return copy.deepcopy(self, memo | {id(self._attention): []})

    def place(self, plan: CachePlan) -> None:
        self._plan = plan

    def forward(
        self,
        tokens: torch.Tensor,
        input_row_offsets: torch.Tensor,
        logits_indices: torch.Tensor,
        *cache: torch.Tensor,
    ) -> torch.Tensor:
        assert self._plan is not None, "place() comes before export"
        kv = make_cache(self._plan, input_row_offsets, cache)
        return self.run(tokens, kv.positions(tokens), logits_indices, kv)

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        paged_kv: PagedCache | PaddedCache | Probe,
    ) -> torch.Tensor:
        numbering = numbered([*self._attention, *embeddings(self.model)], positions)
        with masks.ragged_rows(), numbering, _running_over(paged_kv) as forward:
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logits_indices.long(),
            )
        self._attention = self._attention or forward.attention
        logits: torch.Tensor = output.logits[0]
        return logits.float()


@dataclass
class _Forward:
    """The state of one forward pass: its cache, and each layer's `(key, value)` so far."""

    cache: PagedCache | PaddedCache | Probe
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    attention: list[nn.Module] = field(default_factory=list)
    """Attention modules that called the interface."""

    def reads(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """The earlier layer that was given these same tensor objects; None if there is none.

        Models whose layers share keys and values pass the same tensors on.
        """
        for other, (its_key, its_value) in self.given.items():
            if its_key is key and its_value is value:
                return other
        self.given[layer] = key, value
        return None


_FORWARD: ContextVar[_Forward] = ContextVar("forward")
"""The running forward pass. It is not a keyword, because not every model passes its keywords on to
its attention."""


@contextlib.contextmanager
def _running_over(cache: PagedCache | PaddedCache | Probe) -> Iterator[_Forward]:
    forward = _Forward(cache)
    token = _FORWARD.set(forward)
    try:
        yield forward
    finally:
        _FORWARD.reset(token)


def paged_kv_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AskedMask | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: q, k, v `[1, heads, T, D]` -> `[1, T, N, D]`.

    UnsupportedError: a mask or a keyword with a meaning that the cache ops do not have.
    """
    _require_known(others)
    q_TND, k_TKD, v_TKD = (x.transpose(1, 2)[0] for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    forward, layer = _FORWARD.get(), int(module.layer_idx)  # type: ignore[arg-type]
    forward.attention.append(module)
    out_TND = forward.cache.attend(
        layer,
        q_TND,
        k_TKD,
        v_TKD,
        s_aux.float() if s_aux is not None else None,
        forward.reads(layer, key, value),
        scale=scaling if scaling is not None else q_TND.shape[-1] ** -0.5,
        window=_window(attention_mask, sliding_window),
        chunked=int(attention_mask is not None and attention_mask.chunked),
        softcap=softcap or 0.0,
        causal=int(causal),
        v_head_dim=v_TKD.shape[-1] if v_TKD.shape[-1] != q_TND.shape[-1] else 0,
    )
    progress.advance()
    return out_TND[None], None


def _require_known(others: dict[str, object]) -> None:
    unknown = [name for name, given in others.items() if given is not None]
    unknown = [name for name in unknown if name not in WITHOUT_EFFECT]
    if unknown or others.get("dropout"):
        named = ", ".join(map(repr, unknown or ["dropout"]))
        raise UnsupportedError(Reason.KEYWORD.said(names=named))


def _window(mask: AskedMask | None, sliding_window: int | None) -> int:
    """The window in tokens, of the mask or of the keyword without one; 0: no window.

    UnsupportedError: the two differ, or no kernel has the mask.
    """
    if mask is None:
        return sliding_window or 0
    if not isinstance(mask, AskedMask):
        raise UnsupportedError(Reason.OWN_MASK.said())
    if mask.why:
        raise UnsupportedError(mask.why)
    if sliding_window is not None and sliding_window != mask.window:
        has = mask.window or "no window"
        raise UnsupportedError(Reason.TWO_WINDOWS.said(told=sliding_window, mask=has))
    return mask.window or 0


def probe(decoder: Decoder, architecture: str, num_layers: int) -> tuple[LayerNeed, ...]:
    """The LayerNeed of each layer, found by running one token on fake tensors.

    UnsupportedError if a layer's attention does not call the interface, or the model's code fails.
    """
    seen = Probe()
    mode = active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad(), quiet_loggers("torch._subclasses.fake_tensor"):
        one = torch.zeros(1, dtype=torch.int32)
        try:
            decoder.run(one, one, one, seen)
        except Exception as error:
            reraise_if_signalled(error)
            raise UnsupportedError(unsupported(architecture, _why(error, seen))) from error
    config: Any = decoder.model.config
    types = getattr(config.get_text_config(), "layer_types", None)
    why = _missing(seen, num_layers, types or ())
    if why:
        raise UnsupportedError(unsupported(architecture, why))
    return tuple(seen.layers[i] for i in range(num_layers))


ASK_FOR_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
"""Errors of code that asks for a tensor's values, or for a size that depends on them."""


def _why(error: Exception, seen: Probe) -> str:
    """The reason for a refusal, from an error that the model's code raised."""
    if isinstance(error, UnsupportedError):
        return str(error)
    if not seen.layers and AskedMask.__name__ in str(error):  # model code used it as a tensor
        return Reason.NO_INTERFACE.said()
    if isinstance(error, ASK_FOR_VALUES):
        return Reason.BY_VALUE.said()
    return Reason.NOT_ALONE.said(error=type(error).__name__)


def _missing(seen: Probe, num_layers: int, types: Sequence[str]) -> str:
    """The reason for a refusal if the run did not show what every layer stores; else empty."""
    if not seen.layers:
        return Reason.NO_INTERFACE.said()
    if sorted(seen.layers) != list(range(num_layers)):
        return Reason.SOME_LAYERS.said(found=len(seen.layers), layers=num_layers)
    for layer, count in seen.calls.items():
        if count > 1:
            return Reason.SEVERAL_CALLS.said(layer=layer, count=count)
    for layer, kind in enumerate(types):
        if (seen.layers[layer].window_size is None) != (kind == "full_attention"):
            return Reason.LAYER_TYPE.said(layer=layer, kind=kind)
    return ""
