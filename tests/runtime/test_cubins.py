"""An artifact for GPUs on machines that are not what it was compiled for, and on one that is.

The driver is a fake one (tests/support/fake_driver.c) in a process of its own: which cubins are
asked for, with which arguments, and what is refused. That they compute is tests/kernels' matter.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_driver import build

pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")

PRELUDE = """
import ctypes, json, sys
from pathlib import Path
import kvgraph
from kvgraph.contract.manifest import read_manifest
from kvgraph.errors import KVGraphError
from kvgraph.kernels import launch, variants
from kvgraph.kernels.launch import Sizes
from kvgraph.kernels.shapes import AttentionShape, PoolShape, Rope
from kvgraph.runtime.sessions.cubins import Cubins
folder = Path(sys.argv[1])
def cubins_of(folder):
    return Cubins(folder, read_manifest(folder).files)
def said(function, *arguments):
    try:
        function(*arguments)
    except KVGraphError as error:
        return [type(error).__name__, str(error)]
def log():
    function = ctypes.CDLL("libcuda.so.1").fake_log
    function.restype = ctypes.c_char_p
    return function().decode().splitlines()
"""

Drive = Callable[..., Any]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Path:
    return compiled("tiny-llama", None, target="cuda:sm_80,sm_90,sm_120", dtype="bfloat16")


@pytest.fixture
def drive(driver: Path, artifact: Path) -> Drive:
    def run(code: str, folder: Path = artifact, **environment: str) -> Any:
        given = {**os.environ, "LD_LIBRARY_PATH": str(driver), **environment}
        script = f"{PRELUDE}\n{code}\nprint(json.dumps(result))"
        command = [sys.executable, "-c", script, str(folder)]
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LD_LIBRARY_PATH": ""}, r"expected an NVIDIA GPU for '{target}' from this machine, got "
         r"none \(libcuda\.so\.1: [^()]*\)"),
        ({"FAKE_COUNT": "0"}, r"expected an NVIDIA GPU for '{target}' from this machine, got none "
         r"\(the driver has no device\)"),
        ({"FAKE_SM": "75"}, r"expected code for sm_75 of this machine's GPU, got '{target}' .*"),
        ({"FAKE_SM": "100"}, r"expected code for sm_100 of this machine's GPU, got '{target}' .*"),
        ({"FAKE_SM": "121"}, r"expected code for sm_121 of this machine's GPU, got '{target}' "
         r"\(.* 12\.0 for sm_120a code, got 12\.1 .*\); compile with --target cuda:sm_121"),
        ({"FAKE_SM": "103"}, r"expected code for sm_103 of this machine's GPU, got '{target}' "
         r"\(.* 12\.0 for sm_120a code, got 10\.3 .*\)"),
        ({"FAKE_DRIVER": "11060"}, r"expected code for sm_90 of this machine's GPU, got '{target}' "
         r"\(.*driver.*12\.8.*11\.6.*\)"),
    ],
    ids=["no-driver", "no-device", "older-gpu", "newer-gpu", "next-gpu", "unknown-gpu",
         "old-driver"],
)  # fmt: skip
def test_another_machine_is_refused_with_both_names(
    drive: Drive, artifact: Path, environment: dict[str, str], message: str
) -> None:
    kind, text = drive("result = said(kvgraph.load, folder)", **environment)
    target = "cuda:sm_80,sm_90,sm_120"
    expected = f"{artifact}/manifest.json: target: " + message.replace("{target}", target)
    assert kind == "ArtifactError"
    assert re.fullmatch(expected, text), text


@pytest.mark.parametrize(
    ("sm", "arch"), [("80", "sm_80"), ("89", "sm_80"), ("90", "sm_90"), ("120", "sm_120")]
)
def test_the_nearest_architecture_is_loaded(drive: Drive, sm: str, arch: str) -> None:
    code = """
kvgraph.load(folder)
cubins = cubins_of(folder)
kernels = json.loads((folder / "kernels" / cubins.arch / "kernels.json").read_text())
result = [cubins.arch, cubins.multiprocessors, len(kernels), log()]
"""
    found, multiprocessors, count, calls = drive(code, FAKE_SM=sm)
    assert (found, multiprocessors) == (arch, 132)
    assert sum(call.startswith("cuModuleLoadData") for call in calls) == count


def test_what_a_gpu_is_said_to_run_is_what_loads_on_it(drive: Drive) -> None:
    """Triton's code of 9.0 and newer is for one compute capability: `code_of` says so before."""
    code = """
from kvgraph.contract.devices import code_of
from kvgraph.ops.cuda_native import launcher
cuda, result = launcher(), []
for arch in ("sm_80", "sm_90", "sm_120"):
    image = next((folder / "kernels" / arch).glob("*.cubin")).read_bytes()
    result.append([said(cuda.check_arch, code_of(arch)), said(cuda.load, image, arch)])
"""
    for sm, runs in (("80", 0), ("87", 0), ("90", 1), ("91", None), ("120", 2), ("121", None)):
        found = drive(code, FAKE_SM=sm)
        assert [checked is None for checked, _ in found] == [i == runs for i in range(3)]
        for checked, loaded in found:
            assert loaded == checked or checked is None


def test_a_step_launches_what_the_plan_says(
    drive: Drive, model_folder: Callable[[str], Path]
) -> None:
    """Grid, block and the values of a decode step; the last two pointers are null."""
    code = """
cubins = cubins_of(folder)
cache = PoolShape.of(kvgraph.load(folder).params(), "bfloat16")
rope = Rope(cache.head_dim, False)
shape = AttentionShape(cache, HEADS, cache.head_dim**-0.5, rope=rope)
cubins.require(variants.attention_variants(shape, "sm_90"))
sizes = Sizes(3, 3, 1, 900, 57)
plan = launch.plan_update_and_attend(
    shape, "sm_90", sizes, 2, multiprocessors=cubins.multiprocessors
)
names = {a for one in plan.launches for a in one.arguments if isinstance(a, str)}
cubins.launch(plan, {name: 4096 * (i + 1) for i, name in enumerate(sorted(names))}, 0x77)
result = [
    [[one.variant.kernel.name, *one.grid, 32 * one.variant.num_warps] for one in plan.launches],
    [line for line in log() if line.startswith("cuLaunchKernel")],
]
"""
    heads = json.loads((model_folder("tiny-llama") / "config.json").read_text())[
        "num_attention_heads"
    ]
    planned, launched = drive(f"HEADS = {heads}\n{code}")
    assert [name for name, *_ in planned] == ["store_kv", "paged_attention", "merge_parts"]
    for (name, x, y, threads), line in zip(planned, launched, strict=True):
        assert line.startswith(f"cuLaunchKernel {name} ")
        assert f" grid {x},{y},1 block {threads},1,1 " in line
        assert " stream 77:" in line


def test_a_changed_cubin_and_a_missing_kernel_are_named(
    drive: Drive, artifact: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(artifact, tmp_path / "copy"))
    cubin = next((folder / "kernels" / "sm_90").glob("merge_parts-*.cubin"))
    content = bytearray(cubin.read_bytes())
    content[-1] ^= 1
    cubin.write_bytes(content)
    kind, text = drive("result = said(cubins_of, folder)", folder)
    assert kind == "ArtifactError"
    assert text.startswith(
        f"{folder}/kernels: expected kernels that GPU 0 (sm_90) can run, got ['sm_120', "
        "'sm_80', 'sm_90'] (sm_90: image: expected SHA-256 "
    )
    code = """
cubins = cubins_of(folder)
result = said(cubins.require, [variants.rms_norm_variant("float16", 77, 1e-5)])
"""
    kind, text = drive(code)
    assert kind == "ArtifactError"
    assert "sm_90: expected kernel rms_norm-" in text
    assert text.endswith("of this kvgraph, got none; compile the model again")


def test_only_files_of_the_manifest_are_loaded(
    drive: Drive, artifact: Path, tmp_path: Path
) -> None:
    """An older artifact's folder may be left beside them, or its files in their folder."""
    folder = Path(shutil.copytree(artifact, tmp_path / "copy"))
    shutil.copytree(folder / "kernels" / "sm_80", folder / "kernels" / "sm_86")
    assert drive("result = cubins_of(folder).arch", folder, FAKE_SM="86") == "sm_80"
    path = folder / "kernels" / "sm_90" / "kernels.json"
    entries = json.loads(path.read_text())
    left = shutil.copy(path.with_name(entries[0]["file"]), path.with_name("left.cubin"))
    path.write_text(json.dumps([entries[0] | {"file": Path(left).name}]))
    kind, text = drive("result = said(cubins_of, folder)", folder)
    assert kind == "ArtifactError"
    assert f"{path}: expected files that the manifest lists, got 'left.cubin'" in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_warps": 1}, "expected a kernel of this version of kvgraph (paged_attention-decode-"),
        ({"alignment": 1}, "got one with other alignment; compile it again"),
        ({"parameters": [["q", "*bf16"]]}, "got one with other parameters; compile it again"),
        ({"entry": "merge_parts"}, "got one with other entry; compile it again"),
        ({"shared": 1 << 20}, "bytes of shared memory on sm_90, got 1048576"),
    ],
)
def test_launches_that_contradict_the_kernel_are_refused(
    drive: Drive, artifact: Path, tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    folder = Path(shutil.copytree(artifact, tmp_path / "copy"))
    path = folder / "kernels" / "sm_90" / "kernels.json"
    entries = json.loads(path.read_text())
    next(entry for entry in entries if entry["role"] == "decode").update(change)
    path.write_text(json.dumps(entries))
    kind, text = drive("result = said(cubins_of, folder)", folder)
    assert kind == "ArtifactError"
    assert sentence in text


def test_memory_that_is_too_little_is_no_fault_of_the_kernels(drive: Drive, artifact: Path) -> None:
    for number, name, then in (
        (2, "CapacityError", "expected memory on the GPU for what the file holds, got too little"),
        (700, "DeviceLostError", "cuModuleLoadData: "),
    ):
        code = "result = said(cubins_of, folder)"
        kind, text = drive(code, FAKE_FAIL=f"cuModuleLoadData={number}")
        assert kind == name
        assert text.startswith(f"{artifact}/kernels/sm_90: {then}")
