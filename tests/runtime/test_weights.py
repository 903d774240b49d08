"""Weights that torch programs read by name: they have the dtypes and shapes of the program."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

import kvgraph
from kvgraph.contract.file_names import WEIGHTS_TABLE
from kvgraph.contract.manifest import read_manifest
from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import ArtifactError
from kvgraph.runtime.artifact import verify
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.weights import read_table
from tests.support.artifacts import Compiled, rehash

torch = pytest.importorskip("torch", reason="runs the program")

from safetensors.torch import load_file, save_file  # noqa: E402

from kvgraph.runtime.sessions.program import read_program  # noqa: E402

CPU, CUDA = {"backend": "torch"}, {"backend": None, "target": "cuda:sm_90", "dtype": "float32"}
MODEL, WEIGHTS = "model.pt2", "weights.safetensors"
DOWN = "model.model.layers.0.mlp.down_proj.weight"
NORM = "model.model.layers.0.input_layernorm.weight"
HEAD = "model.lm_head.weight"


@pytest.fixture(params=[CPU, CUDA], ids=["cpu", "cuda"])
def artifact(request: pytest.FixtureRequest, compiled: Compiled, tmp_path: Path) -> Path:
    if request.param is CUDA:
        pytest.importorskip("triton", reason="compiles the kernels")
    return Path(shutil.copytree(compiled("tiny-llama", **request.param), tmp_path / "artifact"))


def opened(folder: Path) -> object:
    """A session; of an artifact for CUDA, only its program."""
    artifact = ArtifactFolder(folder, read_manifest(folder))
    if is_for_cuda(folder):
        return read_program(artifact, torch.device("cpu"))
    return kvgraph.load(folder).session()


def is_for_cuda(folder: Path) -> bool:
    return read_manifest(folder).target.startswith("cuda")


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write the weights again with another tensor `name`, and hashes that fit."""
    path = folder / WEIGHTS
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    save_file(tensors | {name: edit(tensors[name]).contiguous()}, path, metadata)
    rehash(folder)


def without_table(folder: Path) -> None:
    """As an older kvgraph wrote it."""
    path = folder / MODEL
    with zipfile.ZipFile(path) as old:
        kept = [(e, old.read(e)) for e in old.infolist() if e.filename != WEIGHTS_TABLE]
    with zipfile.ZipFile(path, "w") as new:
        for entry, data in kept:
            new.writestr(entry, data)
    rehash(folder)


@pytest.mark.parametrize(
    ("name", "edit", "expected", "got"),
    [
        (DOWN, lambda t: t.T, "F32 [128, 352]", "F32 [352, 128]"),
        (DOWN, lambda t: t[:64], "F32 [128, 352]", "F32 [64, 352]"),
        (DOWN, lambda t: t.half(), "F32 [128, 352]", "F16 [128, 352]"),
        (DOWN, lambda t: t.view(torch.int32), "F32 [128, 352]", "I32 [128, 352]"),
        (NORM, lambda t: t[:8], "F32 [128]", "F32 [8]"),
        (HEAD, lambda t: t[:1], "F32 [2048, 128]", "F32 [1, 128]"),
    ],
)
def test_weights_of_another_dtype_or_shape(
    name: str,
    edit: Callable[[torch.Tensor], torch.Tensor],
    expected: str,
    got: str,
    artifact: Path,
) -> None:
    """Kernels would read beyond them, or compute other tokens without an error."""
    change(artifact, name, edit)
    for check in (verify, opened):
        with pytest.raises(ArtifactError) as error:
            check(artifact)
        assert str(error.value) == (
            f"{artifact / WEIGHTS}: {name}: expected {expected}, as model.pt2 says, got {got}; "
            "compile the model again"
        )


def test_the_table_is_what_compile_writes(artifact: Path) -> None:
    """Tied names are in the table too."""
    written = {name: (at.dtype, at.shape) for name, at in read_layout(artifact / WEIGHTS).items()}
    table = read_table(verify(artifact))
    with safe_open(artifact / WEIGHTS, framework="np") as file:
        tied = file.metadata() or {}
    assert written
    assert tied or not is_for_cuda(artifact)  # an AOTInductor package has one name for both
    assert set(tied) <= set(table)
    assert {name: table[name] for name in written} == written
    opened(artifact)


def test_an_artifact_of_an_older_compile_opens(artifact: Path) -> None:
    """An AOTInductor package without the table tells names only; a program has its shapes."""
    without_table(artifact)
    assert read_table(verify(artifact)) == {}
    opened(artifact)
    change(artifact, DOWN, lambda t: t[:64])
    verify(artifact)
    if is_for_cuda(artifact):
        with pytest.raises(ArtifactError, match=r"expected F32 \[128, 352\], as model.pt2 says"):
            opened(artifact)
