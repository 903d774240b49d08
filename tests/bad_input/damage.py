"""What is wrong with an input, and the one sentence that a refusal is."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgraph.contract.hashes import hash_files
from kvgraph.contract.plain import to_json
from tests.support.command_line import Outcome, run


def sentence(outcome: Outcome) -> str:
    """The one sentence of a refusal, without its prefix."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert re.fullmatch(r"kvgraph: \S[^\n]*\n", outcome.err), outcome.err
    return outcome.err.removeprefix("kvgraph: ").removesuffix("\n")


def snapshot(folder: Path) -> dict[str, Any]:
    """Every path under `folder`, hidden ones too, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refused(model: Path, tmp_path: Path, *options: Any) -> str:
    """The sentence of a compile that leaves everything as it was."""
    out = tmp_path / "out" / "model.kvg"
    before = snapshot(tmp_path)
    text = sentence(run("compile", model, "-o", out, *options))
    assert snapshot(tmp_path) == before
    assert not out.exists()
    return text


def configure(folder: Path, **changes: Any) -> None:
    """Write config.json, or change fields of the one that is there (None removes one)."""
    path = folder / "config.json"
    folder.mkdir(exist_ok=True)
    config = json.loads(path.read_text()) if path.exists() else {}
    config |= changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


NORM = "model.layers.2.input_layernorm.weight"


PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
"""At which the library panics, with an exception that is no Exception."""


def retokenize(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change fields as a program would that writes manifests: the hash is right again."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    edit(fields)
    fields["sha256"] = hashlib.sha256(to_json(fields)).hexdigest()
    path.write_text(json.dumps(fields))


def rehashed(path: Path) -> dict[str, Any]:
    entry = hash_files(path.parent, [path.name])[path.name]
    return {"size": entry.size, "chunks": entry.chunks}
