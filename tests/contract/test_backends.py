"""The table of backends: what it names exists, and what is wrong with a package's is said."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvgraph.compiler.options import resolve
from kvgraph.contract import backends
from kvgraph.contract.backends import (
    OURS,
    SESSIONS,
    default_backend,
    find_backend,
    imported,
)
from kvgraph.errors import UnsupportedError
from tests.support.packages import install_backend

EMPTY = """
from kvgraph.contract.backends import Backend
BACKEND = Backend(name="{}", targets={{}}, files=())
"""
SUPPORTS = [
    pytest.param(backend, kind, id=f"{backend.name}-{kind}")
    for backend in OURS
    for kind in backend.targets
]


@pytest.mark.parametrize(("backend", "kind"), SUPPORTS)
def test_what_a_backend_names_is_there(backend: Any, kind: str) -> None:
    support = backend.targets[kind]
    entries = [support.lower, support.require, support.rewrite, support.cut_windows]
    for entry in filter(None, entries):
        assert callable(imported(entry))
    for runner in support.sessions:
        assert find_spec(runner.entry.partition(":")[0])
    assert set(support.options) <= {"archs", "bounds", "progress", "weight_bits"}
    assert "weights.safetensors" in backend.files


def test_every_target_has_one_default() -> None:
    assert [default_backend(kind).name for kind in ("cpu", "cuda")] == ["onnx", "torch"]
    for kind in ("cpu", "cuda"):
        found = [each for each in OURS if kind in each.targets and each.targets[kind].is_default]
        assert len(found) == 1
    assert sorted(SESSIONS) == ["onnxruntime", "reference", "tensorrt", "torch"]


def test_a_portable_target_has_one_backend() -> None:
    assert [each.name for each in OURS if each.portable] == ["tensorrt"]
    request = resolve("cuda:portable", None, cache_dtype=None, page_size=None)
    assert (request.backend.name, request.why_default) == (
        "tensorrt",
        ", the only one for cuda:portable",
    )


def test_a_backend_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delattr(backends, "_entry_points")  # not read for a name of ours
        assert find_backend("torch") in OURS
    assert find_backend("tensorrt").name == find_backend("tensorrt", "cuda").name == "tensorrt"
    ours = r"\['torch', 'onnx', 'tensorrt', 'torch-tensorrt'\] for target cuda, "
    with pytest.raises(UnsupportedError, match=ours):
        find_backend("triton", "cuda")


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("broken", "1 / 0", r"expected a Backend from broken:BACKEND, got ZeroDivisionError: "),
        ("text", "BACKEND = 'a'", r"expected a Backend of this name from text:BACKEND, got 'a'"),
        (
            "misnamed",
            EMPTY.format("other"),
            r"expected a Backend of this name from misnamed:BACKEND, got Backend\(name='other'",
        ),
    ],
)
def test_a_package_whose_backend_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, message: str
) -> None:
    install_backend(tmp_path, name, source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match=f"backend '{name}': {message}"):
        find_backend(name)


def test_two_packages_with_one_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        install_backend(tmp_path / folder, "double", "", package=folder)
        monkeypatch.syspath_prepend(tmp_path / folder)
    message = "backend 'double': expected one package to add it, got one:BACKEND and two:BACKEND"
    with pytest.raises(UnsupportedError, match=message):
        find_backend("double")


def test_backends_of_packages_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(tmp_path, "nowhere", EMPTY.format("nowhere"))
    monkeypatch.syspath_prepend(tmp_path)
    assert find_backend("nowhere").targets == {}
    with pytest.raises(
        UnsupportedError,
        match=r"'onnx', 'torch', 'tensorrt', 'torch-tensorrt', 'nowhere'\], got 'x'",
    ):
        find_backend("x")
    with pytest.raises(
        UnsupportedError, match=r"\['onnx', 'torch'\] for target cpu, got 'nowhere'"
    ):
        find_backend("nowhere", "cpu")
