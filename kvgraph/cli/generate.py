"""The command `kvgraph generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgraph.bars import Bars
from kvgraph.cli.console import print_json, stderr, working
from kvgraph.cli.options import (
    ArtifactFolder,
    CollectiveTimeout,
    DiskBytes,
    DiskFolder,
    HostMemory,
    Json,
    MaxNewTokens,
    NumPages,
    RemoteServer,
    RepetitionPenalty,
    Seed,
    SessionName,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verify,
    named,
    text_of,
)
from kvgraph.cli.ranks import follows
from kvgraph.contract.plain import to_plain
from kvgraph.errors import GenerationError
from kvgraph.plural import plural
from kvgraph.progress import task

if TYPE_CHECKING:
    from kvgraph.runtime.engine import Engine
    from kvgraph.runtime.sampling import Token
    from kvgraph.runtime.sampling_params import SamplingParams


def generate(
    artifact: ArtifactFolder,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this; may be given 16 times.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ignore end tokens.")] = False,
    session: SessionName = None,
    num_pages: NumPages = None,
    prefix: Annotated[
        Path | None,
        typer.Option(
            metavar="<path>",
            parser=named,
            help="File of kvgraph prefill; PROMPT's tokens follow its own. End the prefix at the "
            "end of a word, and begin PROMPT with a space.",
        ),
    ] = None,
    host_memory: HostMemory = None,
    disk: DiskFolder = None,
    disk_bytes: DiskBytes = None,
    remote: RemoteServer = None,
    threads: Threads = None,
    collective_timeout: CollectiveTimeout = None,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Continue a prompt; the text streams to stdout."""
    from kvgraph.runtime.artifact import load
    from kvgraph.runtime.engine import Engine
    from kvgraph.runtime.prefix_file import read_prefix
    from kvgraph.runtime.sampling import SamplingParams

    prompt = text_of("prompt", prompt)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=[text_of("--stop", one) for one in stop or ()],
        ignore_eos=ignore_eos,
    )
    with working("loading the artifact"):
        bound = read_prefix(prefix) if prefix else None
        loaded = load(artifact, verify=verify or None)
    if follows(loaded, session, threads, collective_timeout):
        return
    with working("opening the session"):
        engine = Engine(
            loaded,
            session=loaded.session(
                session, num_threads=threads, collective_timeout=collective_timeout
            ),
            num_pages=num_pages,
            max_batch_size=1,
            host_memory=0 if host_memory is None else host_memory,
            disk=disk,
            disk_bytes=disk_bytes,
            remote=remote,
            prefixes=[bound] if bound else [],
        )
    asked: str | list[int] = prompt
    if bound is not None:
        asked = bound.tokens + engine.tokenize(prompt, special_tokens=False)
    if json:
        with Bars(stderr):
            done = engine.generate([asked], sampling)[0]
        print_json(to_plain(done))
        if done.error:
            raise GenerationError(done.error)
    else:
        _write(engine, asked, sampling)
    with working("storing pages"):
        engine.close()


def _write(engine: Engine, prompt: str | list[int], sampling: SamplingParams) -> None:
    """Write text as it comes; then print the speed of prompt and generation on stderr."""
    times = [time.perf_counter()]
    engine.submit(prompt, sampling)
    length = len(engine.tokenize(prompt) if isinstance(prompt, str) else prompt)
    for token in _tokens(engine, length):
        times.append(time.perf_counter())
        sys.stdout.write(token.text)
        sys.stdout.flush()
        if token.error:
            raise GenerationError(token.error)
    sys.stdout.write("\n")
    sys.stdout.flush()
    cached, first = engine.stats().cached_tokens, times[1] - times[0]
    stderr.print(
        f"prompt: {length} {plural('token', length)}, {cached} cached, {first:.2f} s "
        f"({(length - cached) / first:.1f} tokens/s)",
        highlight=False,
    )
    count, seconds = len(times) - 1, times[-1] - times[1]
    rate = f" ({(count - 1) / seconds:.1f} tokens/s)" if count > 1 else ""
    tokens = plural("token", count)
    stderr.print(f"generated: {count} {tokens}, {seconds:.2f} s{rate}", highlight=False)


def _tokens(engine: Engine, prompt_length: int) -> Iterator[Token]:
    """Yield tokens as they come; until the first, show the prompt's progress on stderr."""
    came: list[Token] = []
    with Bars(stderr), task("prompt", prompt_length, "tokens") as advance:
        done = 0
        while engine.busy and not came:
            came = engine.step()
            before, done = done, sum(r.context.processed_length for r in engine.scheduler.running)
            advance(done - before)
    yield from came
    while engine.busy:
        yield from engine.step()
