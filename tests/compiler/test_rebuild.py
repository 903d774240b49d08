"""Another engine from a TensorRT artifact: by TensorRT-RTX, and by an enterprise TensorRT.

The enterprise one is TensorRT-RTX under that name, without what it alone has: no wheel of the index
holds the real one. Its GPU is the fake driver's.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvgraph.errors import (
    ArtifactError,
    DeviceError,
    MissingDependencyError,
    UnsupportedError,
)
from kvgraph.kernels.record import archs_of
from kvgraph.ops import cuda_native
from kvgraph.rebuild import rebuild
from kvgraph.runtime.artifact import verify
from tests.support import command_line
from tests.support.artifacts import rehash
from tests.support.other_machine import other_machine

pytest.importorskip("tensorrt_rtx", reason="engines are built by TensorRT-RTX")
pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")

from kvgraph.compiler.targets.tensorrt import engine as trt_engine

Compiled = Callable[..., Path]

ENTERPRISE = """
from tensorrt_rtx import *
import tensorrt_rtx as _rtx
__version__ = "11.4.0.106"
del ComputeCapability
"""


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Path:
    return compiled("tiny-llama", "tensorrt", target="cuda:sm_86,sm_89,sm_120", dtype="bfloat16")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with an enterprise TensorRT and a GPU."""
    folder = tmp_path_factory.mktemp("machine")
    environment = other_machine(folder, {"tensorrt": ENTERPRISE}, "tensorrt", "11.4.0.106")
    libraries = importlib.util.find_spec("tensorrt_rtx_libs")
    assert libraries is not None
    assert libraries.submodule_search_locations
    (folder / "driver/libtensorrt_rtx.so").symlink_to(
        Path(libraries.submodule_search_locations[0], "libtensorrt_rtx.so.1")
    )
    return environment


def run(environment: dict[str, str], *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [*command_line.COMMAND, "compile", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_an_engine_for_fewer_architectures(artifact: Path, tmp_path: Path) -> None:
    old = verify(artifact).manifest
    stages: list[str] = []
    made = rebuild(artifact, tmp_path / "out", target="cuda:sm_89", progress=stages.append)
    new = verify(tmp_path / "out").manifest
    assert new == made
    assert (new.target, new.identity) == ("cuda:sm_89", old.identity)
    assert new.engine is not None
    assert old.engine is not None
    assert new.engine.archs == ["sm_89"]
    assert new.engine.profiles == old.engine.profiles
    same = {name for name, entry in old.files.items() if new.files.get(name) == entry}
    assert set(old.files) - same == {"model.engine"}, "its kernels are there already"
    assert stages[0] == "hashing"


def test_an_architecture_that_the_artifact_has_no_kernels_for(
    artifact: Path, tmp_path: Path
) -> None:
    rebuild(artifact, tmp_path / "out", target="cuda:sm_80")
    files = verify(tmp_path / "out").manifest.files
    folders = {name.split("/")[1] for name in files if name.endswith(".cubin")}
    assert folders == {"sm_80"}


def test_an_enterprise_tensorrt_builds_for_its_gpu(
    artifact: Path, tmp_path: Path, machine: dict[str, str]
) -> None:
    done = run({**machine, "FAKE_SM": "90"}, "--from-artifact", artifact, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    manifest = verify(tmp_path / "out").manifest
    assert manifest.target == "cuda:sm_90"
    assert manifest.tools["tensorrt"] == "11.4.0.106"
    assert manifest.engine is not None
    assert (manifest.engine.module, manifest.engine.version) == ("tensorrt", "11.4.0.106")
    assert manifest.engine.archs == ["sm_90"]
    described = json.loads((tmp_path / "out/kernels/tensorrt.json").read_text())
    record = base64.b64decode(described["kernels"][0])
    assert [arch.arch for arch in archs_of(record)] == [b"sm_90"]


def test_an_enterprise_tensorrt_builds_for_no_other_gpu(
    artifact: Path, tmp_path: Path, machine: dict[str, str]
) -> None:
    done = run(
        {**machine, "FAKE_SM": "89"}, "--from-artifact", artifact, "-o", tmp_path / "out",
        "--target", "cuda:sm_86",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "kvgraph: target: expected cuda:sm_89, this machine's GPU, which tensorrt builds for, got "
        "'cuda:sm_86'"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_enterprise_tensorrt_without_a_gpu(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgraph.rebuild.artifact._module", lambda: "tensorrt")
    monkeypatch.setattr(trt_engine, "require_module", lambda name: "11.4.0.106")

    def none(self: Any) -> tuple[int, int]:
        raise DeviceError("libcuda.so.1: expected an NVIDIA driver on this machine, got none")

    monkeypatch.setattr(cuda_native.Launcher, "compute_capability", none)
    with pytest.raises(DeviceError, match="expected an NVIDIA driver on this machine"):
        rebuild(artifact, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_aborted_builder_leaves_no_artifact(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt_engine, "_environment", lambda module, folder: None)
    with pytest.raises(UnsupportedError, match="killed by SIGABRT"):
        rebuild(artifact, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_here_builds_engines(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sentence = (
        "--from-artifact: expected tensorrt or tensorrt_rtx to build an engine with, found "
        "neither; pip install tensorrt (for this machine's GPU) or pip install 'kvgraph[tensorrt]'"
    )
    with pytest.raises(MissingDependencyError, match=f"^{re.escape(sentence)}$"):
        rebuild(artifact, tmp_path / "out")


def test_what_is_no_artifact_for_it(artifact: Path, compiled: Compiled, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"backend: expected 'tensorrt' .*, got 'onnx'$"):
        rebuild(compiled("tiny-llama"), tmp_path / "out")
    with pytest.raises(ArtifactError, match=r"expected an artifact folder, got nothing there$"):
        rebuild(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ArtifactError, match=r"expected no such folder yet, got one \(kept\)"):
        rebuild(artifact, artifact)
    with pytest.raises(UnsupportedError, match=r"target: expected kind cuda .*, got 'cpu'$"):
        rebuild(artifact, tmp_path / "out", target="cpu")
    with pytest.raises(UnsupportedError, match=r"target: expected some of .*, got 'sm_90'$"):
        rebuild(artifact, tmp_path / "out", target="cuda:sm_90")
    assert list(tmp_path.iterdir()) == []


def test_shapes_of_kernels_that_no_compile_writes(artifact: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(artifact, tmp_path / "artifact"))
    path = folder / "kernels/tensorrt.json"
    whole = json.loads(path.read_text())
    for field, value in (("shapes", [{}]), ("nodes", {"a": -1}), ("nodes", {"a": []})):
        path.write_text(json.dumps(whole | {field: value}))
        rehash(folder)
        with pytest.raises(ArtifactError, match=r"^kernels/tensorrt.json: expected what compile"):
            rebuild(folder, tmp_path / "out", target="cuda:sm_80")
        assert not (tmp_path / "out").exists()


def test_weights_at_other_places_than_the_graph_says(artifact: Path, tmp_path: Path) -> None:
    """With hashes that fit. An engine would hold other bytes without an error."""
    moved = Path(shutil.copytree(artifact, tmp_path / "moved"))
    weights = moved / "weights.safetensors"
    save_file(load_file(weights), weights, {"note": "x" * 999})
    rehash(moved)
    with pytest.raises(
        ArtifactError, match=r"expected \d+ bytes from byte \d+, as model.onnx says"
    ):
        rebuild(moved, tmp_path / "out", target="cuda:sm_89")
    assert list(tmp_path.iterdir()) == [moved]


@pytest.mark.parametrize(
    ("which", "sizes", "kind", "sentence"),
    [
        ("min", {"batch_size": -5}, ArtifactError,
         r"^{given}/manifest\.json: .*\(engine\.profiles\[0\]: batch_size: .* -5, 8 and 256\)$"),
        ("max", {"batch_size": 0}, ArtifactError,
         r"^{given}/manifest\.json: .*\(engine\.profiles\[0\]: batch_size: .* got 1, 8 and 0\)$"),
        ("max", {"total_seq_len": 2**31-1}, UnsupportedError,
         r"^{out}/model\.onnx: TensorRT cannot"),
    ],
)  # fmt: skip
def test_profiles_that_fit_no_engine(
    artifact: Path,
    tmp_path: Path,
    which: str,
    sizes: dict[str, int],
    kind: type[Exception],
    sentence: str,
) -> None:
    """The error does not name the hidden folder."""
    given = tmp_path / "given"
    shutil.copytree(artifact, given)
    path = given / "manifest.json"
    fields = json.loads(path.read_bytes())
    first, *_ = fields["engine"]["profiles"]
    fields["engine"]["profiles"] = [first | {which: first[which] | sizes}]
    path.write_text(json.dumps(fields))
    rehash(given)
    where = {"given": re.escape(str(given)), "out": re.escape(str(tmp_path / "out"))}
    with pytest.raises(kind, match=sentence.format(**where)):
        rebuild(given, tmp_path / "out", target="cuda:sm_89")
    assert list(tmp_path.iterdir()) == [given]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "compile: expected MODEL_DIR or --from-artifact, got neither"),
        (["models/x", "--from-artifact", "a"],
         "model: expected none with --from-artifact, got models/x"),
        (["--from-artifact", "a", "--dtype", "float16"],
         "dtype: expected none with --from-artifact, got float16"),
        (["--from-artifact", "a", "--max-batch-size", "8"],
         "max_batch_size: expected none with --from-artifact, got 8"),
        (["--from-artifact", "a", "--page-size", "16"],
         "page_size: expected none with --from-artifact, got 16"),
        (["--from-artifact", "a", "--page-size", "128"],
         "page_size: expected none with --from-artifact, got 128"),
        (["--from-artifact", "a", "--cache", "paged"],
         "cache: expected none with --from-artifact, got paged"),
        (["--from-artifact", "a", "--tp", "1"],
         "tp: expected none with --from-artifact, got 1"),
        (["--from-artifact", "a", "--check"],
         "check: expected none with --from-artifact, got True"),
        (["--from-artifact", "a", "--quality"],
         "quality: expected none with --from-artifact, got True"),
        (["--from-artifact", "a", "--no-quality"],
         "quality: expected none with --from-artifact, got False"),
        (["--from-artifact", "a", "--quality-text", __file__],
         f"quality_text: expected none with --from-artifact, got {__file__}"),
        (["--from-artifact", "a", "--no-check"],
         "check: expected none with --from-artifact, got False"),
    ],
)  # fmt: skip
def test_what_the_command_line_refuses(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    outcome = command_line.run("compile", *arguments, "-o", tmp_path / "out")
    assert (outcome.code, outcome.err.strip()) == (2, f"kvgraph: {sentence}")
