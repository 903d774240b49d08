"""Versions of installed distributions."""

from __future__ import annotations

from importlib import metadata

UNKNOWN = "unknown"


def version_of(distribution: str = "kvgraph") -> str:
    """Return the version of an installed distribution; UNKNOWN if its metadata is not there, as in
    a folder that was copied, or in a frozen program."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return UNKNOWN
