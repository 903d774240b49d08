"""Code for GPUs, made where there is none: cubins, a weightless program, equal bytes, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvgraph
from kvgraph import ArtifactError, UnsupportedError
from kvgraph.runtime.artifact import verify

pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")

Compiled = Callable[..., Path]
TARGET = "cuda:sm_80,sm_90,sm_120"


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Path:
    return compiled("tiny-llama", None, target=TARGET, dtype="bfloat16")


def test_every_architecture_has_its_kernels(artifact: Path) -> None:
    manifest = verify(artifact).manifest
    assert (manifest.backend, manifest.target) == ("torch", TARGET)
    for arch in ("sm_80", "sm_90", "sm_120"):
        kernels = json.loads((artifact / "kernels" / arch / "kernels.json").read_text())
        roles = {(kernel["kernel"], kernel["role"]) for kernel in kernels}
        assert roles == {
            ("store_kv", ""),
            ("paged_attention", "prefill"),
            ("paged_attention", "decode"),
            ("paged_attention", "decode_split"),
            ("merge_parts", ""),
        }
        for kernel in kernels:
            assert f"kernels/{arch}/{kernel['file']}" in manifest.files
            assert kernel["spill_stores"] == kernel["spill_loads"] == 0


def test_the_program_has_names_and_no_weights(artifact: Path) -> None:
    assert (artifact / "model.pt2").stat().st_size < 500_000
    program = torch.export.load(artifact / "model.pt2")
    calls = [n.target for n in program.graph.nodes if "kvgraph" in str(n.target)]
    assert calls == [torch.ops.kvgraph.update_and_attend.default] * 4
    here = str(Path(__file__).parents[2])
    assert here.encode() not in (artifact / "model.pt2").read_bytes()


def test_equal_models_give_equal_bytes(
    artifact: Path, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    again = kvgraph.compile(
        model_folder("tiny-llama"),
        tmp_path / "again",
        target=TARGET,
        dtype="bfloat16",
        page_size=16,
    )
    assert again == verify(artifact).manifest
    assert again.nondeterministic_files == []


def test_a_session_here_refuses_it(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=rf"expected 'cpu' from this machine's .*'{TARGET}'"):
        kvgraph.load(artifact)


def test_a_changed_cubin_is_named(artifact: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    cubin = next((copy / "kernels" / "sm_90").glob("paged_attention-decode-*.cubin"))
    content = bytearray(cubin.read_bytes())
    content[1000] ^= 1
    cubin.write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"{cubin.name}: chunk 0: expected SHA-256"):
        verify(copy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cuda:sm_42"}, r"'cuda:sm_42': expected one of \['sm_75', .*"),
        ({"target": "cuda"}, r"'cuda': expected one of \['sm_75', .*"),
        ({"backend": "onnx"}, r"backend: expected one of \['torch'\] for target cuda, got 'onnx'"),
        ({"page_size": 12}, r"page_size: expected one of \[16, 32, 64, 128, 256\], got 12"),
        ({"cache": "padded"}, "cache: expected 'paged' for target cuda, got 'padded'"),
        ({"target": "cuda:sm_75", "dtype": "bfloat16"}, "dtype: .* on sm_75, got bfloat16"),
    ],
)
def test_what_no_kernel_supports(
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    model_folder: Callable[[str], Path],
) -> None:
    settings = {"target": "cuda:sm_90", "page_size": 16} | options
    with pytest.raises(UnsupportedError, match=message):
        kvgraph.compile(model_folder("tiny-llama"), tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
