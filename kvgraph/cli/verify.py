"""The command `kvgraph verify`."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgraph.cli.console import print_json, stdout, summary, terminable, working
from kvgraph.cli.options import ArtifactFolder, Json
from kvgraph.cli.show import ratio, titled
from kvgraph.contract.sizes import size_text
from kvgraph.errors import ArtifactError, RequestError
from kvgraph.plural import plural
from kvgraph.progress import task

if TYPE_CHECKING:
    from rich.table import Table

    from kvgraph.kernels.execute import Ran


def verify(
    artifact: ArtifactFolder,
    execute: Annotated[
        bool,
        typer.Option("--execute", help="Run its GPU kernels as PTX on this CPU; needs no GPU."),
    ] = False,
    record: Annotated[
        bool,
        typer.Option("--record", help="Keep what they did in the manifest, for `inspect`."),
    ] = False,
    json: Json = False,
) -> None:
    """Hash every file of an artifact and compare it with the manifest."""
    if record and not execute:
        raise RequestError("--record: expected --execute beside it, got none")
    if record and artifact.is_dir() and not os.access(artifact, os.W_OK, effective_ids=True):
        raise ArtifactError(
            f"{artifact}: expected a folder that can be written to for --record, got a read-only "
            "one; copy it, or leave --record out"
        )
    from kvgraph.runtime.artifact import verify as verify_artifact

    with working("hashing"):
        manifest = verify_artifact(artifact).manifest
    size = size_text(manifest.nbytes)
    if not json:
        count = len(manifest.files)
        stdout.print(f"{artifact}: intact: {count} {plural('file', count)}, {size}", soft_wrap=True)
    ran = _execute(artifact) if execute else []
    if record:
        from kvgraph.kernels.execute import record as keep

        manifest = keep(artifact, manifest, ran)
    if json:
        kernels = {"kernels": [asdict(each) for each in ran]} if execute else {}
        print_json(summary(artifact, manifest) | kernels)
    elif execute:
        _show(ran)


def _execute(artifact: Path) -> list[Ran]:
    """Run all kernels as PTX. KernelError at the first step with a wrong result."""
    from kvgraph.kernels.execute import executed, tasks_of
    from kvgraph.kernels.stored import read_kernels

    kernels = read_kernels(artifact)
    ran: list[Ran] = []
    tasks = len(tasks_of(kernels))
    with (
        terminable(),
        working("executing kernels"),
        task("executing", tasks, "steps") as advance,
        closing(executed(kernels, os.cpu_count() or 1)) as results,
    ):
        for found in results:
            ran += found
            advance(1)
    return ran


def _show(ran: list[Ran]) -> None:
    from kvgraph.kernels.execute import UNPROVED

    groups: dict[str, dict[str, list[Ran]]] = {}
    for each in ran:
        groups.setdefault(each.arch, {}).setdefault(each.title, []).append(each)
    for arch, kernels in groups.items():
        stdout.print(_table(arch, kernels))
    stdout.print(UNPROVED, soft_wrap=True)


def _table(arch: str, kernels: dict[str, list[Ran]]) -> Table:
    right = "1 kernel is" if len(kernels) == 1 else f"{len(kernels)} kernels are"
    table = titled(f"{arch}: {right} right, as PTX (sectors, conflicts: times ideal)")
    table.padding = (0, 1)
    table.add_column("kernel", no_wrap=True)
    for column in ("steps", "error", "limit", "sectors", "conflicts"):
        table.add_column(column, justify="right", no_wrap=True)
    for title, found in sorted(kernels.items()):
        worst = max(found, key=lambda r: r.error / r.limit if r.limit else r.error)
        table.add_row(
            title,
            str(len(found)),
            f"{worst.error:.0e}",
            f"{worst.limit:.0e}",
            ratio(sum(r.sectors for r in found), sum(r.ideal_sectors for r in found)),
            ratio(sum(r.wavefronts for r in found), sum(r.ideal_wavefronts for r in found)),
        )
    return table
