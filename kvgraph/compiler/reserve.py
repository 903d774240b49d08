"""Estimate the memory that a plan reserves for the largest step, besides weights and cache.

Decision: the estimate uses widths only, so that a plan needs no graph. Values of a layer are made
and freed one after the other. Most are alive at once in a feed-forward layer: the residual and its
norm, and four tensors as wide as the widest layer (gate, up, the gate's activation, their product).
A test compares the estimate with the values that are alive in exported programs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.compiler.described import ModelSizes
from kvgraph.contract.dtypes import itemsize
from kvgraph.contract.sizes import size_text

HIDDEN_VALUES, WIDEST_VALUES = 2, 4
"""Tensors alive at once: number with the hidden size, and number as wide as the widest layer."""

EXPERTS_BYTES = 64 << 20
"""Bytes of scratch of `kvgraph.experts` on a CPU; it processes rows in blocks."""


@dataclass(frozen=True)
class Reserve:
    """The memory for a step of `tokens` new tokens, with float32 logits for `rows` of them."""

    nbytes: int
    tokens: int
    rows: int
    values_per_token: int
    dtype: str
    """dtype of the values per token."""
    logits_per_row: int
    experts_bytes: int
    """Bytes of scratch of experts, whatever the step's size; 0 without experts."""

    @property
    def text(self) -> str:
        """Text for the step's size, and for the part of the memory that every step needs."""
        held = size_text(self.experts_bytes)
        fixed = f" ({held} of it for experts, of any step)" if self.experts_bytes else ""
        return f"a step of {self.tokens} tokens and {self.rows} rows of logits{fixed}"


def reserve_of(
    model: ModelSizes, dtype: str, *, tokens: int, rows: int, ranks: int, on_cpu: bool
) -> Reserve:
    """The memory that the largest step of `model`, or of one rank's part of it, needs.

    Ranks gather their parts of the logits, so each has its own part and all logits.
    """
    values = HIDDEN_VALUES * model.hidden_size + WIDEST_VALUES * model.widest
    logits = model.vocab_size + (model.vocab_size // ranks if ranks > 1 else 0)
    experts = EXPERTS_BYTES if model.experts and on_cpu else 0
    nbytes = tokens * values * itemsize(dtype) + rows * logits * itemsize("float32") + experts
    return Reserve(nbytes, tokens, rows, values, dtype, logits, experts)
