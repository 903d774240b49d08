"""Make a causal language model of a text part for which transformers has no such class.

Qwen2.5-VL and others have a text model inside a larger one, and the output projection belongs to
the larger one. Positions of text are the same along all axes, so rotary embeddings of several axes
(M-RoPE) equal the plain ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput


def language_model(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class that adds an output projection to `base`, a model that returns hidden states."""
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
