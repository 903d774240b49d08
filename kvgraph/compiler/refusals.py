"""Reasons for which a model of transformers is refused, and the text of the error."""

from __future__ import annotations

from enum import Enum

PROVEN = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss")
"""Model types on the equivalence ladder; others compile if their attention allows it."""


class Reason(Enum):
    """A reason for which a model cannot be compiled; `said` fills in the words in braces."""

    UNKNOWN = "transformers does not know it"
    NO_DECODER = "it is not a causal decoder"
    NO_PART = "transformers has no model of this part alone"
    SEVERAL_PARTS = "it has several text configurations, or one for each layer"
    NO_LIMIT = "its configuration has no max_position_embeddings"
    NO_INTERFACE = "its attention has no interface"
    SOME_LAYERS = "attention of {found} of {layers} layers reaches the interface"
    SEVERAL_CALLS = "attention of layer {layer} runs {count} times"
    NOT_CAUSAL = "its attention is not causal"
    SPARSE = "its sparse attention (index_topk) has no kernel yet"
    KEYWORD = "its attention is given {names}, which the cache ops do not have"
    OWN_MASK = "its attention has a mask of its own"
    PADDING = "it masks tokens by a padding mask of its own"
    OTHER_MASK = "its mask is neither causal, nor a sliding window, nor chunks ({name})"
    UNREADABLE_MASK = "its mask cannot be read ({name})"
    LOST_WINDOW = "its mask is asked for with local_size {size} and has none"
    TWO_WINDOWS = "its attention is told sliding_window={told}, and its mask has {mask}"
    LAYER_TYPE = "layer {layer} is {kind}, which its attention does not say"
    NUMBERED = "its code numbers the tokens of a step from 0, whatever their rows"
    BY_VALUE = "its code asks for the values of tensors"
    CONVERTED = "its code converts parameters while it is made"
    NOT_ALONE = "its code does not run on tokens and positions alone ({error})"

    def said(self, **words: object) -> str:
        return self.value.format(**words)


def unsupported(kind: str, why: str) -> str:
    proven = ", ".join(PROVEN)
    return (
        f"architecture {kind!r}: expected a decoder that uses transformers' attention interface "
        f"(proven: {proven}), got one that cannot be compiled: {why}"
    )
