"""Rejects a program's archive if loading it would unpickle anything.

torch.export.load unpickles some entries of an archive, which runs code; compile writes no pickles.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

from kvgraph.errors import ArtifactError

CONFIG, SAMPLES = "_config.json", "/sample_inputs/"
PICKLED = (".pt", ".pkl", ".pickle")
OBJECTS = ("custom_obj_", "opaque_obj_")
"""Prefixes of the names of constants that are not tensors."""


def require_no_pickles(path: Path) -> None:
    """Raise ArtifactError if archive `path` has an entry that would be unpickled; name it."""
    with zipfile.ZipFile(path) as archive:
        for name in _pickles(archive):
            raise ArtifactError(
                f"{path}: expected a program without pickles, as compile writes it, got {name}"
            )


def _pickles(archive: zipfile.ZipFile) -> Iterator[str]:
    for entry in archive.infolist():
        name = entry.filename
        if name.endswith(CONFIG):
            yield from _of_config(name, json.loads(archive.read(entry)))
        elif entry.file_size and (SAMPLES in name or name.endswith(PICKLED)):
            yield name


def _of_config(name: str, config: dict[str, dict[str, dict[str, object]]]) -> Iterator[str]:
    for tensor, payload in config["config"].items():
        if payload.get("use_pickle") or str(payload["path_name"]).startswith(OBJECTS):
            yield f"{tensor} of {name}"
