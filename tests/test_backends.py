"""A package adds a backend: kvgraph compiles with it, checks what it made, and runs that."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import kvgraph
from kvgraph.compiler.options import check_weights, resolve
from kvgraph.contract.manifest import read_manifest
from kvgraph.runtime.sessions.program_file import require_no_code
from tests.support import eager
from tests.support.command_line import COMMAND
from tests.support.packages import install_backend

SOURCE = Path(eager.__file__).read_text()


def test_a_backend_of_another_package(
    tmp_path: Path, model_folder: Callable[[str], Path], compiled: Callable[..., Path]
) -> None:
    packages, out = tmp_path / "packages", tmp_path / "out"
    packages.mkdir()
    install_backend(packages, "eager", SOURCE)
    environment = os.environ | {"PYTHONPATH": str(packages)}

    def command(*words: object) -> str:
        line = [*COMMAND, *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert not re.search("Traceback|[Ww]arning|weights_only", done.stderr), done.stderr
        return done.stdout

    command("compile", model_folder("tiny-llama"), "-o", out, "--backend", "eager")
    manifest = read_manifest(out)
    assert (manifest.backend, [*manifest.tools]) == ("eager", ["torch"])
    require_no_code(out / "model.pt2")
    sizes = {name: (out / name).stat().st_size for name in manifest.files}
    assert sizes["model.pt2"] < sizes["weights.safetensors"] / 4, "weights are stored once"
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")
    assert "intact" in command("verify", out)
    prompt = ("The", "--max-new-tokens", 12, "--json")
    ours = command("generate", compiled("tiny-llama", dtype="float32", weights="fp32"), *prompt)
    theirs = command("generate", out, *prompt)
    assert json.loads(theirs)["token_ids"] == json.loads(ours)["token_ids"]

    with pytest.raises(kvgraph.ArtifactError, match=r"manifest.json: backend: .* got 'eager'"):
        kvgraph.load(out)


def test_weights_that_a_backend_does_not_pack() -> None:
    message = "weights: expected none for backend eager, which packs none, got 'int8'"
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        check_weights("int8", kvgraph.Target.parse("cpu"), eager.BACKEND, None)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(("float32", "expected"), [(True, "fp32"), (False, None)])
def test_default_weights_of_a_backend_that_packs_none(
    float32: bool, expected: str | None, is_quantized: bool
) -> None:
    support = replace(eager.BACKEND.targets["cpu"], float32=float32)
    backend = replace(eager.BACKEND, targets={"cpu": support})
    request = replace(resolve("cpu", None, cache_dtype=None, page_size=None), backend=backend)
    assert request.settled_weights("bfloat16", is_quantized=is_quantized) == expected
