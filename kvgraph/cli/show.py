"""The tables that `kvgraph inspect` prints about an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvgraph.contract.file_names import BUILD_LOG_NAME, KERNELS_NAME
from kvgraph.contract.files import open_regular, read_list
from kvgraph.contract.manifest import ExecutedKernel, Manifest, PassEntry, QualityInfo
from kvgraph.contract.mixtures import Mixture
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.contract.plain import from_plain
from kvgraph.contract.sizes import size_text
from kvgraph.contract.versions import UNKNOWN, version_of
from kvgraph.errors import ArtifactError
from kvgraph.plural import plural

if TYPE_CHECKING:
    from kvgraph.compiler.passes import PassOptions


def show(folder: Path, manifest: Manifest, to: Console) -> None:
    """Print facts, bindings, ops, passes, kernels (CUDA only) and files of an artifact.

    ArtifactError, with nothing printed, for a damaged file.
    """
    paths = [name for name in manifest.files if name.endswith(f"/{KERNELS_NAME}")]
    of_kernels = [kernels(folder, paths, manifest.executed)] if paths else []
    to.print(facts(manifest))
    to.print(bindings(manifest))
    to.print(ops(manifest))
    for line in passes(manifest):
        to.print(line, soft_wrap=True)
    for table in (*of_kernels, files(manifest)):
        to.print(table)


def facts(manifest: Manifest) -> Table:
    from kvgraph.contract.trees import params_from_layout

    model, params = manifest.model, params_from_layout(manifest.layout)
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "model": f"{model.architecture}, vocabulary {model.vocab_size}, "
        f"at most {model.max_seq_len} tokens",
        "backend": f"{manifest.backend} on {manifest.target}, {manifest.dtype} activations, "
        f"{manifest.weights} weights",
        "identity": manifest.identity.hex(),
        "made by": f"kvgraph {manifest.kvgraph_version} ("
        + ", ".join(f"{name} {version}" for name, version in manifest.tools.items())
        + ")",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for leaf, cache in params.leaves.items():
        window = f", window {cache.window_size}" if cache.window_size else ""
        layers, heads, page = cache.num_layers, cache.n_kv_heads, cache.page_size
        pages = (
            f", {page} {plural('token', page)} a page" if cache.cache_strategy == "paged" else ""
        )
        table.add_row(
            f"cache {leaf}",
            f"{cache.pool_dtype} {cache.cache_strategy}: {layers} {plural('layer', layers)} x "
            f"{heads} kv {plural('head', heads)} x {cache.head_dim}{pages}{window}",
        )
    if params.n_shards > 1:
        table.add_row("ranks", f"{params.n_shards}, each with its part of weights and cache")
    for c in manifest.collectives:
        per = "token" if c.rows == "tokens" else "row of logits"
        table.add_row(f"{c.op}", f"{c.count} in a step, {c.bytes:,} bytes per {per} and rank")
    for mixture in manifest.mixtures:
        table.add_row("experts", mixture_line(mixture))
    if engine := manifest.engine:
        where = ", ".join(engine.archs) or "any architecture"
        table.add_row("engine", f"{engine.module} {engine.version}, for {where}")
        for p in engine.profiles:
            most = ", ".join(f"{dim} {extent}" for dim, extent in p.max.items())
            table.add_row(f"profile {p.name}", f"at most {most}")
    if quality := manifest.quality:
        table.add_row("quality", quality_line(quality))
    for note in manifest.notes:
        table.add_row("note", note)
    return table


def mixture_line(mixture: Mixture) -> str:
    """One line on the experts: counts, parameters used per token, bytes read in a step."""
    read = {rows: size_text(mixture.read(rows)) for rows in (1, 64)}
    return (
        f"{mixture.layers} {plural('layer', mixture.layers)} of {mixture.experts}, "
        f"{mixture.active} for a token: "
        f"{mixture.parameters:,} parameters, {mixture.active_parameters:,} at work on a token; a "
        f"step reads {read[1]} of their {size_text(mixture.bytes)} with 1 row, about {read[64]} "
        "with 64"
    )


def quality_line(quality: QualityInfo) -> str:
    return (
        f"perplexity {quality.perplexity:.2f} (the checkpoint in float32: "
        f"{quality.reference_perplexity:.2f}, so {quality.loss:+.2%}), "
        f"{quality.agreement:.2%} of the likeliest tokens the same, "
        f"over {quality.tokens:,} tokens of {quality.text}"
    )


def bindings(manifest: Manifest) -> Table:
    table = titled("Bindings (* is memory that ops write: one address for input and output)")
    for column in ("", "name", "dtype", "dims", "device"):
        table.add_column(column, no_wrap=column != "dims", overflow="fold")
    for way, found in (("in", manifest.inputs), ("out", manifest.outputs)):
        for b in found:
            dims = " x ".join(map(str, b.dims))
            name = f"{b.name} *" if b.kind == "buffer" else b.name
            table.add_row(way, name, b.dtype, dims, b.device)
    return table


def ops(manifest: Manifest) -> Table:
    table = titled("Ops of the graph")
    table.add_column("op")
    table.add_column("count", justify="right")
    for name, count in manifest.ops.items():
        table.add_row(name, str(count))
    return table


def passes(manifest: Manifest) -> Iterator[str]:
    """A line for each pass of the target, in order: how often it applied, or why it was left out.

    A check that has no count has held, or no artifact would exist. For an artifact of another
    kvgraph version, only the passes in its manifest are listed.
    """
    from kvgraph.compiler.passes.lists import PASSES

    found = {entry.name: entry for entry in manifest.passes}
    listed = tuple(PASSES.get((manifest.target.partition(":")[0], manifest.backend), ()))
    own = version_of()
    is_ours = own != UNKNOWN and own == manifest.kvgraph_version
    if not is_ours or not found.keys() <= {each.name for each in listed}:
        yield from (f"pass {entry.name}: {_applied(entry)}" for entry in manifest.passes)
        return
    options = _options(manifest)
    for each in listed:
        kind = "check" if each.is_check else "pass"
        if each.needs is not None and not each.applies(options):
            did = f"left out, since {each.needs.otherwise}"
        else:
            did = _applied(found[each.name]) if each.name in found else "held"
        yield f"{kind} {each.name}: {did}"


def _applied(entry: PassEntry) -> str:
    return "; ".join([f"{entry.applied} places", *grouped(entry.unmatched)])


def grouped(sentences: Sequence[str]) -> Iterator[str]:
    """Join sentences "place: why" that have the same reason into one."""
    places: dict[str, list[str]] = {}
    for sentence in sentences:
        place, _, why = sentence.partition(": ")
        places.setdefault(why, []).append(place)
    for why, found in places.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield f"{found[0]}{more}: {why}" if why else found[0]


def _options(manifest: Manifest) -> PassOptions:
    from kvgraph.compiler.passes import PassOptions
    from kvgraph.contract.dtypes import WEIGHT_BITS
    from kvgraph.contract.trees import params_from_layout

    params = params_from_layout(manifest.layout)
    is_padded = any(
        leaf.cache_strategy is KVCacheStrategy.PADDED for leaf in params.leaves.values()
    )
    return PassOptions(is_padded, manifest.weights in WEIGHT_BITS, params.n_shards)


def kernels(folder: Path, paths: list[str], executed: Sequence[ExecutedKernel]) -> Table:
    """The table of a CUDA artifact's cubins: multiprocessor resources, and counts of its PTX."""
    seconds = _compile_seconds(folder)
    did = {each.file: each for each in executed}
    title = "Kernels (shared memory and a thread's spills in bytes"
    table = titled(
        f"{title}; sectors and bank passes of its PTX, times ideal)"
        if did
        else f"{title}; seconds to compile)"
    )
    columns = ["kernel", "arch", "regs", "shared", "spills"]
    if did:
        table.padding = (0, 0, 0, 1)
    for column in [*columns, "sectors", "banks"] if did else [*columns, "warps", "s"]:
        is_text = column in ("kernel", "arch")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text)
    for path in paths:
        # Its hash is not checked here.
        for kernel in read_list(folder / path, _Kernel, "kernels", ArtifactError):
            name = f"{kernel.kernel} {kernel.role}".strip()
            took = seconds.get(str(Path(path).with_name(kernel.file)))
            spills = kernel.spill_stores + kernel.spill_loads
            figures = (kernel.registers, kernel.shared, spills)
            last: tuple[str, ...] = (str(kernel.num_warps), "" if took is None else f"{took:.2f}")
            if did:
                last = _counted(did.get(str(Path(path).with_name(kernel.file))))
            table.add_row(name, kernel.arch, *map(str, figures), *last)
    return table


def _counted(did: ExecutedKernel | None) -> tuple[str, ...]:
    if did is None:
        return "", ""
    return ratio(did.sectors, did.ideal_sectors), ratio(did.wavefronts, did.ideal_wavefronts)


def ratio(found: int, ideal: int) -> str:
    return f"{found / ideal:.2f}" if ideal else "-"


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The fields of a kernels.json entry that are shown."""

    kernel: str
    role: str
    arch: str
    file: str
    num_warps: int
    registers: int
    shared: int
    spill_stores: int
    spill_loads: int

    def __post_init__(self) -> None:
        if self.file in ("", "..") or Path(self.file).name != self.file:
            raise ValueError(f"file: expected the name of a file, got {self.file[:60]!r}")


@dataclass(frozen=True, slots=True)
class _BuildLog:
    compile_seconds: dict[str, float]


def _compile_seconds(folder: Path) -> dict[str, float]:
    """Seconds to compile, by file, from the build log; empty without one (it is not hashed)."""
    try:
        return from_plain(_BuildLog, _read_json(folder / BUILD_LOG_NAME)).compile_seconds
    except (OSError, ValueError, RecursionError):
        return {}


def _read_json(path: Path) -> Any:
    with open_regular(path) as file:
        return json.loads(file.read())


def files(manifest: Manifest) -> Table:
    table = titled("Files")
    for column in ("file", "bytes", "SHA-256 of chunk 0", "same bytes again"):
        is_name = column == "file"  # a narrow terminal folds names, but never hides numbers
        table.add_column(
            column,
            justify="right" if column == "bytes" else "left",
            no_wrap=not is_name,
            overflow="fold",
        )
    for name, entry in manifest.files.items():
        same = "no" if name in manifest.nondeterministic_files else "yes"
        digest = entry.chunks[0][:16] if entry.chunks else ""
        table.add_row(name, f"{entry.size:,}", digest, same)
    return table


def titled(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
