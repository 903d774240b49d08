"""A causal language model of a language part that has no such class of its own.

Qwen2.5-VL and others have a model of text inside a larger one, whose output projection belongs to
the whole. Positions of text are the same along all axes, so that rotary embeddings of several axes
(M-RoPE) are the plain ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput


def language_model(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of `base`, a model that ends with hidden states, and an output projection."""
    from transformers.modeling_outputs import CausalLMOutput

    class LanguageModel(base.__bases__[0]):  # type: ignore[misc,name-defined]
        base_model_prefix = "model"
        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.model = base(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: torch.Tensor,
            position_ids: torch.Tensor | None = None,
            logits_to_keep: int | torch.Tensor = 0,
            **others: object,
        ) -> CausalLMOutput:
            hidden = self.model(input_ids=input_ids, position_ids=position_ids, **others)[0]
            kept = slice(None) if isinstance(logits_to_keep, int) else logits_to_keep
            return CausalLMOutput(logits=self.lm_head(hidden[:, kept]))

    return LanguageModel
