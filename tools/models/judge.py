"""One case: a random checkpoint is compiled, and its tokens are compared with transformers'."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tools.models.cases import WHOLE, config_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (1, 7, 33, 90)
"""Of the prompts, which are one batch in chunks of 64 tokens."""

NEW = 24
TIE = 1e-4
"""Where the two likeliest tokens are nearer, the comparison of a prompt ends."""

MOST_PARAMETERS = 20_000_000


class Verdict(NamedTuple):
    """`result`: "right", "other tokens", "refused" or "not made"; `why` says more."""

    result: str
    why: str = ""


class NotMadeError(Exception):
    """transformers has no small model of the case, or it does not run."""


def judge(name: str) -> Verdict:
    """What becomes of a case; writes nothing that stays.

    Errors that say nothing of the case, such as a library that is missing, are raised.
    """
    import kvgraph

    with tempfile.TemporaryDirectory() as scratch:
        folder, out = Path(scratch) / "model", Path(scratch) / "out"
        try:
            make(name, folder)
            prompts = _prompts()
            model = _load(name, folder)
            expected = [_greedy(model, prompt, use_cache=True) for prompt in prompts]
        except Exception as error:
            return Verdict("not made", _first_line(error))
        try:
            kvgraph.compile(folder, out, backend="onnx", page_size=16)
        except kvgraph.UnsupportedError as error:
            return Verdict("refused", str(error).rpartition("cannot be compiled: ")[2])
        except kvgraph.CheckError as error:
            return Verdict("other tokens", _first_line(error))
        except kvgraph.KVGraphError as error:
            error.add_note(f"case {name}: no verdict, as it was not compiled")
            raise
        greedy = kvgraph.SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        with kvgraph.Engine(out, num_pages=64, max_batch_tokens=64) as engine:
            done = engine.generate(prompts, greedy)
    found = [each.token_ids for each in done]
    verdict = _compared(expected, found)
    if verdict.result == "other tokens":
        whole = [_greedy(model, prompt, use_cache=False) for prompt in prompts]
        if whole != expected and _compared(whole, found).result == "right":
            return Verdict("right", "transformers' own tokens are others with its cache")
    return verdict


def _compared(expected: list[list[int]], found: list[list[int]]) -> Verdict:
    for prompt, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        if ours[: len(theirs)] != theirs:
            return Verdict("other tokens", f"in the prompt of {LENGTHS[prompt]} tokens")
    count = sum(map(len, expected))
    if count < NEW * len(LENGTHS) // 2:
        return Verdict("not made", f"only {count} tokens are no ties")
    return Verdict("right")


def make(name: str, folder: Path) -> None:
    """Save a random checkpoint of the case into `folder`, the same each time."""
    import transformers

    config, auto = config_of(name), transformers.AutoModelForCausalLM
    if name in WHOLE:
        auto = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotMadeError(f"{size // 1_000_000:,} million parameters: no small configuration")
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32)
    _redraw(model)
    model.save_pretrained(folder)
    _save_tokenizer(folder)


def _redraw(model: PreTrainedModel) -> None:
    """Weights under which attention is sharp, norms are uneven, and biases and sinks count."""
    generator = torch.Generator().manual_seed(11)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point() or name.endswith(("A_log", "dt_bias")):
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if id(weight) in tables:
                weight.copy_(0.4 * noise)
            elif "sink" in name:
                weight.copy_(noise)
            elif weight.dim() > 1:
                weight.copy_(1.3 * weight.shape[-1] ** -0.5 * noise)
            else:
                weight.add_(0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))


def _save_tokenizer(folder: Path) -> None:
    """A word for each id."""
    words = {f"<{i}>": i for i in range(160)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<0>"}
    whitespace = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": whitespace, "model": model})
    )


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 140, (n,), generator=generator).tolist() for n in LENGTHS]


def _load(name: str, folder: Path) -> PreTrainedModel:
    """In plain operators."""
    import transformers

    auto = transformers.AutoModelForCausalLM
    if name in WHOLE:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    text = getattr(model, "language_model", None)
    if isinstance(text, transformers.GenerationMixin):  # Llama 4's whole model asks for images
        model = text
    loaded: PreTrainedModel = model.eval()
    loaded.generation_config.eos_token_id = None  # no token ends a text
    return loaded


def _greedy(model: PreTrainedModel, prompt: list[int], *, use_cache: bool) -> list[int]:
    """transformers' tokens up to the first tie."""
    ids = torch.tensor([prompt])
    done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens: list[int] = done.sequences[0, len(prompt) :].tolist()
    for step, logits in enumerate(done.logits):
        first, second = logits[0].topk(2).values.tolist()
        if first - second < TIE:
            return tokens[:step]
    return tokens


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
