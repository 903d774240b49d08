"""A request's changes of its logits (bias, penalties, masks), as the sampling kernel takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from kvgraph.kv.requests import TextContext
from kvgraph.ops.native import Edits
from kvgraph.runtime.sampling_params import SamplingParams


class LogitEdits:
    """Bias, penalties and banned tokens of one request, and the mask of one step.

    `mask`: uint32 words `[(vocab + 31) // 32]`. Bit b of word w is 1 if token 32 w + b may be
    drawn. None: all tokens may. The next step reads it; it stays in effect until it is set again.
    `ends`: the tokens that end the request, below the model's vocabulary.

    All but the mask is a function of the context's tokens, so there is nothing to rewind.
    """

    __slots__ = ("_arrays", "_context", "_edits", "_least_length", "_punishes", "mask")

    def __init__(
        self, params: SamplingParams, context: TextContext, ends: Collection[int] = ()
    ) -> None:
        self.mask: npt.NDArray[np.uint32] | None = None
        self._context = context
        self._least_length = context.current_length + params.min_new_tokens if ends else 0
        self._punishes = punishes(params)
        biases = params.logit_bias or {}
        banned, biased = np.array([*ends], np.int32), np.array([*biases], np.int32)
        bias = np.array([*biases.values()], np.float32)
        self._arrays = banned, biased, bias  # the kernel reads their memory
        self._edits = Edits(
            banned=banned.ctypes.data,
            biased=biased.ctypes.data,
            bias=bias.ctypes.data,
            num_biased=biased.size,
            num_prompt=context.current_length if self._punishes else 0,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )

    def address(self) -> int:
        """Address of the kernel's edit record for the next token; 0 if no edit applies."""
        edits, length, mask = self._edits, self._context.current_length, self.mask
        edits.num_banned = self._arrays[0].size if length < self._least_length else 0
        if self._punishes:
            edits.tokens = self._context.tokens.ctypes.data
            edits.num_tokens = length
        edits.mask, edits.num_words = None, 0
        if mask is not None:
            edits.mask, edits.num_words = mask.ctypes.data, mask.size
        elif not (edits.num_banned or edits.num_biased or self._punishes):
            return 0
        return ctypes.addressof(edits)


def punishes(params: SamplingParams) -> bool:
    """Whether a repetition, presence or frequency penalty is set."""
    factor, *amounts = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return factor != 1 or any(amounts)


def edits_of(
    params: SamplingParams, context: TextContext, ends: Collection[int]
) -> LogitEdits | None:
    """The request's edits; None if its logits never change."""
    if params.logit_bias or punishes(params) or (params.min_new_tokens and ends):
        return LogitEdits(params, context, ends)
    return None
