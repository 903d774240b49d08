"""Artifacts that another version of kvgraph wrote: they are not called damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgraph.contract.versions import version_of
from kvgraph.ops.specs import ABI_VERSION
from tests.bad_input.damage import edit_manifest, sentence
from tests.support.command_line import run


@pytest.mark.parametrize("version", [0, 1, 99])
def test_another_schema(artifact: Path, version: int) -> None:
    """Said first, also if another schema has more fields."""

    def edit(fields: dict[str, Any]) -> None:
        fields.clear()
        fields.update(schema_version=version, novelty=[1])

    edit_manifest(artifact, edit)
    for command in ("verify", "inspect"):
        expected = (
            f"schema_version: expected 2 from this kvgraph, got {version}; compile the model again "
            f"with {version_of()}"
        )
        assert sentence(run(command, artifact)) == f"{artifact}/manifest.json: {expected}"


@pytest.mark.parametrize(("name", "ours"), [("schema_version", 2), ("op_abi_version", ABI_VERSION)])
def test_a_number_of_another_version(artifact: Path, name: str, ours: int) -> None:
    edit_manifest(artifact, lambda fields: fields.update({name: 99, "kvgraph_version": "9.1"}))
    assert sentence(run("verify", artifact)) == (
        f"{artifact}/manifest.json: {name}: expected {ours} from this kvgraph, got 99 of kvgraph "
        f"9.1; install that version, or compile the model again with {version_of()}"
    )


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_inspect_shows_an_artifact_of_another_abi(artifact: Path, options: tuple[str]) -> None:
    shown = run("inspect", artifact, *options).out
    edit_manifest(artifact, lambda fields: fields.update(op_abi_version=4))
    outcome = run("inspect", artifact, *options)
    assert outcome.code == 0
    changed = shown.replace(f'"op_abi_version": {ABI_VERSION}', '"op_abi_version": 4')
    assert outcome.out == changed
    assert outcome.err == (
        f"warning: {artifact}/manifest.json: op_abi_version: expected {ABI_VERSION} from this "
        f"kvgraph, got 4; compile the model again with {version_of()}\n"
    )


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda fields: fields.update(novelty=1), "novelty: expected no field of this name, got "),
        (lambda fields: fields["layout"].update(sinks=0), "sinks"),
        (lambda fields: fields.pop("passes"), "passes: expected list"),
    ],
)
def test_fields_of_another_version_are_no_damage(
    artifact: Path, edit: Callable[[dict[str, Any]], Any], said: str
) -> None:
    edit_manifest(artifact, lambda fields: (edit(fields), fields.update(kvgraph_version="9.1")))
    for command in ("verify", "inspect"):
        text = sentence(run(command, artifact))
        assert text.startswith(
            f"{artifact}/manifest.json: expected a file of kvgraph {version_of()}, got one of 9.1, "
            "which has other fields ("
        )
        assert said in text
        step = f"); install that version, or compile the model again with {version_of()}"
        assert text.endswith(step)
