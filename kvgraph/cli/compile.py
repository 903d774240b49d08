"""The command `kvgraph compile`: a model folder, or an artifact's ONNX half, to an artifact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgraph.cli.console import Stages, print_json, stderr, summary, terminable
from kvgraph.cli.options import (
    MODEL_DIR,
    CacheDtypeOption,
    DtypeOption,
    Json,
    PageSize,
    WeightsOption,
    named,
    require_file,
)
from kvgraph.cli.show import grouped, quality_line
from kvgraph.contract.backends import OURS, default_backend
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.contract.sizes import size_text
from kvgraph.errors import KVGraphError, RequestError

if TYPE_CHECKING:
    from kvgraph.contract.manifest import Manifest


def compile(
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="<path>", parser=named, help="Artifact folder to make."
        ),
    ],
    model: Annotated[Path | None, MODEL_DIR] = None,
    from_artifact: Annotated[
        Path | None,
        typer.Option(
            metavar="<path>",
            parser=named,
            help="Build the engine of a TensorRT artifact on this machine.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Target [default: cpu]: cuda:sm_80,sm_90 and the like."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar=f"<{'|'.join(each.name for each in OURS)}|...>",
            help="Backend, of kvgraph or an installed package [default: "
            f"{default_backend('cpu').name} on cpu, {default_backend('cuda').name} on cuda].",
        ),
    ] = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    cache_dtype: CacheDtypeOption = None,
    page_size: PageSize = None,
    cache: Annotated[
        KVCacheStrategy | None,
        typer.Option(help=f"Kind of the cache [default: {KVCacheStrategy.PAGED}]."),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest context [default: the checkpoint's]."),
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Rows of a step of a TensorRT engine [default: 256].")
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(help="New tokens of a step of a TensorRT engine [default: 8192]."),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help="Cut the model into as many ranks, a process for each [default: 1]."),
    ] = None,
    quality: Annotated[
        bool | None,
        typer.Option(
            help="Measure perplexity, and the checkpoint's in float32 [default: on cpu with "
            "--weights bf16, int8, int4 or stored]."
        ),
    ] = None,
    quality_text: Annotated[
        Path | None,
        typer.Option(
            metavar="<path>",
            parser=named,
            help="UTF-8 text for --quality [default: from Python's documentation].",
        ),
    ] = None,
    check: Annotated[
        bool | None,
        typer.Option(
            help="Compare two short rows with the model's own forward pass [default: check]."
        ),
    ] = None,
    dump_passes: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=named, help="Write the graph after each pass to DIR, as text."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an artifact at DIR.")] = False,
    json: Json = False,
) -> None:
    """Compile a model folder into an artifact."""
    require_file("--quality-text", quality_text)
    if quality_text is not None and quality_text.is_file():  # a pipe can be read only once
        from kvgraph.quality.text import read_text

        read_text(quality_text)
    stages = Stages()
    with stages.bars, terminable():
        if from_artifact is not None:
            from kvgraph.rebuild import rebuild

            _refuse_beside_artifact(
                model=model,
                backend=backend,
                dtype=dtype,
                weights=weights,
                cache_dtype=cache_dtype,
                page_size=page_size,
                cache=cache,
                max_seq_len=max_seq_len,
                max_batch_size=max_batch_size,
                max_batch_tokens=max_batch_tokens,
                tp=tp,
                dump_passes=dump_passes,
                quality_text=quality_text,
                quality=quality,
                check=check,
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
                target="cpu" if target is None else target,
                backend=backend,
                dtype=dtype.value if dtype else None,
                weights=weights.value if weights else None,
                cache_dtype=cache_dtype.value if cache_dtype else None,
                page_size=page_size,
                cache=cache.value if cache else None,
                max_seq_len=max_seq_len,
                max_batch_size=max_batch_size,
                max_batch_tokens=max_batch_tokens,
                tp=1 if tp is None else tp,
                check=check is not False,
                dump_passes=dump_passes,
                force=force,
                progress=stages.next,
            )
            if quality is None:
                is_small = manifest.weights == "stored" or weights not in (None, "fp32")
                # Every machine that compiles for the target cpu can measure it.
                quality = quality_text is not None or (is_small and manifest.target == "cpu")
            if quality:
                manifest = _measured(output, model, quality_text, manifest, stages.next)
        stages.done()
    if manifest.quality:
        stderr.print(f"quality: {quality_line(manifest.quality)}", soft_wrap=True)
    for note in manifest.notes:
        stderr.print(f"note: {note}", soft_wrap=True)
    _warn_unmatched(manifest)
    stderr.print(
        f"compiled {manifest.model.architecture} for {manifest.target} ({manifest.backend}): "
        f"{output}, {size_text(manifest.nbytes)}",
        soft_wrap=True,
    )
    if json:
        print_json(summary(output, manifest))


def _refuse_beside_artifact(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise RequestError(f"{name}: expected none with --from-artifact, got {value}")


def _measured(
    output: Path,
    model: Path,
    text: Path | None,
    manifest: Manifest,
    progress: Callable[[str], None],
) -> Manifest:
    """The manifest with the artifact's quality; unchanged if that cannot be measured here."""
    from kvgraph.quality import measure, record

    try:
        return record(output, manifest, measure(output, model, text, progress=progress))
    except KVGraphError as why:
        stderr.print(f"note: quality not measured: {why}", soft_wrap=True)
        return manifest


def _warn_unmatched(manifest: Manifest) -> None:
    for entry in manifest.passes:
        for sentence in grouped(entry.unmatched):
            stderr.print(f"note: pass {entry.name}: {sentence}", soft_wrap=True)
