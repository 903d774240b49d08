"""A graph that differs from the manifest: it is refused as it is opened, and by `verify`."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import kvgraph
from kvgraph.contract.manifest import read_manifest
from kvgraph.errors import ArtifactError
from kvgraph.runtime.artifact import Artifact, verify
from tests.bad_input.damage import edit_manifest
from tests.support.artifacts import Compiled, rehash

PACKAGE = "model.pt2"


@pytest.fixture
def artifact(compiled: Compiled, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled("tiny-llama", "torch"), tmp_path / "artifact"))


@pytest.fixture
def for_cuda(compiled: Compiled, tmp_path: Path) -> Path:
    pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    whole = compiled("tiny-llama", "torch", target="cuda:sm_90")
    return Path(shutil.copytree(whole, tmp_path / "artifact"))


def rewrite(folder: Path, change: Callable[[str, bytes], Mapping[str, bytes]]) -> None:
    """Write the archive again; `change` gives the entries in place of one."""
    path = folder / PACKAGE
    with zipfile.ZipFile(path) as old:
        content = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in content.items():
            for other, others in change(name, data).items():
                new.writestr(other, others)
    rehash(folder)


def refused(folder: Path, check: Callable[[Path], object]) -> str:
    with pytest.raises(ArtifactError) as caught:
        check(folder)
    (sentence,) = str(caught.value).splitlines()
    return sentence


def opened(folder: Path) -> object:
    return kvgraph.load(folder).session()


def load_program(folder: Path) -> object:
    from kvgraph.runtime.sessions import program

    gpu: Any = type(
        "Gpu",
        (),
        {
            "device": torch.device("cpu"),
            "arch": "sm_90",
            "multiprocessors": 132,
            "require": lambda self, variants: list(variants),
            "launch": None,
        },
    )()
    return program.load_program(Artifact(folder, read_manifest(folder)), gpu)


def without_table(name: str, data: bytes) -> dict[str, bytes]:
    return {} if name.endswith("wrapper.json") else {name: data}


def of_another_library(name: str, data: bytes) -> dict[str, bytes]:
    return {name.replace("wrapper.json", "x.wrapper.json"): data}


def with_another_op(name: str, data: bytes) -> dict[str, bytes]:
    return {name: data.replace(b"kvgraph::update_and_attend", b"kvgraph::experts")}


@pytest.mark.parametrize("change", [without_table, of_another_library, with_another_op])
def test_a_package_without_the_table_of_our_ops(
    change: Callable[[str, bytes], dict[str, bytes]], artifact: Path
) -> None:
    rewrite(artifact, change)
    for check in (verify, opened):
        assert refused(artifact, check) == (
            f"{artifact / PACKAGE}: expected kvgraph.update_and_attend from the manifest in its "
            "table of ops, got none; compile the model again"
        )


@pytest.mark.parametrize("text", [b"", b"[]", b'{"nodes": [7]}', b'{"nodes": [{"node": {}}]}'])
@pytest.mark.parametrize("table", ["wrapper.json", "weights.json"])
def test_a_damaged_table_is_named(table: str, text: bytes, artifact: Path) -> None:
    rewrite(artifact, lambda name, data: {name: text if name.endswith(table) else data})
    for check in (verify, opened):
        what = "ops" if table == "wrapper.json" else "weights"
        said = refused(artifact, check)
        assert f"{PACKAGE}: expected a table of {what} as compile writes it, got a damaged" in said


def test_names_in_a_package_that_no_folder_takes(artifact: Path) -> None:
    with zipfile.ZipFile(artifact / PACKAGE, "a") as archive:
        archive.writestr("model/" + "x" * 3000, b"x")
    rehash(artifact)
    said = refused(artifact, opened)
    assert f"{PACKAGE}: expected a file that torch {torch.__version__} opens" in said
    assert os.strerror(errno.ENAMETOOLONG) in said
    assert len(said) < 1000


def other_window(fields: dict[str, Any]) -> None:
    fields["layout"]["window_size"] = 8
    for layer in fields["layers"]:
        layer["window"] = 8


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_windows_that_the_graph_does_not_have(
    backend: str, compiled: Compiled, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(compiled("tiny-llama", backend), tmp_path / "artifact"))
    edit_manifest(folder, other_window)
    expected = "windows of attention: expected [8, 8, 8, 8] from the manifest, got [0, 0, 0, 0]"
    for check in (verify, opened):
        assert expected in refused(folder, check)


def test_windows_that_a_program_for_cuda_does_not_have(for_cuda: Path) -> None:
    load_program(for_cuda)
    edit_manifest(for_cuda, other_window)
    assert "windows of attention: expected [8, 8, 8, 8]" in refused(for_cuda, load_program)


def set_vocab(size: int) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields["model"]["vocab_size"] = fields["outputs"][0]["dims"][1] = size

    return change


@pytest.mark.parametrize("size", [2047, 2049])
def test_a_vocabulary_that_a_program_for_cuda_does_not_have(size: int, for_cuda: Path) -> None:
    edit_manifest(for_cuda, set_vocab(size))
    said = refused(for_cuda, load_program)
    assert f"logits: expected float32 ['num_logits', {size}] from the manifest, got" in said


@pytest.mark.parametrize("size", [2047, 2049])
def test_a_step_with_other_logits_than_the_manifests(size: int, artifact: Path) -> None:
    """An AOTInductor package does not tell the shape of its logits before a step."""
    edit_manifest(artifact, set_vocab(size))
    engine = kvgraph.Engine(artifact, num_pages=8)
    with pytest.raises(ArtifactError, match=rf"logits: expected {size} columns from the manifest"):
        engine.generate([[5, 6, 7]], kvgraph.SamplingParams(max_new_tokens=2))


def test_a_damaged_program_makes_no_noise(
    for_cuda: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def odd(name: str, data: bytes) -> dict[str, bytes]:
        if not name.endswith("models/model.json"):
            return {name: data}
        program = json.loads(data)
        program["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.nope.nope.default"
        return {name: json.dumps(program).encode()}

    level = logging.getLogger("torch.export").level
    rewrite(for_cuda, odd)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = refused(for_cuda, load_program)
    assert f"{PACKAGE}: expected a file that torch {torch.__version__} opens" in said
    assert (capfd.readouterr(), caught, caplog.records) == (("", ""), [], [])
    assert logging.getLogger("torch.export").level == level
