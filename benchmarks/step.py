"""The step outside the model: `python -m benchmarks.step [ARTIFACT] [--batch 64] [--json]`.

Method: one process and one engine on ARTIFACT (default: a Llama of 246M parameters in float32 with
random weights, compiled here), `batch` requests in decode, garbage collector off. Each part of
`Engine.step` is timed where the engine calls it; medians over the steps. The model's own step is
run, and its logits are then replaced by ones like a trained model's (normal, and a hundred likely
tokens), since random weights give a flat distribution that no sampler meets; their vocabulary is
the model's, then 128,256. The model's time is the wall's, all else is processor time of the
engine's thread, which neighbours on the machine disturb less. Shares are of the whole step. The
goal: all that is not the model stays below 3 %.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np

import kvgraph
from kvgraph.runtime import outcome
from kvgraph.runtime.scheduler import Batch

PROMPT, STEPS, WARM = 64, 24, 4
WIDE_VOCAB = 128_256
LIKELY = 100
GOAL = 0.03
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-k 50, top-p 0.95": {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 1},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95, "seed": 1},
    "temperature 0.7": {"temperature": 0.7, "seed": 1},
}
SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
TOKENIZER = Path(__file__).parents[1] / "examples" / "tiny-llama" / "tokenizer.json"
MODEL, IN_MODEL = "model", "the engine's thread in the model"
PARTS = (MODEL, "schedule", "cache inputs", "sample", "requests grow", "commit pages", "detokenise")


class Clock:
    """Seconds of one step by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(
        self, part: str, call: Callable[..., Any], now: Callable[[], float] = thread_time
    ) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += now() - start

        return wrapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", nargs="?", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.artifact or stack.enter_context(built())
        rows = dict(measure_all(folder, args.batch))
    print(json.dumps(rows, indent=2) if args.json else f"{__doc__.strip()}\n\n{table(rows)}")


@contextlib.contextmanager
def built(weights: str | None = None, *, tokenizer: Path = TOKENIZER) -> Iterator[Path]:
    """An artifact of SHAPE: 1 GB of disk while it is needed, twice that while it is compiled."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        checkpoint, out = Path(name) / "checkpoint", Path(name) / "artifact"
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(checkpoint)
        shutil.copyfile(tokenizer, checkpoint / "tokenizer.json")
        kvgraph.compile(checkpoint, out, weights=weights)
        shutil.rmtree(checkpoint)
        yield out


def measure_all(folder: Path, batch: int) -> Iterator[tuple[str, dict[str, float]]]:
    """(vocabulary and setting, median microseconds of each part, and of the whole step)."""
    artifact = kvgraph.load(folder)
    session = artifact.session()
    for vocab in dict.fromkeys((artifact.manifest.model.vocab_size, WIDE_VOCAB)):
        for name, sampling in SETTINGS.items():
            figures = measure(artifact, session, batch, vocab, sampling)
            yield f"{name}, vocabulary {vocab:,}", figures


def measure(
    artifact: Any, session: Any, batch: int, vocab: int, sampling: dict[str, Any]
) -> dict[str, float]:
    engine = kvgraph.Engine(artifact, session=session, max_batch_size=batch)
    without_touch(engine)  # it would move time of the model out of it
    params = kvgraph.SamplingParams(max_new_tokens=STEPS + WARM + 8, ignore_eos=True, **sampling)
    rng = np.random.default_rng(0)
    tokenizer = engine._text.tokenizer
    known = tokenizer.get_vocab_size() if tokenizer else engine.model.vocab_size
    prompts = [rng.integers(3, known, PROMPT).tolist() for _ in range(batch)]
    ids = {engine.submit(prompt, params) for prompt in prompts}
    while engine.scheduler.waiting or any(
        row.context.active_length > 1 for row in engine.scheduler.running
    ):
        engine.step()
    logits = [trained_like(rng, batch, vocab, known) for _ in range(2)]
    steps = [_step(engine, logits[i % 2], ids) for i in range(STEPS + WARM)][WARM:]
    for request_id in ids:
        engine.cancel(request_id)
    return {part: statistics.median(step[part] for step in steps) * 1e6 for part in steps[0]}


def without_touch(engine: kvgraph.Engine) -> None:
    """Switch off the touch ahead of time: the kernels touch the memory of new pages."""
    for replica in engine.kv._replicas:  # type: ignore[attr-defined]
        for leaf in replica.leaves:
            for shard in leaf.shards:
                shard.first_touch = None


def _step(engine: Any, logits: Any, ids: set[str]) -> dict[str, float]:
    """One step of the engine, its parts timed; "outside" is all but the model."""
    clock = Clock()
    wall = clock.timed(MODEL, engine.session.run, perf_counter)
    run = clock.timed(IN_MODEL, wall)

    def model(*args: Any, **kwargs: Any) -> Any:
        run(*args, **kwargs)
        return logits

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (engine.session, "run", model),
        (engine.scheduler, "schedule", clock.timed("schedule", engine.scheduler.schedule)),
        (engine.scheduler, "retire", clock.timed("schedule", engine.scheduler.retire)),
        (engine.kv, "runtime_inputs", clock.timed("cache inputs", engine.kv.runtime_inputs)),
        (engine.kv, "step", clock.timed("commit pages", engine.kv.step)),
        (outcome, "tokens_with_text", clock.timed("detokenise", outcome.tokens_with_text)),
        (outcome, "sample", clock.timed("sample", outcome.sample)),
        (Batch, "update", clock.timed("requests grow", Batch.update)),
    ]
    kept = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in places]
    for owner, name, call in places:
        setattr(owner, name, call)
    gc.disable()
    try:
        start = thread_time()
        generated = engine.step()
        outside = thread_time() - start - clock.seconds[IN_MODEL]
    finally:
        gc.enable()
        for owner, name, before in kept:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
    assert len(generated) == len(ids), "every request decodes at every step"
    parts = {part: clock.seconds[part] for part in PARTS}
    rest = outside - sum(parts.values()) + parts[MODEL]
    return parts | {"rest": rest, "outside": outside, "whole step": parts[MODEL] + outside}


def trained_like(rng: np.random.Generator, rows: int, vocab: int, known: int) -> Any:
    """Logits `[rows, vocab]` whose likely tokens the tokenizer knows."""
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    for row in logits:
        row[rng.integers(3, known, LIKELY)] += rng.exponential(4, LIKELY).astype(np.float32) + 6
    return logits


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = []
    for name, parts in rows.items():
        whole = parts["whole step"]
        verdict = "below" if parts["outside"] / whole < GOAL else "above"
        lines += [f"{name} ({verdict} the goal)"]
        lines += [f"  {part:14} {us:10.0f} us  {us / whole:7.2%}" for part, us in parts.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
