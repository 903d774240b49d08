"""The server and its engine: `python -m benchmarks.serve [ARTIFACT] [--part PART ...] [--json]`.

With `--vllm PYTHON`, an interpreter that has vLLM for CPUs: its server beside ours in `streams`,
`first` and `load`, of a model of the same shape in bfloat16, asked by the same client in the same
run.

Method: the server is a process of its own, the client another one on the same machine (uvloop over
plain sockets, frames are read after the end: it costs less than an HTTP library); the artifact is a
Llama of 246M parameters in int8 with random weights, compiled here where none is given. Prompts are
random tokens, so that no prefix is shared; tokens are counted by `usage`. Parts:

  streams   32 streams of 128 tokens behind prompts of 64, against `Engine.generate` of the same in
            a process without a server, and a server with --stream-interval 4; turn by turn, medians
  first     time to the first token of one request at an idle server, less `Engine.stream`'s own
  load      requests with prompts of 64 to 512 tokens, 128 new, that arrive at random (Poisson) at
            80 % of what the engine alone completes of them: time between two tokens of a stream,
            median and 99th percentile
  overload  32 streams run; for --seconds, in 4 turns with pauses between them, four times as many
            requests as fit arrive: time to an answer of 429, and the streams' 99th percentile
            meanwhile and in the pauses. Turns, since a step takes longer the longer its contexts
  restart   a server that is killed (SIGKILL) in the middle of 32 streams, and started again: time
            from its start until /ready answers 200, median of 5
  soak      --requests requests over tiny-llama, 64 at a time, of which 30 % are left at a random
            moment: pages that did not come back, resident memory after a tenth and at the end

Reference: with `streams` and `soak`, every answer's text is what the engine gives for its prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import operator
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import kvgraph
from benchmarks.serve_client import (
    NEW,
    Answer,
    arriving,
    ask,
    resident,
    run,
    seconds_to_ready,
    server,
    together,
)
from benchmarks.serve_peers import free_port, vllm_server, words_of_vocabulary
from benchmarks.start import TINY_LLAMA
from benchmarks.step import SHAPE, built

STREAMS, PROMPT, INTERVAL = 32, 64, 4
PARTS = ("streams", "first", "load", "overload", "restart", "soak")
LONG_PROMPTS = (64, 512)
TURNS, START_SECONDS, STREAMED = 4, 5, 3072
"""Of `overload`: turns, the seconds in which the streams' prompts run, tokens of a stream."""

RESTARTS = 5
BLOCKS, BLOCK = 5, 9
"""Of `first`: blocks of a repeat, requests of a block; the first two are not counted."""

VOCAB: int = SHAPE["vocab_size"]

ENGINE = """
import json, sys, time
import kvgraph
job = json.loads(sys.stdin.readline())
engine = kvgraph.Engine(job["artifact"], max_batch_size=64)
params = kvgraph.SamplingParams(max_new_tokens=job["new"], ignore_eos=True)
engine.generate([[5, 6, 7]], params)
print("ready", flush=True)
for line in sys.stdin:
    prompts = json.loads(line)
    start = time.perf_counter()
    if len(prompts) == 1:
        next(engine.stream(prompts[0], params))
        found = [time.perf_counter() - start, []]
    else:
        done = engine.generate(prompts, params)
        found = [time.perf_counter() - start, [each.text for each in done]]
    print(json.dumps(found), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", nargs="?", type=Path)
    parser.add_argument("--part", action="append", choices=PARTS, help="[default: all]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="of load and of overload")
    parser.add_argument("--requests", type=int, default=10_000, help="of soak")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure its vLLM server too")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        parts = args.part or PARTS
        figures = {}
        if set(parts) - {"soak"}:
            artifact = args.artifact or stack.enter_context(served_shape())
            figures = measure(artifact, parts, args.repeats, args.seconds)
        if args.vllm:
            figures["vLLM, bfloat16"] = measure_vllm(args.vllm, parts, args.repeats, args.seconds)
        if "soak" in parts:
            tiny = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny.kvg"
            kvgraph.compile(TINY_LLAMA, tiny, page_size=16)
            figures["soak"] = soak(tiny, random.Random(0), args.requests)
    print(json.dumps(figures, indent=2) if args.json else f"{__doc__.strip()}\n\n{table(figures)}")


@contextlib.contextmanager
def served_shape() -> Iterator[Path]:
    """Every token of the model's vocabulary is a word: each has a text, whatever is generated."""
    with tempfile.TemporaryDirectory() as name:
        words_of_vocabulary(VOCAB).save(str(Path(name) / "tokenizer.json"))
        with built("int8", tokenizer=Path(name) / "tokenizer.json") as artifact:
            yield artifact


def measure(
    artifact: Path, parts: Sequence[str], repeats: int, seconds: float
) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    rng = random.Random(0)
    if "streams" in parts or "overload" in parts:
        figures["streams"] = streams(artifact, rng, repeats)
    if "first" in parts:
        figures["first"] = first(artifact, rng, repeats)
    if "load" in parts:
        figures["load"] = load(artifact, rng, seconds)
    if "restart" in parts:
        port, prompts = free_port(), prompts_of(rng, STREAMS)
        times = [seconds_to_ready(artifact, port, prompts) for _ in range(RESTARTS + 1)]
        figures["restart"] = {"until ready, s": statistics.median(times[1:])}
    if "overload" in parts:
        rate = 4 * figures["streams"]["server tokens/s"] / NEW
        figures["overload"] = overload(artifact, rng, rate, seconds)
    return figures


def streams(artifact: Path, rng: random.Random, repeats: int) -> dict[str, float]:
    own: list[float] = []
    served: dict[str, list[float]] = {"server": [], f"server, frames of {INTERVAL}": []}
    equal = 0
    with (
        engine(artifact) as ask,
        server(artifact) as (each, _),
        server(artifact, "--stream-interval", str(INTERVAL)) as (fewer, _),
    ):
        for port in (each, fewer):
            run(together(port, prompts_of(rng, 2), NEW))
        for _ in range(repeats):
            prompts = prompts_of(rng, STREAMS)
            seconds, texts = ask(prompts)
            own.append(STREAMS * NEW / seconds)
            for port, rates in zip((each, fewer), served.values(), strict=True):
                rate, answers = together_timed(port, prompts)
                rates.append(rate)
                equal += sum(a.text == text for a, text in zip(answers, texts, strict=True))
    figures = {"engine tokens/s": statistics.median(own)}
    for name, rates in served.items():
        figures[f"{name} tokens/s"] = statistics.median(rates)
        figures[f"{name}, share"] = statistics.median(
            b / a for a, b in zip(own, rates, strict=True)
        )
    return figures | {"answers equal to the engine's": equal / (2 * repeats * STREAMS)}


def together_timed(port: int, prompts: list[list[int]]) -> tuple[float, list[Answer]]:
    """Generated tokens a second, by `usage`, and the answers."""
    start = time.perf_counter()
    answers = run(together(port, prompts, NEW))
    seconds = time.perf_counter() - start
    return sum(a.usage["completion_tokens"] for a in answers) / seconds, answers


def first(artifact: Path, rng: random.Random, repeats: int) -> dict[str, float]:
    """In blocks: a request right behind one of the other process finds the caches cold.

    The processor's speed changes within seconds. So blocks are short, and `added ms` is the median
    of the differences between blocks that follow each other.
    """
    own, served = [], []
    with engine(artifact) as ask_engine, server(artifact) as (port, _):
        for _ in range(BLOCKS * repeats):
            prompts = [prompts_of(rng, 1) for _ in range(2 * BLOCK)]
            times = [ask_engine(prompt)[0] * 1e3 for prompt in prompts[:BLOCK]]
            own.append(statistics.median(times[2:]))
            answers = [run(together(port, prompt, 2))[0] for prompt in prompts[BLOCK:]]
            times = [(answer.news[0] - answer.sent) * 1e3 for answer in answers]
            served.append(statistics.median(times[2:]))
    return {
        "engine ms": statistics.median(own),
        "server ms": statistics.median(served),
        "added ms": statistics.median(map(operator.sub, served, own)),
    }


def load(artifact: Path, rng: random.Random, seconds: float) -> dict[str, float]:
    with engine(artifact) as ask_engine:
        many = [longer(rng) for _ in range(3 * STREAMS)]
        rate = 0.8 * len(many) / ask_engine(many)[0]
    with server(artifact) as (port, _):
        return loaded(port, rng, rate, seconds)


def loaded(port: int, rng: random.Random, rate: float, seconds: float) -> dict[str, float]:
    """Figures of a server at `rate` requests a second."""
    answers = run(arriving(port, rng, rate, seconds, longer))
    done = [answer for answer in answers if answer.usage]
    gaps = sorted(gap * 1e3 for answer in done for gap in answer.gaps)
    waits = sorted((answer.news[0] - answer.sent) * 1e3 for answer in done)
    return {
        "requests/s": rate,
        "answered": len(done) / len(answers),
        "between tokens, median ms": quantile(gaps, 0.5),
        "between tokens, 99th percentile ms": quantile(gaps, 0.99),
        "99th percentile / median": quantile(gaps, 0.99) / quantile(gaps, 0.5),
        "first token, median ms": quantile(waits, 0.5),
        "first token, 99th percentile ms": quantile(waits, 0.99),
    }


def overload(artifact: Path, rng: random.Random, rate: float, seconds: float) -> dict[str, float]:
    """The rows of the batch are full from the start: what runs is as large as it gets."""
    quiet: list[tuple[float, float]] = []

    async def streams_and_more(port: int) -> tuple[list[Answer], list[Answer]]:
        prompts = prompts_of(rng, STREAMS)
        running = [asyncio.ensure_future(ask(port, prompt, STREAMED)) for prompt in prompts]
        await asyncio.sleep(START_SECONDS)
        came = []
        for turn in range(TURNS + 1):
            begin = time.perf_counter()
            await asyncio.sleep(seconds / TURNS / 2)
            quiet.append((begin, time.perf_counter()))
            if turn < TURNS:
                came += await arriving(
                    port, rng, rate, seconds / TURNS, lambda rng: prompts_of(rng, 1)[0], wait=False
                )
        for each in running:
            each.cancel()
        return [answer for answer in await asyncio.gather(*running) if answer], came

    options = ["--max-queued-requests", "8", "--max-batch-size", str(STREAMS)]
    options += ["--cache-memory", "6GiB"]  # no stream is preempted
    with server(artifact, *options) as (port, _):
        kept, came = run(streams_and_more(port))
    refused = sorted((a.head - a.sent) * 1e3 for a in came if a.status == 429)
    apart, meanwhile = [], []
    for answer in kept:
        for at, gap in zip(answer.news[1:], answer.gaps, strict=True):
            if any(begin < at < end for begin, end in quiet):
                apart.append(gap * 1e3)
            elif quiet[0][1] < at < quiet[-1][0]:
                meanwhile.append(gap * 1e3)
    apart, meanwhile = sorted(apart), sorted(meanwhile)
    return {
        "requests/s": rate,
        "refused (429)": len(refused) / len(came),
        "429 after, median ms": quantile(refused, 0.5),
        "429 after, 99th percentile ms": quantile(refused, 0.99),
        "streams between, median ms": quantile(apart, 0.5),
        "streams meanwhile, median ms": quantile(meanwhile, 0.5),
        "streams between, 99th percentile ms": quantile(apart, 0.99),
        "streams meanwhile, 99th percentile ms": quantile(meanwhile, 0.99),
        "meanwhile / between": quantile(meanwhile, 0.99) / quantile(apart, 0.99),
    }


def soak(artifact: Path, rng: random.Random, count: int) -> dict[str, float]:
    """Prompts of 4 to 200 tokens of 100 kinds, so that many share pages."""
    kinds = [[rng.randrange(3, 900) for _ in range(rng.randint(4, 200))] for _ in range(100)]
    with engine(artifact, 32) as ask_engine:
        _, texts = ask_engine(kinds)

    async def one(port: int, turn: asyncio.Semaphore) -> bool | None:
        async with turn:
            kind = rng.randrange(len(kinds))
            asking = asyncio.ensure_future(ask(port, kinds[kind], 32))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0, 0.3))
                asking.cancel()
            answer = await asking
            return answer.text == texts[kind] if answer.usage else None

    async def all_of(port: int, count: int) -> list[bool | None]:
        turn = asyncio.Semaphore(64)
        return await asyncio.gather(*(one(port, turn) for _ in range(count)))

    # A pool that is short of pages: requests wait, and are preempted.
    with server(artifact, "--num-pages", "300") as (port, process):
        run(all_of(port, count // 10))
        begun = resident(process)
        answers = run(all_of(port, count))
        time.sleep(1)
        state = json.loads(urlopen(f"http://127.0.0.1:{port}/state").read())
        return {
            "answered": sum(answer is not None for answer in answers),
            "left": sum(answer is None for answer in answers),
            "answers unlike the engine's": sum(answer is False for answer in answers),
            "pages not back": state["num_pages"] - state["num_free_pages"],
            "resident after a tenth, MiB": begun,
            "resident at the end, MiB": resident(process),
        }


# -- another server


def measure_vllm(
    python: str, parts: Sequence[str], repeats: int, seconds: float
) -> dict[str, float]:
    """As `streams`, `first` and `load`; the last at 80 % of what this server completes."""
    figures: dict[str, float] = {}
    rng = random.Random(0)
    with vllm_server(python) as port:
        run(together(port, prompts_of(rng, STREAMS), NEW))
        if "streams" in parts:
            rates = [together_timed(port, prompts_of(rng, STREAMS))[0] for _ in range(repeats)]
            figures["server tokens/s"] = statistics.median(rates)
        if "first" in parts:
            answers = [run(together(port, prompts_of(rng, 1), 2))[0] for _ in range(22)]
            waits = [(answer.news[0] - answer.sent) * 1e3 for answer in answers[2:]]
            figures["server ms"] = statistics.median(waits)
        if "load" in parts:
            start = time.perf_counter()
            run(together(port, [longer(rng) for _ in range(3 * STREAMS)], NEW))
            rate = 0.8 * 3 * STREAMS / (time.perf_counter() - start)
            figures |= loaded(port, rng, rate, seconds)
    return figures


# -- the engine alone, and prompts


@contextlib.contextmanager
def engine(artifact: Path, new: int = NEW) -> Iterator[Any]:
    """Asks an engine in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"artifact": str(artifact), "new": new}) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"

    def ask_engine(prompts: list[list[int]]) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(prompts) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    try:
        yield ask_engine
    finally:
        process.stdin.close()
        process.wait(30)


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(count)]


def longer(rng: random.Random) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(*LONG_PROMPTS))]


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def table(figures: dict[str, dict[str, float]]) -> str:
    lines = []
    for part, rows in figures.items():
        lines += [part, *(f"  {name:40} {value:10.3f}" for name, value in rows.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
