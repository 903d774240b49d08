"""What a torch artifact contains: portable code, weights once, no generated sources."""

from __future__ import annotations

import json
import platform
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvgraph
from kvgraph.compiler.targets.torch import _why
from kvgraph.compiler.targets.weights import dense_weights

Compiled = Callable[..., Path]

FULL = (
    "expected room for the C++ compiler in the temporary folder "
    f"{tempfile.gettempdir()}, got 'No space left on device'; set TMPDIR to another folder"
)


def test_target_cpu_is_any_cpu_of_the_kind(compiled: Compiled) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the portable instruction set is x86-64's")
    with zipfile.ZipFile(compiled("tiny-llama", "torch") / "model.pt2") as package:
        names = package.namelist()
        described = [json.loads(package.read(n)) for n in names if n.endswith("_metadata.json")]
    assert {entry["AOTI_CPU_ISA"] for entry in described} == {"AVX2"}
    assert not [name for name in names if name.endswith(".cpp")]


def test_its_bytes_are_said_to_vary(compiled: Compiled) -> None:
    manifest = kvgraph.load(compiled("tiny-llama", "torch")).manifest
    assert manifest.nondeterministic_files == ["model.pt2"]


def test_tied_weights_have_one_owner_and_views_no_overlap() -> None:
    table = torch.arange(16.0).view(4, 4)
    state = {"a": table, "b": table, "c": table.T, "d": table[1:3]}
    tensors, aliases = dense_weights(state)
    assert aliases == {"b": "a"}
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: state[name].tolist() for name in "acd"
    }
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "AOTInductor failed: RuntimeError"),
        ("no such op\nhere", "AOTInductor failed: no such op"),
        (
            "C++ compile error\n\nOutput:\na.cpp:1: note\n a.cpp:2: error: x\na.cpp:3: error: y",
            "AOTInductor failed: C++ compile error: a.cpp:2: error: x",
        ),
        ("OSError: [Errno 28] No space left on device", FULL),
        ("C++ compile error\n\nfatal error: a.s: No space left on device", FULL),
    ],
)
def test_why_a_compile_failed(text: str, sentence: str) -> None:
    assert _why(RuntimeError(text)) == sentence


def test_a_full_folder_of_tmpdir_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python's own temporary folder is another one then."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp")
    error = RuntimeError("OSError: [Errno 28] No space left on device")
    assert f"in the temporary folder {tmp_path / 'full'}, got 'No space" in _why(error)
