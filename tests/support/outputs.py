"""Folders that are artifacts to a compile's output, and a user who may not write them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgraph.compiler.output import staging
from kvgraph.contract.plain import to_json


def write_artifact(folder: Path, **content: str) -> None:
    """Files under a manifest that lists them, of no schema in particular."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    files = {name: {"size": len(text)} for name, text in content.items()}
    fields: dict[str, object] = {"files": files, "nondeterministic_files": []}
    fields["sha256"] = hashlib.sha256(to_json(fields)).hexdigest()
    (folder / "manifest.json").write_bytes(to_json(fields))


def snapshot(folder: Path) -> dict[str, str | None]:
    """Every path under `folder`, hidden ones too, with its text."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else None for p in paths}


def replace(out: Path, **content: str) -> None:
    with staging(out, force=True) as made:
        write_artifact(made, **content)


@contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Run as one who may look at `folder` and its parents."""
    was = os.geteuid()
    if was == 0:  # root may write anywhere
        for parent in folder.parents:
            if not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)
