"""Artifacts for a GPU that is elsewhere: compiled here, run there, judged here.

    python -m tests.support.carried make FOLDER [--arch sm_90]
    python -m tests.support.carried run FOLDER RESULTS.json     # where the GPU is; no Triton there
    python -m tests.support.carried judge FOLDER RESULTS.json

`run` generates tokens in several ways of an engine: with CUDA graphs and without, with so few pages
that requests are preempted, over prefixes in the cache, with tiers below it, and in steps of so
many rows that small weights are expanded. In float32 all must be transformers' tokens. In halves
`judge` asks that each token is one that the model in float32 finds best, or within the dtype's
rounding of the best: the usual one, or what it makes of this model in transformers, where rounding
chooses other experts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvgraph import Engine, SamplingParams, TierConfig
from kvgraph.contract.dtypes import WEIGHT_BITS
from kvgraph.runtime.sessions.expanded import CONVERTED_ROWS
from tests.support.models import EXPERTS, LATENT, make_model

PAGE, NEW = 16, 24
LENGTHS = (1, 7, 37, 16, 90, 33)
MANY = (180, 190, 170)
"""Prompts of one step, more rows than `CONVERTED_ROWS`."""
HALVES = ("float16", "bfloat16")
ALL = ("float32", *HALVES)
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@dataclass(frozen=True)
class Carried:
    """A model, and how it is compiled; `form`: of the checkpoint's weights in fewer bits."""

    model: str
    dtypes: tuple[str, ...] = ALL
    weights: str | None = None
    form: str | None = None
    cache_dtype: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        cache = self.cache_dtype and f"{self.cache_dtype}-cache"
        return "-".join(filter(None, (self.model, self.weights, self.form, cache)))


CARRIED = (
    Carried("tiny-llama"),
    Carried("gemma2"),
    Carried("qwen3"),
    Carried("gpt_oss"),
    Carried("deepseek_v3", ("float32", "bfloat16"), settings=LATENT | EXPERTS | {"head_dim": 16}),
    Carried("qwen3_moe", settings=MIXTURE),
    Carried("llama", ("float32", "bfloat16"), weights="int8"),
    Carried("llama", ("float32", "float16", "bfloat16"), weights="int4"),
    Carried("qwen3_moe", ("float32", "bfloat16"), weights="int8", settings=MIXTURE),
    Carried("qwen3_moe", ("float32", "bfloat16"), weights="int4", settings=MIXTURE),
    Carried("llama", ("float32", "bfloat16"), form="w4a16-zero-points"),
    Carried("llama", ("float32", "bfloat16"), form="fp8"),
    Carried("llama", HALVES, form="fp8-dynamic"),  # inputs are rounded too, as in the next two
    Carried("qwen2", ("bfloat16",), form="fp8-blocks", settings=WIDE),
    Carried("llama", HALVES, form="w8a8-dynamic"),
    Carried("llama", ("bfloat16",), form="nvfp4"),  # rounded once more: kernels have no such groups
    Carried("gpt_oss", ("float32", "bfloat16"), form="mxfp4"),
    Carried("llama", ("bfloat16",), cache_dtype="float8_e4m3fn"),
    Carried("llama", ("bfloat16",), cache_dtype="int8"),
)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, 150, length).tolist() for length in lengths]


def prompts_of(way: str) -> list[list[int]]:
    return prompts(MANY if way == "many rows" else LENGTHS)


# ---- here, before ------------------------------------------------------------------------------


def make(folder: Path, arch: str) -> None:
    import kvgraph

    for carried in CARRIED:
        stored, meant = checkpoints(carried, folder / "models")
        for dtype in carried.dtypes:
            out = folder / "artifacts" / f"{carried.name}-{dtype}"
            if out.exists():
                continue
            kvgraph.compile(
                stored,
                out,
                target=f"cuda:{arch}",
                dtype=dtype,
                page_size=PAGE,
                weights=carried.weights,
                cache_dtype=carried.cache_dtype,
                check=False,
            )
            print(out.name, flush=True)
        expected = folder / "expected" / f"{carried.name}.json"
        expected.parent.mkdir(exist_ok=True)
        if not expected.exists():
            expected.write_text(json.dumps(eager(meant)))


def checkpoints(carried: Carried, folder: Path) -> tuple[Path, Path]:
    """What is compiled, and the plain checkpoint that it stands for."""
    from tests.support import quantized

    folder.mkdir(parents=True, exist_ok=True)
    if carried.model == "tiny-llama":
        plain = Path(__file__).parents[2] / "examples" / "tiny-llama"
        meant = folder / "tiny-llama"
        if not meant.exists():
            meant.symlink_to(plain)
        return plain, meant
    plain = folder / carried.model
    if not plain.exists():
        make_model(carried.model, plain, **carried.settings)
    if carried.form:
        stored, meant = folder / f"{carried.name}-stored", folder / carried.name
        if not stored.exists():
            quantized.make(carried.form, plain, stored, meant)
        return stored, meant
    if carried.weights:
        meant = folder / carried.name
        if not meant.exists():
            rounded(plain, WEIGHT_BITS[carried.weights], meant)
        return plain, meant
    return plain, plain


def rounded(plain: Path, bits: int, out: Path) -> None:
    from tests.support.small_weights import round_weights

    model = load(plain)
    round_weights(model, bits)
    model.save_pretrained(out)


def load(folder: Path, dtype: str = "float32") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def eager(folder: Path) -> list[list[int]]:
    from tests.support.models import greedy_tokens

    model = load(folder)
    return [greedy_tokens(model, prompt, NEW) for prompt in [*prompts(), *prompts(MANY)]]


# ---- where the GPU is --------------------------------------------------------------------------


def ways(artifact: Path) -> Iterator[tuple[str, Callable[[], list[list[int]]]]]:
    """By name, what generates the tokens of `prompts_of` it."""
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)

    def engine(**options: Any) -> Engine:
        return Engine(artifact, **{"num_pages": 96, "max_batch_size": 6, **options})

    def answers(engine: Engine) -> list[list[int]]:
        return [done.token_ids for done in engine.generate(prompts(), sampling)]

    def cached_again(engine: Engine, first: list[list[int]]) -> list[list[int]]:
        second = list(engine.generate(prompts(), sampling))
        assert sum(done.cached_tokens for done in second) > 0, "expected cached tokens"
        assert first == [done.token_ids for done in second], "expected the same tokens again"
        return first

    yield "graphs", lambda: answers(engine())
    yield "chunks", lambda: answers(engine(max_batch_tokens=24, max_prefill_tokens=24))

    def without_graphs() -> list[list[int]]:
        from kvgraph.runtime.artifact import load as open_artifact

        session = open_artifact(artifact).session()
        session.captures = False
        return answers(engine(session=session))

    yield "no graphs", without_graphs

    def preempted() -> list[list[int]]:
        few = engine(num_pages=12)
        found = answers(few)
        assert few.stats().num_preemptions, "expected preemptions"
        return found

    yield "preempted", preempted

    def twice() -> list[list[int]]:
        one = engine()
        return cached_again(one, answers(one))

    yield "prefixes", twice

    def tiers() -> list[list[int]]:
        tiered = engine(num_pages=16, tiers=TierConfig(host_memory="64MiB"))
        first = answers(tiered)
        random = np.random.default_rng(1)
        others = [random.integers(3, 150, 100).tolist() for _ in range(6)]
        list(tiered.generate(others, sampling))  # the first ones' pages go to the host
        return cached_again(tiered, first)

    yield "tiers", tiers

    def many_rows() -> list[list[int]]:
        assert sum(MANY) > CONVERTED_ROWS
        wide = engine(max_batch_tokens=640, max_prefill_tokens=640)
        return [done.token_ids for done in wide.generate(prompts(MANY), sampling)]

    yield "many rows", many_rows


def run(folder: Path, results: Path, part: tuple[int, int]) -> int:
    found: dict[str, Any] = {}
    failed = 0
    for carried in CARRIED[part[0] :: part[1]]:
        expected = json.loads((folder / "expected" / f"{carried.name}.json").read_text())
        for dtype in carried.dtypes:
            name = f"{carried.name}-{dtype}"
            for way, generate in ways(folder / "artifacts" / name):
                start, said = time.perf_counter(), "ok"
                try:
                    tokens = generate()
                    found[f"{name}/{way}"] = tokens
                    own = (
                        expected[len(LENGTHS) :] if way == "many rows" else expected[: len(LENGTHS)]
                    )
                    if dtype == "float32" and tokens != own:
                        at = [a == b for a, b in zip(tokens, own, strict=True)]
                        said = f"FAILED tokens of prompts {at} are transformers'"
                except Exception as error:
                    said = f"FAILED {type(error).__name__}: {error}"
                    if way == "graphs":
                        traceback.print_exc()
                failed += said != "ok"
                print(f"{said} {name} {way} {time.perf_counter() - start:.1f} s", flush=True)
                results.write_text(json.dumps(found))
    print(f"{failed} failed")
    return int(failed > 0)


# ---- here, after -------------------------------------------------------------------------------


def judge(folder: Path, results: Path) -> int:
    from kvgraph.compiler.check.compare import ROUNDED

    found = json.loads(results.read_text())
    failed = 0
    for carried in CARRIED:
        meant = checkpoints(carried, folder / "models")[1]
        for dtype in carried.dtypes:
            if dtype == "float32":
                continue
            usual = ROUNDED[carried.cache_dtype or dtype].error
            model, rounded_model = load(meant), load(meant, dtype)
            for name, tokens in found.items():
                if name.split("/")[0] != f"{carried.name}-{dtype}":
                    continue
                given = prompts_of(name.partition("/")[2])
                behind, own = rounding(model, rounded_model, given, tokens)
                said = "ok" if behind <= max(usual, own) else "FAILED"
                failed += said != "ok"
                print(f"{said} {name}: {behind:.1e} behind the best, of {max(usual, own):.1e}")
    print(f"{failed} failed of {len(found)}")
    return int(failed > 0)


def rounding(
    model: Any, rounded_model: Any, prompts: list[list[int]], found: list[list[int]]
) -> tuple[float, float]:
    """How far the tokens found are behind the best of `model`, and logits of `rounded_model` from
    those of `model`, as shares of its largest logits."""
    import torch

    behind = own = 0.0
    for prompt, new in zip(prompts, found, strict=True):
        tokens, first = torch.tensor([[*prompt, *new]]), len(prompt) - 1
        with torch.no_grad():
            logits, others = (m(tokens).logits[0, first:-1].float() for m in (model, rounded_model))
        chosen = logits.gather(1, tokens[0, first + 1 :, None])[:, 0]
        largest = logits.abs().max(1).values
        behind = max(behind, float(((logits.max(1).values - chosen) / largest).max()))
        own = max(own, float(((others - logits).abs().max(1).values / largest).max()))
    return behind, own


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("do", choices=("make", "run", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="?", default=Path("results.json"))
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--part", default="0/1", help="which of how many processes")
    given = parser.parse_args()
    if given.do == "make":
        make(given.folder, given.arch)
        return 0
    if given.do == "judge":
        return judge(given.folder, given.results)
    first, count = map(int, given.part.split("/"))
    return run(given.folder, given.results, (first, count))


if __name__ == "__main__":
    sys.exit(main())
