"""compile(): from a model to an artifact, which is run before it is moved to its place.

It needs the compiler and the session that runs what was made, so it stands above both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvgraph.compiler import emit, options, pipeline
from kvgraph.compiler.dump import PassDump
from kvgraph.compiler.options import DEFAULT_PAGE_SIZE
from kvgraph.compiler.output import require_free, settle_leftovers, staging
from kvgraph.compiler.pipeline import Progress
from kvgraph.contract.collectives import Collective
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.files import as_path
from kvgraph.contract.manifest import Manifest, write_manifest
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.sizes import whole
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn

    from kvgraph.compiler.targets import Lowered
    from kvgraph.compiler.traced import Traced
    from kvgraph.kv.forward import Chunk


def compile(
    model: str | Path | nn.Module,
    out: str | Path,
    *,
    target: str = "cpu",
    backend: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    cache_dtype: str | None = None,
    page_size: int | None = None,
    cache: str | None = None,
    params: KVCacheParams | MultiKVCacheParams | None = None,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    tokenizer: str | Path | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
    bos_token_id: int | None = None,
    max_batch: int | None = None,
    max_tokens: int | None = None,
    tp: int = 1,
    check: bool = True,
    dump_passes: str | Path | None = None,
    force: bool = False,
    progress: Progress = lambda stage: None,
) -> Manifest:
    """Compile a model folder (Hugging Face), a GGUF file or an nn.Module into the artifact folder
    `out`.

    `dtype` is the activation and weight type (default: the checkpoint's), `weights` what linear
    layers and experts keep: on a CPU, under float32 activations, "fp32", "bf16", "int8", "int4" or,
    of a checkpoint in fewer bits, "stored" (default under backend onnx: "stored" for such a one,
    "bf16" for a bfloat16 one; else as `dtype`); on CUDA with
    backend torch "int8", "int4" or "stored" (default: "stored" for such a one, else as `dtype`),
    `cache_dtype` the pool's (default: `dtype`), `page_size` in tokens (default: 128),
    `cache` "paged" (the default), "continuous" or "padded". Where `params` is given it says these
    three, and another value is refused. `max_seq_len` is the tokens of the longest context
    (default: the checkpoint's; it settles rotary frequencies that depend on the length). An
    nn.Module needs `params`, `vocab_size` and `max_seq_len`, and may bring a `tokenizer` (a
    tokenizer.json, or a folder with one and a generation_config.json), `eos_token_ids` and
    `bos_token_id`; a model folder has its own. `max_batch` and `max_tokens` bound a step's rows and
    new tokens in the profiles of backend tensorrt (default: 256 and 8192); other backends have no
    bounds. `tp` cuts the model into as many ranks, each of which runs over its part of weights and
    pool. The cache is described by a NullKVCacheManager on a virtual device: no KV memory is
    allocated, and any pool size can be bound later. `check` runs two short rows through what was
    made and through the model itself. `dump_passes` is a folder for the graph after each pass, as
    text. `out` appears whole or not at all.

    Raises ModelError, UnsupportedError, ParamsError, ArtifactError or CheckError (all
    KVGraphErrors).
    """
    out = as_path("out", out)
    page_size = _optional_whole("page_size", page_size)
    tp = whole("tp", tp, UnsupportedError)
    vocab_size = _optional_whole("vocab_size", vocab_size)
    max_seq_len = _optional_whole("max_seq_len", max_seq_len)
    max_batch = _optional_whole("max_batch", max_batch)
    max_tokens = _optional_whole("max_tokens", max_tokens)
    request = options.resolve(
        target,
        backend,
        cache=cache,
        cache_dtype=cache_dtype,
        page_size=page_size,
        params=params,
        max_batch=max_batch,
        max_tokens=max_tokens,
        tp=tp,
    )
    pipeline.require_plan(model, tp)
    settle_leftovers(out)
    require_free(out, force=force)
    dump = None if dump_passes is None else PassDump(Path(dump_passes), out)

    with pipeline.opened(model) as source, _on_host():
        progress("reading the model")
        options.check_weights(weights, request.target, request.backend, dtype)
        float32 = options.computes_in_float32(request.support, request.target, weights)
        text = {
            "tokenizer": tokenizer,
            "eos_token_ids": eos_token_ids,
            "bos_token_id": bos_token_id,
        }
        loaded, notes = pipeline.load_model(
            source, float32, dtype, vocab_size, max_seq_len, request.support.weightless, text
        )
        if weights is None and (float32 or request.target.kind != "cpu"):
            weights = options.default_weights(
                loaded.stored_dtype,
                request.support,
                request.target.kind,
                is_quantized=loaded.is_quantized,
            )
        options.require_quantized(weights, is_quantized=loaded.is_quantized)
        has_pages = request.cache == KVCacheStrategy.PAGED
        if not has_pages and page_size not in (None, DEFAULT_PAGE_SIZE):
            no_effect = f"has no effect, a {request.cache} cache has no pages"
            notes.append(f"page_size: {page_size} {no_effect}")

        progress("describing the cache")
        plan = pipeline.plan_for(loaded, params, request)
        signature = pipeline.describe(loaded, plan)
        notes += [*loaded.notes, *pipeline.notes_of_ranks(loaded.layers, tp)]
        pipeline.require_kernels(plan, request)

        from kvgraph.compiler.check.run import Made
        from kvgraph.compiler.check.run import check as require_equal
        from kvgraph.compiler.trace import trace

        write = partial(_write, request, weights, notes)
        functional = request.backend.functional
        with staging(out, force=force) as folder:
            progress(f"lowering to {request.backend.name}{request.reason}")
            traced = trace(loaded, signature, plan, functional=functional, dump=dump)
            traced.archs = request.target.archs
            manifest = write(traced, folder, progress)
            note = "check: left out (--no-check)"
            if check:
                progress("checking")
                made = Made(traced, folder, manifest, request.backend, write)
                note = require_equal(made, run_artifact)
            manifest = replace(manifest, notes=[*manifest.notes, note])
            write_manifest(folder, manifest)
    return manifest


def _write(
    request: options.Request,
    weights: str | None,
    notes: list[str],
    traced: Traced,
    folder: Path,
    progress: Progress = lambda stage: None,
) -> Manifest:
    """Lower the trace, and write the backend's files and all others into `folder`.

    Of several ranks: rank 0's files, and in `rank1/` and so on what differs from them.
    """
    if request.ranks == 1:
        lower = pipeline.lowering(request, weights, progress)
        own, lowered = traced, pipeline.lower(lower, traced, folder)
        collectives: list[Collective] = []
    else:
        own, lowered, collectives = _write_ranks(request, weights, traced, folder, progress)
    progress("writing the artifact")
    return emit.emit(
        folder,
        traced=own,
        lowered=lowered,
        collectives=collectives,
        target=request.target,
        backend=request.backend,
        weights=weights or traced.model.dtype,
        notes=notes,
    )


def _write_ranks(
    request: options.Request,
    weights: str | None,
    traced: Traced,
    folder: Path,
    progress: Progress,
) -> tuple[Traced, Lowered, list[Collective]]:
    """The files of every rank; the trace and what was lowered of rank 0, and its collectives."""
    from kvgraph.compiler.collectives import collectives_of

    lower = pipeline.lowering(request, weights, progress)
    made: list[tuple[Traced, Lowered, list[Collective]]] = []
    kernels_once = replace(request, target=replace(request.target, archs=()))
    lower_others = pipeline.lowering(kernels_once, weights, progress)
    kind, functional = request.target.kind, request.backend.functional
    traces = pipeline.trace_ranks(traced, kind, request.ranks, functional=functional)
    for rank, own in enumerate(traces):
        progress(f"lowering rank {rank} of {request.ranks}")
        place = folder / f"rank{rank}" if rank else folder
        place.mkdir(exist_ok=True)
        collectives = collectives_of(own)
        lowered = pipeline.lower(lower_others if rank else lower, own, place)
        traced.weights.rounded = own.weights.rounded
        own.program = traced.program  # its weights are written
        made.append((own, lowered, collectives))
        if rank:
            kept = emit.drop_shared(place, folder)
            listed = [f"rank{rank}/{name}" for name in lowered.nondeterministic_files]
            made[0][1].nondeterministic_files += [name for name in listed if name in kept]
    return made[0]


@contextmanager
def _on_host() -> Iterator[None]:
    """What a model's code makes without a device is in host memory, whatever torch's default is."""
    torch = sys.modules.get("torch")
    if torch is None or torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


def _optional_whole(name: str, value: int | None) -> int | None:
    return None if value is None else whole(name, value, UnsupportedError)


def run_artifact(
    folder: Path, rows: Sequence[npt.NDArray[np.int32]], chunk: Chunk
) -> list[npt.NDArray[np.float32]]:
    """Logits of every token of each row, `[len(row), vocab]`: all rows together, in the session of
    the artifact's backend, at most `chunk` new tokens of each, or of all, in a step.

    A padded cache takes one row after the other.
    """
    from kvgraph.contract.manifest import read_manifest
    from kvgraph.kv.forward import all_logits, chunks_of
    from kvgraph.runtime.artifact import Artifact
    from kvgraph.runtime.engine import Engine

    artifact = Artifact(folder, read_manifest(folder))
    params = artifact.params()
    pages = None
    if params.cache_strategy is KVCacheStrategy.PAGED:  # memory only where tokens are written
        pages = sum(ceildiv(len(row), params.page_size) for row in rows)
    found: list[npt.NDArray[np.float32]] = []
    with Engine(
        artifact, num_pages=pages, max_batch_size=len(rows), enable_prefix_caching=False
    ) as engine:
        most = engine.scheduler.max_batch_size
        for first in range(0, len(rows), most):
            group = slice(first, first + most)
            own = chunks_of(chunk, len(rows))[group]
            found += all_logits(engine.kv, rows[group], engine.session.run, chunk=own)
    return found
