"""The command line: text and JSON on stdout, all else on stderr, exit code 2 on bad input."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvgraph.bench.command import bench
from kvgraph.contract.backends import OURS, SESSIONS, default_backend
from kvgraph.contract.dtypes import ACTIVATIONS, POOLS
from kvgraph.contract.plain import to_json, to_plain
from kvgraph.contract.sizes import parse_bytes
from kvgraph.errors import KVGraphError, RequestError
from kvgraph.show import quality_line, show, titled

if TYPE_CHECKING:
    from kvgraph.contract.manifest import Manifest

app = typer.Typer(
    help="Compile language models ahead of time around a paged KV cache, and run them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# No markup, no emoji: a path is printed as it is, "[a]" and ":x:" included.
stdout = Console(highlight=False, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)

cache_app = typer.Typer(no_args_is_help=True, help="The folder of a disk tier.")
app.add_typer(cache_app, name="cache")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Artifact folder.")]
CacheFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a disk tier.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


Dtype = StrEnum("Dtype", ACTIVATIONS)  # type: ignore[misc]  # the members are in the table


class Cache(StrEnum):
    paged = "paged"
    continuous = "continuous"
    padded = "padded"


class Weights(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"


CacheDtype = StrEnum("CacheDtype", POOLS)  # type: ignore[misc]


def main() -> None:
    """Entry point: one sentence and exit code 2 for what a user can mend."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning  # type: ignore[assignment]
            app()
    except (KVGraphError, OSError, MemoryError) as error:
        stderr.print(f"kvgraph: {error}", soft_wrap=True)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def version(
    wanted: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if wanted:
        from kvgraph import __version__

        stdout.print(f"kvgraph {__version__}")
        raise typer.Exit


@app.command()
def compile(
    output: Annotated[Path, typer.Option("--output", "-o", help="Artifact folder to make.")],
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL_DIR", help="Hugging Face checkpoint.")
    ] = None,
    from_artifact: Annotated[
        Path | None,
        typer.Option(help="Build the engine of a tensorrt artifact again, with this TensorRT."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="What to compile for [default: cpu]: cuda:sm_80,sm_90 and the like."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar=f"<{'|'.join(each.name for each in OURS)}|...>",
            help="What runs it, of kvgraph or an installed package [default: "
            f"{default_backend('cpu').name} on cpu, {default_backend('cuda').name} on cuda].",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Activations and weights [default: the checkpoint's].")
    ] = None,
    weights: Annotated[
        Weights | None,
        typer.Option(help="Linear layers on cpu [default: bf16 if the checkpoint is, else fp32]."),
    ] = None,
    cache_dtype: Annotated[
        CacheDtype | None, typer.Option(help="The pool [default: the activations' dtype].")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 128,
    cache: Annotated[Cache, typer.Option(help="Kind of the cache.")] = Cache.paged,
    max_batch: Annotated[
        int | None, typer.Option(help="Rows of a step, for tensorrt's profiles [default: 256].")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="New tokens of a step, for the same [default: 8192].")
    ] = None,
    quality: Annotated[
        bool | None,
        typer.Option(
            help="Measure perplexity, and the checkpoint's in float32 [default: with --weights "
            "bf16, int8 or int4]."
        ),
    ] = None,
    quality_text: Annotated[
        Path | None, typer.Option(help="UTF-8 text for it [default: from Python's documentation].")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Compare two short rows with the model's own forward pass.")
    ] = True,
    dump_passes: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the graph after each pass to DIR, as text."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an artifact at DIR.")] = False,
    json: Json = False,
) -> None:
    """Compile a model folder into an artifact."""
    if quality is None:
        quality = quality_text is not None or weights not in (None, Weights.fp32)
    stages = _Stages()
    with stages.status:
        if from_artifact is not None:
            from kvgraph.compiler.rebuild import rebuild

            _refuse_beside_artifact(
                model=model,
                backend=backend,
                dtype=dtype,
                weights=weights,
                cache_dtype=cache_dtype,
                page_size=None if page_size == 128 else page_size,
                cache=None if cache is Cache.paged else cache,
                max_batch=max_batch,
                max_tokens=max_tokens,
                dump_passes=dump_passes,
            )
            manifest = rebuild(
                from_artifact, output, target=target, force=force, progress=stages.next
            )
        else:
            from kvgraph.build import compile as compile_model

            if model is None:
                raise RequestError("compile: expected MODEL_DIR or --from-artifact, got neither")
            manifest = compile_model(
                model,
                output,
                target=target or "cpu",
                backend=backend,
                dtype=dtype.value if dtype else None,
                weights=weights.value if weights else None,
                cache_dtype=cache_dtype.value if cache_dtype else None,
                page_size=page_size,
                cache=cache.value,
                max_batch=max_batch,
                max_tokens=max_tokens,
                check=check,
                dump_passes=dump_passes,
                force=force,
                progress=stages.next,
            )
            if quality:
                manifest = _measured(output, model, quality_text, manifest, stages.next)
        stages.done()
    if manifest.quality:
        stderr.print(f"quality: {quality_line(manifest.quality)}", soft_wrap=True)
    for note in manifest.notes:
        stderr.print(f"note: {note}", soft_wrap=True)
    _warn_unmatched(manifest)
    size = sum(entry.size for entry in manifest.files.values())
    stderr.print(
        f"compiled {manifest.model.architecture} for {manifest.target} ({manifest.backend}): "
        f"{output}, {_bytes(size)}",
        soft_wrap=True,
    )
    if json:
        _print_json(_summary(output, manifest))


def _measured(
    output: Path,
    model: Path,
    text: Path | None,
    manifest: Manifest,
    progress: Callable[[str], None],
) -> Manifest:
    """The manifest with the artifact's quality, or as it is where that cannot be measured here."""
    from kvgraph.quality import measure, record

    try:
        return record(output, measure(output, model, text, progress=progress))
    except KVGraphError as why:
        stderr.print(f"note: quality not measured: {why}", soft_wrap=True)
        return manifest


@app.command()
def generate(
    artifact: Folder,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end.")] = False,
    session: Annotated[
        str | None, typer.Option(help=f"{', '.join(SESSIONS)} [default: the backend's].")
    ] = None,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of the pool [default: what 1 GiB holds].")
    ] = None,
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
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads [default: all].")] = None,
    json: Json = False,
) -> None:
    """Continue a prompt; the text streams to stdout."""
    from kvgraph.runtime.engine import Engine
    from kvgraph.runtime.prefix import read_prefix
    from kvgraph.runtime.sampling import SamplingParams

    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    with stderr.status("loading the artifact"):
        bound = read_prefix(prefix) if prefix else None
        engine = Engine(
            artifact,
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
        _print_json(to_plain(engine.generate([asked], sampling)[0]))
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


@app.command()
def prefill(
    artifact: Folder,
    prompt_file: Annotated[Path, typer.Option(help="Text file to compute ahead of time.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: NAME.kvp.")],
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of the pool [default: what 1 GiB holds].")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads [default: all].")] = None,
    json: Json = False,
) -> None:
    """Compute a fixed prefix, such as a system prompt, for `generate --prefix`."""
    from kvgraph.runtime.engine import Engine
    from kvgraph.runtime.prefix import write_prefix

    try:
        text = prompt_file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{prompt_file}: expected text in UTF-8, got {error}") from error
    with stderr.status("loading the artifact"):
        engine = Engine(artifact, num_pages=num_pages, max_batch_size=1, num_threads=threads)
    with stderr.status("computing the prefix"):
        written = write_prefix(engine, text, output)
    figures = {
        "prefix": str(output),
        "tokens": len(written.tokens),
        "pages": len(written.pages),
        "bytes": written.nbytes,
    }
    if json:
        _print_json(figures)
        return
    stdout.print(
        f"{output}: {len(written.tokens)} tokens, {len(written.pages)} pages, "
        f"{_bytes(written.nbytes)}",
        soft_wrap=True,
    )


@app.command()
def inspect(artifact: Folder, json: Json = False) -> None:
    """Show what an artifact binds to, computes and contains (its files are not hashed)."""
    from kvgraph.contract.manifest import read_manifest

    manifest = read_manifest(artifact)
    if json:
        _print_json(to_plain(manifest))
        return
    show(artifact, manifest, stdout)


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Hugging Face checkpoint.")],
    memory: Annotated[str, typer.Option(help="Memory of the device, such as 80GiB.")],
    target: Annotated[str, typer.Option(help="cpu, or cuda:sm_90 and the like.")] = "cpu",
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest request in tokens [default: the model's].")
    ] = None,
    max_batch_size: Annotated[int, typer.Option(help="Most requests at once.")] = 256,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Activations and weights [default: the checkpoint's].")
    ] = None,
    weights: Annotated[
        Weights | None,
        typer.Option(help="Linear layers on cpu [default: bf16 if the checkpoint is, else fp32]."),
    ] = None,
    cache_dtype: Annotated[
        CacheDtype | None, typer.Option(help="The pool [default: the activations' dtype].")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 128,
    json: Json = False,
) -> None:
    """Show how a model and its cache fit into memory; reads no weight."""
    from kvgraph.compiler.plan import plan_deployment

    made = plan_deployment(
        model,
        target=target,
        memory=parse_bytes("memory", memory),
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        dtype=dtype.value if dtype else None,
        weights=weights.value if weights else None,
        cache_dtype=cache_dtype.value if cache_dtype else None,
        page_size=page_size,
        progress=lambda stage: stderr.print(stage, soft_wrap=True),
    )
    if json:
        _print_json(to_plain(made))
        return
    table = Table(show_header=False, box=None, title_justify="left", title_style="bold")
    table.title = f"{made.architecture} on {made.target} with {_bytes(made.memory)}"
    table.add_column()
    table.add_column(justify="right")
    rows = {
        f"weights ({made.weights_dtype})": _bytes(made.weights),
        f"cache ({made.cache_dtype})": _bytes(made.cache_memory),
    }
    for leaf, pages in made.pages.items():
        name = f" ({leaf})" if leaf else ""
        rows[f"bytes per page of {made.page_size} tokens{name}"] = f"{made.bytes_per_page[leaf]:,}"
        rows[f"pages{name}"] = f"{pages:,}"
    rows |= {
        f"concurrent requests of {made.max_seq_len:,} tokens": f"{made.concurrent_requests:,}",
        "longest context of one request": f"{made.longest_context:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    stdout.print(table)
    if made.concurrent_requests == max_batch_size:
        stdout.print(f"More would fit than --max-batch-size {max_batch_size} can use.")
    stdout.print(
        f"Activations ({made.dtype}) and the graph itself are not counted.", soft_wrap=True
    )


@app.command()
def verify(artifact: Folder, json: Json = False) -> None:
    """Hash every file of an artifact and compare it with the manifest."""
    from kvgraph.runtime.artifact import verify as verify_artifact

    with stderr.status("hashing"):
        manifest = verify_artifact(artifact).manifest
    size = sum(entry.size for entry in manifest.files.values())
    if json:
        _print_json(_summary(artifact, manifest))
        return
    stdout.print(f"{artifact}: intact: {len(manifest.files)} files, {_bytes(size)}", soft_wrap=True)


app.command()(bench)


@cache_app.command("stat")
def cache_stat(folder: CacheFolder, json: Json = False) -> None:
    """Show whose pages the folder holds."""
    from kvgraph.kv.tiers.tools import describe

    models, versions = describe(folder)
    if json:
        _print_json(
            {
                "models": [
                    model._asdict() | {"fingerprint": model.fingerprint.hex()} for model in models
                ],
                "other_versions": [path.name for path in versions],
            }
        )
        return
    table = titled("Pages")
    for column in ("model and layout", "pages", "bytes", "last used"):
        table.add_column(column, justify="right" if column in ("pages", "bytes") else "left")
    for model in models:
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(model.last_used / 1e9))
        table.add_row(model.fingerprint.hex()[:16], f"{model.pages:,}", f"{model.nbytes:,}", used)
    stdout.print(table)
    for path in versions:
        stdout.print(f"of another version of kvgraph: {path.name}", soft_wrap=True)


@cache_app.command("verify")
def cache_verify(folder: CacheFolder, json: Json = False) -> None:
    """Check every page and remove the damaged ones; exit code 1 if there were any."""
    from kvgraph.kv.tiers.tools import describe, verify

    checked = damaged = 0
    total = sum(model.pages for model in describe(folder)[0])
    with Progress(console=stderr, transient=True) as progress:
        task = progress.add_task("checking pages", total=total)
        for state in verify(folder):
            checked, damaged = state
            progress.advance(task)
    if json:
        _print_json({"checked": checked, "damaged": damaged})
    else:
        stdout.print(f"{folder}: {checked} pages, {damaged} damaged and removed", soft_wrap=True)
    if damaged:
        raise typer.Exit(1)


@cache_app.command("clear")
def cache_clear(folder: CacheFolder, json: Json = False) -> None:
    """Remove the pages of all models."""
    from kvgraph.kv.tiers.tools import clear

    removed = clear(folder)
    if json:
        _print_json({"removed": removed})
    else:
        stdout.print(f"{folder}: {removed} pages removed", soft_wrap=True)


def _print_warning(message: Warning | str, *where: object) -> None:
    stderr.print(f"warning: {message}", soft_wrap=True)


def _refuse_beside_artifact(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise RequestError(f"{name}: expected none with --from-artifact, got {value}")


class _Stages:
    """The compile's stages on stderr: a spinner for the running one, seconds for each done."""

    def __init__(self) -> None:
        self.status = stderr.status("")
        self._stage = ""
        self._start = 0.0

    def next(self, stage: str) -> None:
        self.done()
        self._stage, self._start = stage, time.perf_counter()
        self.status.update(stage)

    def done(self) -> None:
        if self._stage:
            stderr.print(
                f"{time.perf_counter() - self._start:6.1f} s  {self._stage}", soft_wrap=True
            )
        self._stage = ""


def _warn_unmatched(manifest: Manifest) -> None:
    for entry in manifest.passes:
        for sentence in entry.unmatched:
            stderr.print(f"note: pass {entry.name}: {sentence}", soft_wrap=True)


def _summary(folder: Path, manifest: Manifest) -> dict[str, object]:
    return {
        "artifact": str(folder),
        "architecture": manifest.model.architecture,
        "backend": manifest.backend,
        "target": manifest.target,
        "weights": manifest.weights,
        "identity": manifest.identity.hex(),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "files": sorted(manifest.files),
        "notes": manifest.notes,
    }


def _print_json(value: object) -> None:
    sys.stdout.write(to_json(value, indent=1).decode() + "\n")


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"
