"""What is in place of a manifest, and its hash, names and sizes: one sentence that says which."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.errors import ArtifactError
from tests.bad_input.damage import edit_manifest, sentence
from tests.support.command_line import run

DAMAGED = "expected a manifest, got a damaged one"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.mkdir, f"{DAMAGED} (expected a file, got a folder)"),
        (os.mkfifo, f"{DAMAGED} (expected a file, got a pipe)"),
        (
            lambda path: path.symlink_to(path),
            "expected a file that can be read, got 'Too many levels of symbolic links'",
        ),
    ],
)
def test_something_else_in_place_of_it(
    artifact: Path, make: Callable[[Path], Any], said: str
) -> None:
    path = artifact / "manifest.json"
    path.unlink()
    make(path)
    assert sentence(run("verify", artifact)) == f"{path}: {said}"


def test_a_link_that_leads_nowhere(artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.unlink()
    path.symlink_to(artifact / "nowhere")
    said = f"{artifact}: expected manifest.json in an artifact, got a link that leads nowhere (not "
    assert sentence(run("verify", artifact)).startswith(said)


@pytest.mark.parametrize("content", ["null", "1", "[]"])
def test_no_object(artifact: Path, content: str) -> None:
    path = artifact / "manifest.json"
    path.write_text(content)
    expected = f"{path}: {DAMAGED} (expected an object, got {content})"
    assert sentence(run("verify", artifact)) == expected


@pytest.mark.parametrize("found", ["", "a" * 63, "A" * 64, 1, None])
def test_a_hash_that_is_none(artifact: Path, found: Any) -> None:
    path = artifact / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sha256": found}))
    expected = f"(sha256: expected a SHA-256 of 64 hex digits, got {found!r})"
    assert sentence(run("verify", artifact)) == f"{path}: {DAMAGED} {expected}"


def test_the_two_hashes_are_said_whole(artifact: Path) -> None:
    """Also where only their last digits differ."""
    path = artifact / "manifest.json"
    fields = json.loads(path.read_text())
    expected = fields["sha256"]
    found = expected[:-1] + ("0" if expected[-1] != "0" else "1")
    path.write_text(json.dumps(fields | {"sha256": found}))
    said = f"sha256: expected {expected} from its other fields, got {found}: the file was changed"
    assert sentence(run("verify", artifact)) == f"{path}: {said}"


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "edit",
    [
        lambda fields: fields.update(schema_version=LONG),
        lambda fields: fields.update(backend=LONG),
        lambda fields: fields.update(target=LONG),
        lambda fields: fields.update(dtype=LONG),
        lambda fields: fields.update(weights=LONG),
        lambda fields: fields["layout"].update(cache_strategy=LONG),
        lambda fields: fields["layout"].update({LONG: 1}),
        lambda fields: fields["inputs"][0].update(name=LONG),
        lambda fields: fields["inputs"][0].update(dims=[LONG]),
        lambda fields: fields["layers"][0].update(leaf=LONG),
        lambda fields: fields["model"].update(identity=LONG),
        lambda fields: fields["files"].update({f"../{LONG}": fields["files"]["model.onnx"]}),
        lambda fields: fields["files"]["model.onnx"].update(chunks=[LONG]),
        lambda fields: fields.update({LONG: 1}),
        lambda fields: fields.update(kvgraph_version="0.0.1", weights=LONG),
    ],
)
def test_a_long_text_makes_a_short_sentence(
    artifact: Path, edit: Callable[[dict[str, Any]], Any]
) -> None:
    edit_manifest(artifact, edit)
    with pytest.raises(ArtifactError) as raised:
        kvgraph.load(artifact)
    assert len(str(raised.value)) < 1500
