"""Code for GPUs, made where there is none: cubins, a weightless program, equal bytes, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvgraph
from kvgraph import ArtifactError, UnsupportedError
from kvgraph.kernels import variants
from kvgraph.runtime.artifact import verify
from tests.support.command_line import run

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
            ("rms_norm", ""),
            ("silu_mul", ""),
            ("increment_cache_lengths", ""),
        }
        for kernel in kernels:
            assert f"kernels/{arch}/{kernel['file']}" in manifest.files
            assert kernel["spill_stores"] == kernel["spill_loads"] == 0


def test_the_program_has_names_and_no_weights(artifact: Path) -> None:
    assert (artifact / "model.pt2").stat().st_size < 500_000
    program = torch.export.load(artifact / "model.pt2")
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    calls = Counter(n.target for n in nodes if "kvgraph" in str(n.target))
    assert calls == {
        torch.ops.kvgraph.update_and_attend.default: 4,
        torch.ops.kvgraph.rms_norm.default: 9,
        torch.ops.kvgraph.silu_mul.default: 4,
    }
    here = str(Path(__file__).parents[2])
    assert here.encode() not in (artifact / "model.pt2").read_bytes()


def test_a_runtime_finds_the_kernel_of_a_call(artifact: Path) -> None:
    """By what the call itself says, without Triton: the name of a variant says what is compiled."""
    files = {p.name for p in (artifact / "kernels" / "sm_90").glob("*.cubin")}
    wanted = [variants.increment_variant()]
    for node in torch.export.load(artifact / "model.pt2").graph.nodes:
        given = dict(node.kwargs)
        if node.target is torch.ops.kvgraph.rms_norm.default:
            residual = len(node.args) > 2
            wanted.append(variants.rms_norm_variant("bfloat16", 128, residual=residual, **given))
        elif node.target is torch.ops.kvgraph.silu_mul.default:
            wanted.append(variants.silu_mul_variant("bfloat16", node.meta["val"].shape[-1]))
    names = {f"{variant.name}.cubin" for variant in wanted}
    assert len(names) == 4, "the first norm adds nothing, all others do"
    assert names <= files


def test_compile_times_are_kept_and_not_hashed(artifact: Path) -> None:
    manifest = verify(artifact).manifest
    assert "build.json" not in manifest.files
    seconds = json.loads((artifact / "build.json").read_text())["compile_seconds"]
    assert set(seconds) == {name for name in manifest.files if name.endswith(".cubin")}
    assert all(0 < taken < 600 for taken in seconds.values())
    decode = next(name for name in seconds if "sm_90/paged_attention-decode-" in name)
    assert f"{seconds[decode]:.2f}" in run("inspect", artifact).out


@pytest.mark.parametrize("content", [None, "", "[]", '{"compile_seconds": 3}'])
def test_inspect_without_compile_times(artifact: Path, tmp_path: Path, content: str | None) -> None:
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    (copy / "build.json").unlink()
    if content is not None:
        (copy / "build.json").write_text(content)
    shown = run("inspect", copy)
    assert (shown.code, shown.err) == (0, "")
    assert "paged_attention decode" in shown.out


@pytest.mark.fresh_kernels
def test_equal_models_give_equal_bytes(
    artifact: Path, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    again = kvgraph.compile(
        model_folder("tiny-llama"),
        tmp_path / "again",
        target=TARGET,
        dtype="bfloat16",
        page_size=16,
        check=False,
    )
    assert again == verify(artifact).manifest
    assert again.nondeterministic_files == ["build.json"]


def test_a_compile_asks_for_no_cache_and_no_device_memory(tmp_path: Path) -> None:
    """The null manager is told of 60 GiB in a process that may take 16, reserved or written."""
    root = Path(__file__).parents[2]
    bench = [sys.executable, "-m", "benchmarks.compile", "--compile"]
    given = [root / "examples" / "tiny-llama", tmp_path / "out", "sm_90"]
    done = subprocess.run([*bench, *given], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["allocators"], found["driver"], found["device"]) == ([], False, False)
    reserve = (
        "import resource, numpy; limit = 16 << 30;"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit));"
        "numpy.zeros(60 << 30, numpy.uint8)"
    )
    control = subprocess.run([sys.executable, "-c", reserve], capture_output=True, text=True)
    assert "Unable to allocate 60.0 GiB" in control.stderr


def test_a_session_here_refuses_it(artifact: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    wanted = rf"target: expected an NVIDIA GPU for '{TARGET}' from this machine, got none"
    with pytest.raises(ArtifactError, match=wanted):
        kvgraph.load(artifact)


def test_a_changed_cubin_is_named(artifact: Path, tmp_path: Path) -> None:
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
        (
            {"backend": "triton"},
            r"backend: expected one of \['torch', .*\] for target cuda, got 'triton'",
        ),
        ({"page_size": 12}, r"page_size: expected one of \[16, 32, 48, 64, 96, 128, 256\], got 12"),
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
