"""Arguments and options of more than one command; choices come from the contract's tables."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvgraph.contract.backends import SESSIONS
from kvgraph.contract.dtypes import ACTIVATIONS, POOLS, WEIGHTS
from kvgraph.contract.params import DEFAULT_PAGE_SIZE
from kvgraph.errors import RequestError

Dtype = StrEnum("Dtype", ACTIVATIONS)  # type: ignore[misc]  # the members are in the table
Weights = StrEnum("Weights", WEIGHTS)  # type: ignore[misc]
CacheDtype = StrEnum("CacheDtype", POOLS)  # type: ignore[misc]


def named(given: str) -> Path:
    """The path of an option or argument. BadParameter for "": Path("") is the working folder."""
    if not given:
        raise typer.BadParameter("expected a path, got ''")
    return Path(given)


def text_of(option: str, given: str) -> str:
    """Text that was given as UTF-8 in any locale: others leave its bytes as surrogates.

    RequestError for bytes that are not UTF-8.
    """
    try:
        return given.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise RequestError(f"{option}: expected text in UTF-8, got {error}") from error


MODEL_DIR = typer.Argument(
    metavar="MODEL_DIR", parser=named, help="Folder of a Hugging Face checkpoint, or a GGUF file."
)
ArtifactFolder = Annotated[
    Path, typer.Argument(metavar="DIR", parser=named, help="Artifact folder.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Hash every file again, also unchanged ones.")
]

DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Type of activations and weights [default: the checkpoint's].")
]
WeightsOption = Annotated[
    Weights | None,
    typer.Option(
        help="Type of linear layers and experts; int8, int4 or stored on cuda [default: with onnx "
        "on cpu and torch on cuda, stored for a quantised checkpoint; with onnx on cpu, else bf16 "
        "for a bfloat16 checkpoint and fp32 for others; in all other cases the activations' dtype]."
    ),
]
CacheDtypeOption = Annotated[
    CacheDtype | None, typer.Option(help="Type of the pool [default: the activations' dtype].")
]
PageSize = Annotated[
    int | None, typer.Option(help=f"Tokens of a page [default: {DEFAULT_PAGE_SIZE}].")
]
POOL_MEMORY = (
    "[default: 1 GiB, or a quarter of the memory if that is less; on a GPU, 0.9 of what is free "
    "after weights and the largest step]."
)
NumPages = Annotated[int | None, typer.Option(help=f"Pages of the pool {POOL_MEMORY}")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="CPU threads [default: one for each physical core; with backend torch, one for each "
        "processor].",
    ),
]

CollectiveTimeout = Annotated[
    float | None,
    typer.Option(min=0.001, help="Seconds that a rank waits for another [default: 60]."),
]

MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1, tokens that are already in the text are less likely.")
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
SessionName = Annotated[
    str | None, typer.Option(help=f"{', '.join(SESSIONS)} [default: the backend's].")
]

HostMemory = Annotated[
    str | None, typer.Option(help="Keep pages in host memory too, such as 4GiB.")
]
DiskFolder = Annotated[  # str: an empty one is refused where it is used
    str | None,
    typer.Option(metavar="PATH", help="Folder that keeps pages from run to run, for one user."),
]
DiskBytes = Annotated[str | None, typer.Option(help="Size limit of --disk [default: 16GiB].")]
RemoteServer = Annotated[
    str | None, typer.Option(help="Server that keeps pages for many machines: redis://...")
]


def require_file(option: str, path: Path | None) -> None:
    """Raise RequestError for a given path that is a folder or does not exist; a pipe is allowed."""
    if path is not None and (path.is_dir() or not path.exists()):
        got = "a folder" if path.is_dir() else "nothing there"
        raise RequestError(f"{option}: expected a file at {path}, got {got}")
