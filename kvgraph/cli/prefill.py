"""The command `kvgraph prefill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgraph.cli.console import print_json, stdout, terminable, working
from kvgraph.cli.options import ArtifactFolder, Json, NumPages, Threads, Verify, named, require_file
from kvgraph.cli.ranks import follows
from kvgraph.contract.sizes import size_text
from kvgraph.errors import RequestError
from kvgraph.plural import plural


def prefill(
    artifact: ArtifactFolder,
    prompt_file: Annotated[
        Path,
        typer.Option(metavar="<path>", parser=named, help="Text file to compute ahead of time."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="<path>", parser=named, help="File to write: NAME.kvp."
        ),
    ],
    num_pages: NumPages = None,
    threads: Threads = None,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Compute a fixed prefix, such as a system prompt, for `generate --prefix`."""
    from kvgraph.runtime.artifact import load
    from kvgraph.runtime.engine import Engine
    from kvgraph.runtime.prefix import write_prefix

    require_file("--prompt-file", prompt_file)
    try:
        text = prompt_file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{prompt_file}: expected text in UTF-8, got {error}") from error
    with working("loading the artifact"):
        loaded = load(artifact, verify=verify or None)
    if follows(loaded, None, threads, None):
        return
    with working("opening the session"):
        engine = Engine(loaded, num_pages=num_pages, max_batch_size=1, num_threads=threads)
    with terminable(), working("computing the prefix"):
        written = write_prefix(engine, text, output)
    figures = {
        "prefix": str(output),
        "tokens": len(written.tokens),
        "pages": len(written.pages),
        "bytes": written.nbytes,
    }
    if json:
        print_json(figures)
        return
    tokens, pages = len(written.tokens), len(written.pages)
    stdout.print(
        f"{output}: {tokens} {plural('token', tokens)}, {pages} {plural('page', pages)}, "
        f"{size_text(written.nbytes)}",
        soft_wrap=True,
    )
