"""Memory that a plan keeps out of the cache: what the largest step makes next to the weights.

Decision: an estimate from widths alone, so that a plan needs no graph. Values of a layer are made
and dropped one after the other; most at once are there in a feed-forward layer: the residual and
its norm, and four as wide as the widest layer (gate, up, the gate's activation, their product). A
test holds the estimate against what is alive in exported programs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.compiler.described import Described
from kvgraph.contract.dtypes import itemsize
from kvgraph.contract.sizes import size_text

HIDDEN_VALUES, WIDEST_VALUES = 2, 4
"""Of a token, at once: of the hidden size, and of the widest layer."""

EXPERTS_BYTES = 64 << 20
"""Scratch of `kvgraph.experts` on a CPU, which cuts its rows into blocks."""


@dataclass(frozen=True)
class Reserve:
    """Of a step of `tokens` new tokens, of which `rows` get logits in float32."""

    nbytes: int
    tokens: int
    rows: int
    values_per_token: int
    dtype: str
    """Of these values."""
    logits_per_row: int
    experts_bytes: int
    """Scratch of experts, in all."""

    @property
    def said(self) -> str:
        """Of which step it is, and what of it no shorter step saves."""
        held = size_text(self.experts_bytes)
        fixed = f" ({held} of it for experts, of any step)" if self.experts_bytes else ""
        return f"a step of {self.tokens} tokens and {self.rows} rows of logits{fixed}"


def reserve_of(
    model: Described, dtype: str, *, tokens: int, rows: int, ranks: int, on_cpu: bool
) -> Reserve:
    """What `model`, or the part of one of `ranks`, takes for the largest step.

    Ranks gather their parts of the logits: each has its own part and the whole.
    """
    values = HIDDEN_VALUES * model.hidden_size + WIDEST_VALUES * model.widest
    logits = model.vocab_size + (model.vocab_size // ranks if ranks > 1 else 0)
    experts = EXPERTS_BYTES if model.experts and on_cpu else 0
    nbytes = tokens * values * itemsize(dtype) + rows * logits * itemsize("float32") + experts
    return Reserve(nbytes, tokens, rows, values, dtype, logits, experts)
