"""The command `kvgraph generate`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvgraph.cli.console import print_json, stderr
from kvgraph.cli.options import (
    ArtifactFolder,
    Json,
    MaxNewTokens,
    NumPages,
    Seed,
    SessionName,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verify,
)
from kvgraph.contract.plain import to_plain


def generate(
    artifact: ArtifactFolder,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this; may be given 16 times.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end.")] = False,
    session: SessionName = None,
    num_pages: NumPages = None,
    prefix: Annotated[
        Path | None, typer.Option(help="File of kvgraph prefill; PROMPT continues its text.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Keep pages in host memory too, such as 4GiB.")
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(help="Folder that keeps pages from run to run, for one user.")
    ] = None,
    disk_bytes: Annotated[str, typer.Option(help="Size limit of --disk.")] = "16GiB",
    remote: Annotated[
        str | None, typer.Option(help="Server that keeps pages for many machines: redis://...")
    ] = None,
    threads: Threads = None,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Continue a prompt; the text streams to stdout."""
    from kvgraph.runtime.artifact import load
    from kvgraph.runtime.engine import Engine
    from kvgraph.runtime.prefix_file import read_prefix
    from kvgraph.runtime.sampling import SamplingParams

    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    with stderr.status("loading the artifact"):
        bound = read_prefix(prefix) if prefix else None
        engine = Engine(
            load(artifact, verify=verify or None),
            session=session,
            num_pages=num_pages,
            max_batch_size=1,
            num_threads=threads,
            host_memory=host_memory or 0,
            disk=disk,
            disk_bytes=disk_bytes,
            remote=remote,
            prefixes=[bound] if bound else [],
        )
    asked: str | list[int] = prompt
    if bound is not None:
        asked = bound.tokens + engine.tokenize(prompt, special_tokens=False)
    start = time.perf_counter()
    if json:
        print_json(to_plain(engine.generate([asked], sampling)[0]))
    else:
        for piece in engine.stream(asked, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        seconds = time.perf_counter() - start
        count = engine.generated_tokens
        stderr.print(f"{count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s)")
    with stderr.status("storing pages"):
        engine.close()
