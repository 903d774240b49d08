"""Guided rows in a step: `python -m benchmarks.guide [ARTIFACT] [--batch 32] [--json]`.

Method: one process and one engine on ARTIFACT (default: the Llama of `benchmarks.step`, with a
tokenizer of 32,000 tokens that is trained here on the standard library). A batch of free rows, then
the same batch with a grammar in every row, sampled at temperature 1 from the model's own logits.
Random weights give a flat distribution: texts are noise within their grammar, which costs the
matcher more than plain words. Wall time; medians over the steps behind the first WARM ones. "masks"
and "forced tokens" are what guides add to a step; the share is of the free rows' step. Every text
must follow its grammar by a matcher of its own. The goal: at most 3 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import kvgraph
from benchmarks.step import SHAPE, Clock, built
from kvgraph import Engine, SamplingParams
from kvgraph.runtime import outcome
from kvgraph.runtime.guide import Guide

PROMPT, STEPS, WARM = 64, 40, 4
GOAL = 0.03
MASKS, FORCED = "masks", "forced tokens"
RECORD = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 10, "maxLength": 60},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 40},
    },
    "required": ["title", "year", "tags"],
    "additionalProperties": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "free": {},
    "JSON of a schema": {"guided_json": RECORD},
    "any JSON object": {"guided_json": True},
    "words": {"guided_regex": "([a-z]{1,12} ){200}"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", nargs="?", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if (folder := args.artifact) is None:
            tokenizer = stack.enter_context(trained())
            folder = stack.enter_context(built(tokenizer=tokenizer))
        with Engine(folder, max_batch_size=args.batch) as engine:
            rows = {name: measure(engine, args.batch, more) for name, more in SETTINGS.items()}
    print(json.dumps(rows, indent=2) if args.json else f"{__doc__.strip()}\n\n{table(rows)}")


@contextlib.contextmanager
def trained() -> Iterator[Path]:
    """A tokenizer of SHAPE's vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sources], trainer)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokenizer.json"
        tokenizer.save(str(path))
        yield path


def measure(engine: Engine, batch: int, more: dict[str, Any]) -> dict[str, float]:
    """Median microseconds of a step and of what guides add to it; and tokens of a step."""
    rng = np.random.default_rng(0)
    known = min(engine.model.vocab_size, 2000)
    prompts = [rng.integers(3, known, PROMPT).tolist() for _ in range(batch)]
    params = SamplingParams(max_new_tokens=8 * STEPS, temperature=1, ignore_eos=not more, **more)
    ids = {engine.submit(prompt, params) for prompt in prompts}
    steps: list[dict[str, float]] = []
    tokens: list[kvgraph.Token] = []
    while len(steps) < WARM + STEPS:
        if engine.scheduler.waiting or not steps:
            tokens += engine.step()  # prompts
        generated, parts = timed_step(engine)
        tokens += generated
        steps.append(parts | {"tokens": len(generated)})
    require_whole(engine, tokens, params)
    for request_id in ids - {token.request_id for token in tokens if token.finish_reason}:
        engine.cancel(request_id)
    return {name: statistics.median(step[name] for step in steps[WARM:]) for name in steps[0]}


def timed_step(engine: Engine) -> tuple[list[kvgraph.Token], dict[str, float]]:
    clock = Clock()
    masks, advance = outcome.set_masks, Guide.advance
    places: list[tuple[Any, str, str, Callable[..., Any]]] = [
        (outcome, "set_masks", MASKS, masks),
        (Guide, "advance", FORCED, advance),
    ]
    for owner, name, part, call in places:
        setattr(owner, name, clock.timed(part, call, perf_counter))
    try:
        start = perf_counter()
        generated = engine.step()
        whole = perf_counter() - start
    finally:
        for owner, name, _, call in places:
            setattr(owner, name, call)
    parts = {MASKS: clock.seconds[MASKS], FORCED: clock.seconds[FORCED], "step": whole}
    return generated, {name: seconds * 1e6 for name, seconds in parts.items()}


def require_whole(engine: Engine, tokens: list[kvgraph.Token], params: SamplingParams) -> None:
    """Each text follows its grammar; one that ended with "stop" is complete."""
    if params.grammar is None:
        return
    guides = engine._builder.guides
    for request_id in {token.request_id for token in tokens}:
        matcher = guides._compiled[params.grammar].deep_copy()
        mine = [token for token in tokens if token.request_id == request_id]
        ids = [token.token_id for token in mine if token.token_id not in engine.model.eos_token_ids]
        assert matcher.consume_tokens(ids), matcher.get_error()
        assert mine[-1].finish_reason != "stop" or matcher.is_accepting()


def table(rows: dict[str, dict[str, float]]) -> str:
    free = rows["free"]["step"]
    lines = [f"{'':18}{MASKS:>10}{FORCED:>15}{'share':>8}{'step':>11}{'tokens':>8}"]
    for name, row in rows.items():
        share = (row[MASKS] + row[FORCED]) / free
        verdict = "" if share <= GOAL else "  above the goal"
        times = f"{row[MASKS]:7.0f} us{row[FORCED]:12.0f} us{share:8.2%}{row['step']:8.0f} us"
        lines.append(f"{name:18}{times}{row['tokens']:8.0f}{verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
