"""The commands `kvgraph cache`: show, verify and clear the folder of a disk tier."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvgraph.bars import Bars
from kvgraph.cli.console import print_json, stderr, stdout
from kvgraph.cli.options import Json, named
from kvgraph.cli.show import titled
from kvgraph.plural import plural
from kvgraph.progress import task

app = typer.Typer(no_args_is_help=True, help="The folder of a disk tier.")

CacheFolder = Annotated[
    Path, typer.Argument(metavar="DIR", parser=named, help="Folder of a disk tier.")
]


@app.command("stat")
def stat(folder: CacheFolder, json: Json = False) -> None:
    """Show whose pages the folder holds."""
    from kvgraph.kv.tiers.disk.tools import describe

    models, versions = describe(folder)
    if json:
        print_json(
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


@app.command("verify")
def verify(folder: CacheFolder, json: Json = False) -> None:
    """Check every page and remove the damaged ones; exit code 1 if there were any."""
    from kvgraph.kv.tiers.disk.tools import describe, verify

    checked = damaged = 0
    total = sum(model.pages for model in describe(folder)[0])
    with Bars(stderr), task("checking pages", total, "pages") as advance:
        for state in verify(folder):
            checked, damaged = state
            advance(1)
    if json:
        print_json({"checked": checked, "damaged": damaged})
    else:
        pages = plural("page", checked)
        stdout.print(f"{folder}: {checked} {pages}, {damaged} damaged and removed", soft_wrap=True)
    if damaged:
        raise typer.Exit(1)


@app.command("clear")
def clear(folder: CacheFolder, json: Json = False) -> None:
    """Remove the pages of all models."""
    from kvgraph.kv.tiers.disk.tools import clear

    removed = clear(folder)
    if json:
        print_json({"removed": removed})
    else:
        stdout.print(f"{folder}: {removed} {plural('page', removed)} removed", soft_wrap=True)
