"""A window that only the model's mask knows, and masks that the cache ops do not have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

import kvgraph
from kvgraph.compiler.cache import LayerNeed
from kvgraph.compiler.frontends import decoder
from kvgraph.compiler.frontends.masks import AskedMask, asked_mask
from tests.support.models import make_model

WINDOW = 8


def ask(function: Any, local_size: int | None = None) -> AskedMask:
    config = transformers.LlamaConfig(max_position_embeddings=300)
    return asked_mask(mask_function=function, local_size=local_size, config=config)


def test_masks_are_read() -> None:
    assert ask(masking_utils.causal_mask_function) == AskedMask(None)
    for window in (1, 2, 8, 299):
        sliding = masking_utils.sliding_window_causal_mask_function(window)
        assert ask(sliding, window) == ask(sliding) == AskedMask(window)
    for size in (2, 16, 120, 299):
        chunks = masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
        assert ask(chunks, size) == ask(chunks) == AskedMask(size, chunked=True)
    longer = masking_utils.sliding_window_causal_mask_function(300)
    assert ask(longer, 300) == AskedMask(300)


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.chunked_causal_mask_function(16, torch.full((1,), 3)),
        masking_utils.and_masks(
            masking_utils.causal_mask_function, lambda b, h, q, k: (q - k) % 3 != 1
        ),
        masking_utils.or_masks(
            masking_utils.sliding_window_causal_mask_function(8), lambda b, h, q, k: k == 0
        ),
    ],
)
def test_other_masks_are_refused(function: Any) -> None:
    assert ask(function).why.startswith("its mask is neither causal, nor a sliding window, nor chu")


def test_mask_that_looks_ahead() -> None:
    assert ask(masking_utils.bidirectional_mask_function).why == "its attention is not causal"


def test_mask_that_cannot_be_read() -> None:
    def by_content(batch: Any, head: Any, query: Any, key: Any) -> Any:
        raise TypeError("indexes a tensor of the trace")

    assert re.fullmatch(r"its mask cannot be read \(.*by_content\)", ask(by_content).why)


def phimoe(folder: Path) -> Path:
    """A mixture of experts whose attention is told nothing of its window."""
    return make_model(
        "phimoe",
        folder,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_jitter_noise=0.0,
        input_jitter_noise=0.0,
        num_hidden_layers=2,
    )


def test_window_that_only_the_mask_knows(tmp_path: Path) -> None:
    folder = phimoe(tmp_path / "model")
    prompt = list(range(3, 43))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
    )
    kvgraph.compile(folder, tmp_path / "out", page_size=4)
    engine = kvgraph.Engine(tmp_path / "out", num_pages=64)
    assert engine.kv.params.leaves[""].window_size == WINDOW
    done = engine.generate([prompt], kvgraph.SamplingParams(max_new_tokens=16))[0]
    assert done.token_ids == expected[0, len(prompt) :].tolist()


def attend(**keywords: Any) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    q = torch.zeros(1, 4, 3, 8)
    with decoder._running_over(decoder.Probe()):
        decoder.paged_kv_attention(module, q, q, q, **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"indices": torch.zeros(1)}, "is given 'indices', which the cache ops do not have"),
        ({"position_bias": 1, "block_indices": 2}, "'position_bias', 'block_indices'"),
        ({"dropout": 0.1}, "is given 'dropout'"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "its attention has a mask of its own"),
        (
            {"attention_mask": AskedMask(None), "sliding_window": 8},
            "is told sliding_window=8, and its mask has no window",
        ),
        (
            {"attention_mask": AskedMask(4), "sliding_window": 8},
            "is told sliding_window=8, and its mask has 4",
        ),
        ({"attention_mask": AskedMask(None, why="it is odd")}, "it is odd"),
        ({"is_causal": False}, "its attention is not causal"),
    ],
)
def test_what_attention_is_given_and_does_not_know(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        attend(**keywords)


def test_keywords_without_effect() -> None:
    attend(
        attention_mask=AskedMask(8),
        sliding_window=8,
        dropout=0.0,
        position_ids=torch.zeros(1),
        use_cache=False,
        output_router_logits=True,
        indices=None,
    )


class Seen(decoder.Decoder):
    """Its one layer stores keys and sees everything, whatever the configuration says."""

    def run(self, *given: Any) -> torch.Tensor:
        given[-1].layers[0] = LayerNeed(2, 8, 8, None)
        return torch.empty(0)


def test_layer_type_of_a_decoder_inside_a_larger_model() -> None:
    model = torch.nn.Module()
    text = transformers.Gemma3TextConfig(num_hidden_layers=1, layer_types=["sliding_attention"])
    model.config = transformers.Gemma3Config(text_config=text.to_dict())  # type: ignore[assignment]
    with pytest.raises(kvgraph.UnsupportedError, match="layer 0 is sliding_attention, which its"):
        decoder.probe(Seen(model), "gemma3", 1)
