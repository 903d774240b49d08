"""compile(): make an artifact of a model, and check it before it is moved to its place.

It needs the compiler, and the session that runs the artifact for the check; so it stands above
both.
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
from kvgraph.compiler.alone import alone
from kvgraph.compiler.dump import PassDump
from kvgraph.compiler.output import require_free, settle_leftovers, staging
from kvgraph.contract.backends import Support, imported
from kvgraph.contract.collectives import Collective
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.files import as_path
from kvgraph.contract.manifest import Manifest, write_manifest
from kvgraph.contract.params import DEFAULT_PAGE_SIZE, KVCacheParams, KVCacheStrategy
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.contract.values import require_integer
from kvgraph.errors import MissingDependencyError, UnsupportedError
from kvgraph.progress import Progress

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
    max_batch_size: int | None = None,
    max_batch_tokens: int | None = None,
    tp: int = 1,
    check: bool = True,
    dump_passes: str | Path | None = None,
    force: bool = False,
    progress: Progress = lambda stage: None,
) -> Manifest:
    """Compile a model folder (Hugging Face), a GGUF file or an nn.Module into the artifact folder
    `out`.

    The cache is described by a NullKVCacheManager on a virtual device: no KV memory is allocated,
    and any pool size can be bound later. `out` appears whole or not at all.

    Calls of several threads wait for one another, since torch.export and transformers have state
    of the process. So no other thread may trace a model of its own meanwhile.

    Target:

    - `target`: `cpu`, or `cuda:sm_90` and the like; `backend`: what the artifact is for (default:
      the target's first one).
    - `tp`: number of ranks that the model is cut into; each runs its part of weights and pool.

    Numbers:

    - `dtype`: type of activations and weights (default: the checkpoint's).
    - `weights`: how linear layers and experts are stored. On a CPU with float32 activations:
      `fp32`, `bf16`, `int8`, `int4`, or `stored` for a quantized checkpoint. On CUDA with backend
      torch: `int8`, `int4` or `stored`. Default: `stored` for a quantized checkpoint under backend
      onnx on a CPU and torch on CUDA; under onnx on a CPU, else `bf16` for a bfloat16 checkpoint
      and `fp32` for others; in all other cases the activations' dtype.
    - `cache_dtype`: type of the pool (default: the activations' dtype).

    Cache:

    - `cache`: `paged` (default), `continuous` or `padded`; `page_size`: tokens (default: 128).
    - `params`: describes the whole cache; `cache_dtype`, `cache` and `page_size` must then agree.
    - `max_seq_len`: tokens of the longest request (default: the checkpoint's). It settles rotary
      frequencies that depend on the length.
    - `max_batch_size`, `max_batch_tokens`: most rows and new tokens of a step of a TensorRT engine,
      of backend tensorrt or torch-tensorrt (default: 256 and 8192). Other backends have no bounds.

    An nn.Module, which has no folder:

    - `params`, `vocab_size` and `max_seq_len` are required.
    - `tokenizer`: a tokenizer.json, or a folder with one and a generation_config.json.
    - `eos_token_ids`, `bos_token_id`: special tokens of its text.

    The run itself:

    - `check`: run two short rows through the artifact and through the model, and compare.
    - `dump_passes`: folder for the graph after each pass, as text.
    - `force`: replace an artifact at `out`.
    - `progress`: called with each stage.

    Raises ModelError, UnsupportedError, ParamsError, ArtifactError, MissingDependencyError or
    CheckError (all KVGraphErrors).
    """
    if sys.flags.optimize > 1:
        raise UnsupportedError(
            "compile: expected Python with docstrings, which transformers reads, got -OO; use -O"
        )
    out = as_path("out", out)
    page_size = _optional_integer("page_size", page_size)
    tp = require_integer("tp", tp, UnsupportedError)
    vocab_size = _optional_integer("vocab_size", vocab_size, least=1)
    max_seq_len = _optional_integer("max_seq_len", max_seq_len)
    max_batch_size = _optional_integer("max_batch_size", max_batch_size)
    max_batch_tokens = _optional_integer("max_batch_tokens", max_batch_tokens)
    request = options.resolve(
        target,
        backend,
        dtype=dtype,
        weights=weights,
        cache=cache,
        cache_dtype=cache_dtype,
        page_size=page_size,
        params=params,
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        tp=tp,
    )
    pipeline.require_rankable(model, tp)
    settle_leftovers(out)
    require_free(out, force=force)
    pipeline.require_tools(request.support.tools)
    if check and request.target.kind == "cpu":
        with alone():  # it may be the first to import torch
            _require_session(request.support)
    dump = None if dump_passes is None else PassDump(as_path("dump_passes", dump_passes), out)

    with alone(), pipeline.opened(model) as source, _on_host():
        progress("reading the model")
        loaded, notes = pipeline.load_model(
            source,
            float32=request.float32,
            weightless=request.support.weightless,
            dtype=dtype,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id,
        )
        weights = request.settled_weights(loaded.stored_dtype, is_quantized=loaded.is_quantized)
        has_pages = request.cache == KVCacheStrategy.PAGED
        if not has_pages and page_size not in (None, DEFAULT_PAGE_SIZE):
            no_effect = f"has no effect, a {request.cache} cache has no pages"
            notes.append(f"page_size: {page_size} {no_effect}")

        progress("describing the cache")
        plan = pipeline.plan_for(loaded, params, request)
        signature = pipeline.describe(loaded, plan)
        notes += loaded.notes
        notes += pipeline.notes_of_widened(loaded, weights, request)
        notes += pipeline.notes_of_ranks(loaded.layers, tp)
        pipeline.require_kernels(plan, request)

        from kvgraph.compiler.check.own import require_own
        from kvgraph.compiler.check.run import Compiled
        from kvgraph.compiler.check.run import check as require_equal
        from kvgraph.compiler.trace import trace

        write = partial(_write, request, weights, notes)
        functional = request.backend.functional
        with staging(out, force=force) as folder:
            progress(f"lowering to {request.backend.name}{request.why_default}")
            traced = trace(
                loaded,
                signature,
                plan,
                functional=functional,
                archs=request.target.archs,
                dump=dump,
            )
            if check:
                require_own(traced)
            manifest = write(traced, folder, progress)
            note = "check: left out (--no-check)"
            if check:
                progress("checking")
                compiled = Compiled(traced, folder, manifest, request.backend, write)
                note = require_equal(compiled, run_artifact)
            manifest = replace(manifest, notes=[*manifest.notes, note])
            write_manifest(folder, manifest)
    return manifest


def _write(
    request: options.CompileRequest,
    weights: str | None,
    notes: list[str],
    traced: Traced,
    folder: Path,
    progress: Progress = lambda stage: None,
) -> Manifest:
    """Lower the trace, and write the backend's files and all others into `folder`.

    With several ranks, `folder` gets rank 0's files; `rank1/` and so on get the files that differ.
    """
    if request.ranks == 1:
        lower = pipeline.bind_lower(request, weights, progress)
        own, lowered = traced, pipeline.run_lower(lower, traced, folder)
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
    request: options.CompileRequest,
    weights: str | None,
    traced: Traced,
    folder: Path,
    progress: Progress,
) -> tuple[Traced, Lowered, list[Collective]]:
    """Write the files of every rank. Return rank 0's trace, its Lowered and its collectives."""
    from kvgraph.compiler.collectives import collectives_of

    lower = pipeline.bind_lower(request, weights, progress)
    kernels_once = replace(request, target=replace(request.target, archs=()))
    lower_others = pipeline.bind_lower(kernels_once, weights, progress)
    first: tuple[Traced, Lowered, list[Collective]] | None = None
    kind, functional = request.target.kind, request.backend.functional
    traces = pipeline.trace_ranks(traced, kind, request.ranks, functional=functional)
    for rank, own in enumerate(traces):
        progress(f"lowering rank {rank} of {request.ranks}")
        place = folder / f"rank{rank}" if rank else folder
        place.mkdir(exist_ok=True)
        collectives = collectives_of(own)
        lowered = pipeline.run_lower(lower_others if rank else lower, own, place)
        # The check runs over the whole model, and its tolerance depends on what was rounded.
        traced.weights.rounded = own.weights.rounded
        # Frees this rank's program: `emit` reads model, plan and digest alone.
        own.program = traced.program
        if first is None:
            first = own, lowered, collectives
        else:
            kept = emit.drop_shared(place, folder)
            listed = [f"rank{rank}/{name}" for name in lowered.nondeterministic_files]
            first[1].nondeterministic_files += [name for name in listed if name in kept]
    assert first is not None
    return first


@contextmanager
def _on_host() -> Iterator[None]:
    """Keep tensors that model code makes without a device in host memory, whatever torch's default.

    Does nothing if torch is not imported yet.
    """
    if sys.modules.get("torch") is None:
        yield
        return
    import torch  # waits for a thread that has begun it, such as one that opens an engine

    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


def _require_session(support: Support) -> None:
    """Raise MissingDependencyError if the session that the check runs is not installed."""
    require = support.sessions[0].require
    try:
        if require:
            imported(require)()
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"check: {error}, or leave the check out with --no-check (check=False in Python)"
        ) from error


def _optional_integer(name: str, value: int | None, least: int | None = None) -> int | None:
    return None if value is None else require_integer(name, value, UnsupportedError, least=least)


def run_artifact(
    folder: Path, rows: Sequence[npt.NDArray[np.int32]], chunk: Chunk
) -> list[npt.NDArray[np.float32]]:
    """Logits of every token, one `[len(row), vocab]` array for each row.

    All rows run together in the session of the artifact's backend. `chunk`: most new tokens of a
    row in a step, one number for all rows or one for each. A padded cache takes one row after the
    other.
    """
    from kvgraph.contract.manifest import read_manifest
    from kvgraph.kv.forward import all_logits, chunks_of
    from kvgraph.runtime.artifact import Artifact
    from kvgraph.runtime.engine import Engine

    artifact = Artifact(folder, read_manifest(folder))
    params = artifact.params()
    pages = None
    if params.cache_strategy is KVCacheStrategy.PAGED:  # just enough pages
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
