"""Fix rotary frequencies that depend on the context length, for one length.

transformers chooses them in each step, by the step's largest position (`dynamic_rope_update`). Then
a short row's tokens would depend on a long row in its batch, and keys in the cache would have been
rotated by other frequencies. Here all positions use the frequencies for contexts of `max_seq_len`
tokens, as vLLM chooses LongRoPE's factors by its `max_model_len`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import nn

from kvgraph.compiler.frontends.lengths import (
    DYNAMIC,
    LONG,
    ORIGINAL,
    RopeParameters,
    most_tokens,
    number,
    required_length,
)
from kvgraph.compiler.quiet import first_line
from kvgraph.contract.manifest_values import MOST
from kvgraph.errors import ModelError, ParamsError, UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OWN_INIT = "rope_init_fn"
"""Attribute of Phi-MoE's rotary embedding, which calls it in each step, and has its own scales."""


class _Embedding(Protocol):
    """The attributes of transformers' rotary embeddings that are used here."""

    rope_type: str | dict[str, str]
    config: PretrainedConfig
    rope_init_fn: Callable[..., tuple[torch.Tensor, float]]

    def register_buffer(self, name: str, tensor: torch.Tensor, persistent: bool) -> None: ...


class _Frequencies(NamedTuple):
    """Rope type and parameters of an embedding's only set of frequencies, or of a layer type's."""

    kind: str
    layer_type: str | None
    given: RopeParameters


def longest(config: PretrainedConfig, asked: int | None) -> int | None:
    """Tokens of the longest context: `asked`, or the model's own; None if it has no limit.

    ParamsError: `asked` is above the limit of the model's frequencies (`lengths.most_tokens`).
    ModelError: rotary parameters are no numbers; the model's own length is above MOST.
    """
    own: int | None = getattr(config, "max_position_embeddings", None)
    if own is None:
        return None
    if asked is None:
        return required_length(own)
    most = min(MOST, most_tokens(parameters_of(config), own))
    if not 1 <= asked <= most:
        raise ParamsError(
            f"max_seq_len: expected 1 to {most} tokens from the model's config.json, got {asked}"
        )
    return asked


def settle(model: nn.Module, max_seq_len: int) -> tuple[str, ...]:
    """Fix each rotary embedding's frequencies for contexts of `max_seq_len` tokens. Return notes.

    ModelError: transformers does not take the rotary parameters.
    """
    notes: list[str] = []
    for module in model.modules():
        embedding = cast(_Embedding, module)
        for kind, layer_type, given in _frequencies(embedding):
            config = embedding.config
            frequencies, scale = _computed(config, kind, layer_type, max_seq_len)
            is_long = kind == LONG and max_seq_len > number(given, ORIGINAL)
            of_length = "long_mscale" if is_long else "short_mscale"
            if kind == LONG and hasattr(module, OWN_INIT) and of_length in given:
                scale = number(given, of_length)
            _set(embedding, layer_type, frequencies, scale)
            notes.append(_note(kind, given, max_seq_len, config.max_position_embeddings))
    return tuple(dict.fromkeys(notes))


def _computed(
    config: PretrainedConfig, kind: str, layer_type: str | None, max_seq_len: int
) -> tuple[torch.Tensor, float]:
    """The frequencies for contexts of `max_seq_len` tokens, and the scale of cosines and sines."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = {"layer_type": layer_type} if layer_type else {}
    try:
        found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[kind](
            config, seq_len=max_seq_len, **options
        )
    except Exception as error:  # transformers only warns of values that do not fit
        reraise_if_signalled(error)
        raise ModelError(
            "config.json: rope_parameters: expected values that frequencies are made of, got one "
            f"that is not: {first_line(error)}"
        ) from error
    return found


def parameters_of(config: PretrainedConfig) -> RopeParameters:
    """Rotary parameters of a configuration, for all layers or by layer type; empty if none."""
    given: RopeParameters | None = getattr(config, "rope_parameters", None)
    return given or {}


def _frequencies(module: _Embedding) -> Iterator[_Frequencies]:
    """Sets of frequencies of an embedding that depend on the context length."""
    kinds = getattr(module, "rope_type", None)
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind in (LONG, DYNAMIC):
            given = module.config.rope_parameters
            yield _Frequencies(kind, layer_type, given[layer_type] if layer_type else given)


def _set(
    module: _Embedding, layer_type: str | None, frequencies: torch.Tensor, scale: float
) -> None:
    """Set an embedding's frequencies as its constructor does, and make it never update them."""
    prefix = f"{layer_type}_" if layer_type else ""
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        if getattr(module, name, None) is None:
            raise UnsupportedError(
                f"{type(module).__name__}: expected its frequencies as buffer {name} of "
                "transformers' rotary embeddings, got none"
            )
        module.register_buffer(name, frequencies.clone(), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scale)
    if isinstance(module.rope_type, dict):
        assert layer_type is not None
        module.rope_type = module.rope_type | {layer_type: "default"}
        return
    module.rope_type = "default"
    if hasattr(module, OWN_INIT):
        module.rope_init_fn = lambda *_: (frequencies, scale)
        module.config = copy(module.config)
        module.config.rope_parameters = module.config.rope_parameters | {"rope_type": "default"}


def _note(kind: str, given: RopeParameters, max_seq_len: int, own: int) -> str:
    start = f"rotary embedding: {kind}, settled for contexts of {max_seq_len} tokens"
    if kind == DYNAMIC:
        most = int(own * number(given, "factor"))
        return f"{start} (--max-seq-len up to {most} stretches its frequencies)"
    original = number(given, ORIGINAL)
    if max_seq_len > original:
        return f"{start}: its long factors (--max-seq-len up to {original} takes the short ones)"
    return f"{start}: its short factors (--max-seq-len above {original} takes the long ones)"
