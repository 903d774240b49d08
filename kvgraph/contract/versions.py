"""Versions of installed distributions, and of the kvgraph that wrote a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgraph.contract.plain import in_short
from kvgraph.errors import ArtifactError

UNKNOWN = "unknown"

VERSION = re.compile(r"[\w.+!-]{1,40}", re.ASCII)

AGAIN = "compile the model again"


def version_of(distribution: str = "kvgraph") -> str:
    """Return the version of an installed distribution; UNKNOWN if its metadata is not there, as in
    a folder that was copied, or in a frozen program."""
    from importlib import metadata  # slow: a manifest is read without it

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def other_version(written: object) -> str | None:
    """The version of the kvgraph that wrote a file, if it is known and is not this one's."""
    known = isinstance(written, str) and VERSION.fullmatch(written) and written != UNKNOWN
    return str(written) if known and version_of() not in (UNKNOWN, written) else None


def number_of_other(name: str, own: int, found: int, written: object) -> str:
    """The sentence on the number `name` of an artifact that is not this kvgraph's."""
    return f"{name}: expected {own} from this kvgraph, got {in_short(found)}{of_other(written)}"


def of_other(written: object) -> str:
    """Text for an error about a number that another version wrote: that version, if it is known,
    and the next step."""
    other = other_version(written)
    step = f" of kvgraph {other}; install that version, or {AGAIN}" if other else f"; {AGAIN}"
    return f"{step} with {version_of()}" if version_of() != UNKNOWN else step


@contextmanager
def read_from(path: Path, written: object) -> Iterator[None]:
    """Say that another version wrote the file `path`, if one did and the file cannot be read: it is
    not damaged then. ValueErrors of a file of this version pass."""
    try:
        yield
    except ValueError as error:
        other = None if isinstance(error, ArtifactError) else other_version(written)
        if other is None:
            raise
        step = f"install that version, or {AGAIN} with {version_of()}"
        raise ArtifactError(
            f"{path}: expected a file of kvgraph {version_of()}, got one of {other}, which has "
            f"other fields ({in_short(error)}); {step}"
        ) from error
