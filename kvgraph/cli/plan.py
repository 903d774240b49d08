"""The command `kvgraph plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvgraph.cli.console import print_json, stderr, stdout
from kvgraph.cli.options import (
    MODEL_DIR,
    CacheDtypeOption,
    DtypeOption,
    Json,
    PageSize,
    WeightsOption,
)
from kvgraph.contract.plain import to_plain
from kvgraph.contract.sizes import parse_bytes, size_text
from kvgraph.kv.memory import DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS
from kvgraph.plural import plural

if TYPE_CHECKING:
    from kvgraph.compiler.reserve import Reserve


def plan(
    model: Annotated[Path, MODEL_DIR],
    memory: Annotated[str, typer.Option(help="Memory of the device, such as 80GiB.")],
    target: Annotated[str, typer.Option(help="cpu, or cuda:sm_90 and the like.")] = "cpu",
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest request in tokens [default: the model's].")
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option(help="Most requests at once.")
    ] = DEFAULT_BATCH_SIZE,
    max_batch_tokens: Annotated[
        int, typer.Option(help="Most new tokens of a step.")
    ] = DEFAULT_BATCH_TOKENS,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    cache_dtype: CacheDtypeOption = None,
    page_size: PageSize = None,
    tp: Annotated[
        int,
        typer.Option("--tp", "--devices", help="Ranks that share the model, a device for each."),
    ] = 1,
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
        max_batch_tokens=max_batch_tokens,
        dtype=dtype.value if dtype else None,
        weights=weights.value if weights else None,
        cache_dtype=cache_dtype.value if cache_dtype else None,
        page_size=page_size,
        tp=tp,
        progress=lambda stage: stderr.print(stage, soft_wrap=True),
    )
    for warning in made.warnings:
        stderr.print(f"warning: {warning}", soft_wrap=True, highlight=False)
    if json:
        print_json(to_plain(made))
        return
    table = Table(show_header=False, box=None)
    each = f", each of {made.ranks} devices" if made.ranks > 1 else ""
    title = f"{made.architecture} on {made.target} with {size_text(made.memory)}{each}"
    stdout.print(title, style="bold", highlight=False, soft_wrap=True)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        f"weights ({made.weights_dtype})": size_text(made.weights),
        f"largest step ({made.dtype})": size_text(made.reserve.nbytes),
        **({"kept for graphs and libraries": size_text(made.kept)} if made.kept else {}),
        f"cache ({made.cache_dtype})": size_text(made.cache_memory),
    }
    if made.active_parameters != made.parameters:
        rows["parameters, and those at work on a token"] = (
            f"{made.parameters:,}; {made.active_parameters:,}"
        )
        read = (size_text(nbytes) for nbytes in made.read_by_step.values())
        named = " and ".join(made.read_by_step)
        rows[f"weights read by a step of {named} rows"] = "; about ".join(read)
    for leaf, pages in made.pages.items():
        name = f" ({leaf})" if leaf else ""
        tokens = plural("token", made.page_size)
        rows[f"bytes per page of {made.page_size} {tokens}{name}"] = (
            f"{made.bytes_per_page[leaf]:,}"
        )
        rows[f"pages{name}"] = f"{pages:,}"
    tokens = plural("token", made.max_seq_len)
    rows |= {
        f"concurrent requests of {made.max_seq_len:,} {tokens}": f"{made.concurrent_requests:,}",
        "longest context of one request": f"{made.longest_context:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    stdout.print(table)
    if made.concurrent_requests == max_batch_size:
        stdout.print(f"More would fit than --max-batch-size {max_batch_size} can use.")
    stdout.print(_reserved(made.reserve), soft_wrap=True, highlight=False)


def _reserved(reserve: Reserve) -> str:
    """A sentence on how the reserve is computed."""
    experts = f"; experts: {size_text(reserve.experts_bytes)}" if reserve.experts_bytes else ""
    return (
        f"Largest step: {reserve.tokens:,} {plural('token', reserve.tokens)} with "
        f"{reserve.values_per_token:,} values each, and {reserve.rows:,} "
        f"{plural('row', reserve.rows)} of {reserve.logits_per_row:,} logits in float32{experts}. "
        "The graph itself is not counted."
    )
