"""Checks of an AOTInductor package before torch loads it.

A package calls kvgraph's ops by their places in a table. torch opens a package without the table,
and each step fails.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgraph.contract.devices import Target
from kvgraph.contract.file_names import PROGRAM_NAME
from kvgraph.contract.plain import in_short
from kvgraph.errors import ArtifactError
from kvgraph.runtime.folder import ATTENTION, ArtifactFolder
from kvgraph.runtime.sessions.opening import opening

LIBRARY = ".wrapper.so"
OURS = "kvgraph."
"""Begin of the names of kvgraph's ops in a manifest."""


@contextmanager
def written(path: Path, what: str) -> Iterator[None]:
    """Convert errors of JSON in archive `path`, from which `what` is read, to ArtifactError."""
    try:
        yield
    except ArtifactError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{path}: expected {what} as compile writes it, got a damaged one "
            f"({type(error).__name__}: {in_short(error)}); compile the model again"
        ) from error


def require_ops(artifact: ArtifactFolder) -> None:
    """Raise ArtifactError unless a package `model.pt2` calls the ops that the manifest counts, and
    attention with the windows of the manifest's layers.

    A file that is no archive passes: torch refuses it. So does a program for CUDA.
    """
    path, manifest = artifact.file(PROGRAM_NAME), artifact.manifest
    if (manifest.backend, Target.parse(manifest.target).kind) != ("torch", "cpu"):
        return
    if not zipfile.is_zipfile(path):
        return
    with opening(path, "zipfile"), written(path, "a table of ops"):
        windows: dict[str, list[int]] = {}
        for name, window in _calls(path):
            windows.setdefault(name, []).append(window)
    for name in manifest.ops:
        if name.startswith(OURS) and name not in windows:
            raise ArtifactError(
                f"{path}: expected {name} from the manifest in its table of ops, got none; compile "
                "the model again"
            )
    artifact.require_windows(PROGRAM_NAME, windows.get(ATTENTION, []))


def _calls(path: Path) -> Iterator[tuple[str, int]]:
    """The op of each entry of the table, and its window: 0 if it has none."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for library in (name for name in names if name.endswith(LIBRARY)):
            table = f"{library.removesuffix('.so')}.json"
            for entry in json.loads(archive.read(table))["nodes"] if table in names else ():
                node = entry["node"]
                given = {each["name"]: each["arg"] for each in node["inputs"]}
                window = given["window"]["as_int"] if "window" in given else 0
                yield node["target"].replace("::", "."), int(window)
