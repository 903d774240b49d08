"""What the TensorRT session refuses: engines, machines, weights and steps that do not fit."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the fake runtime evaluates ONNX graphs")

import kvgraph
from kvgraph import SamplingParams, TextContext
from kvgraph.contract.manifest import write_manifest
from kvgraph.errors import (
    ArtifactError,
    BindingError,
    CapacityError,
    DeviceError,
    KernelError,
    MissingDependencyError,
)
from kvgraph.runtime.artifact import verify
from tests.runtime.drive import prefill
from tests.runtime.fake_tensorrt import FakeContext
from tests.runtime.tensorrt_machine import ONE_TOKEN, Machine, manager_of


def test_an_engine_of_another_version(gpu: Machine) -> None:
    artifact = gpu.artifact(engine={"version": "1.6.0.2"})
    sentence = (
        r"model\.engine: expected an engine of tensorrt_rtx 1\.7\.1\.116 \(installed here\), got "
        r"one of 1\.6\.0\.2; build it again: kvgraph compile --from-artifact"
    )
    with pytest.raises(ArtifactError, match=sentence):
        artifact.session()


def test_an_engine_of_another_architecture(gpu: Machine) -> None:
    artifact = gpu.artifact(engine={"archs": ["sm_89", "sm_120"]})
    sentence = (
        r"model\.engine: expected an engine for sm_86 \(cuda:0, Fake GPU\), got one for sm_89, "
        "sm_120"
    )
    with pytest.raises(ArtifactError, match=sentence):
        artifact.session()


def test_an_engine_of_no_fixed_architecture_runs(gpu: Machine) -> None:
    gpu.artifact(engine={"archs": []}, target="cuda:portable").session()


def test_an_engine_that_tensorrt_refuses(gpu: Machine) -> None:
    artifact = gpu.artifact()
    (artifact.folder / "model.engine").write_bytes(b"not an engine")
    sentence = (
        "expected an engine that tensorrt_rtx 1.7.1.116 takes on sm_86, got one that it refuses: "
        "magicTag does not match"
    )
    with pytest.raises(ArtifactError, match=sentence):
        artifact.session()
    (artifact.folder / "model.engine").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"model\.engine: expected a file from the manifest"):
        artifact.session()


def test_tensorrt_that_is_not_installed(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = gpu.artifact()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(MissingDependencyError, match=r"tensorrt_rtx: version 1\.7\.1\.116 needed"):
        artifact.session()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingDependencyError, match=r"cuda-bindings.*pip install 'kvgraph\[tens"):
        artifact.session()


def test_a_module_that_is_not_tensorrt_is_not_imported(gpu: Machine) -> None:
    artifact = gpu.artifact(engine={"module": "antigravity"})
    with pytest.raises(ArtifactError, match=r"engine\.module: expected one of .*got 'antigravity'"):
        artifact.session()
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("engine", [None, {"profiles": []}])
def test_a_manifest_without_an_engine(gpu: Machine, engine: dict[str, Any] | None) -> None:
    """Where it is read, verified or asked for a session."""
    artifact = gpu.artifact()
    info = engine and dataclasses.replace(artifact.manifest.engine, **engine)  # type: ignore[type-var]
    manifest = dataclasses.replace(artifact.manifest, engine=info)
    write_manifest(artifact.folder, manifest)
    read = (
        kvgraph.load,
        verify,
        lambda _: dataclasses.replace(artifact, manifest=manifest).session(),
    )
    for each in read:
        with pytest.raises(ArtifactError, match=r"engine: expected what built model\.engine"):
            each(artifact.folder)


def test_a_machine_without_a_driver(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = gpu.artifact()

    def missing(Flags: int) -> Any:
        raise RuntimeError("libcuda.so.1 was not found\nmore")

    monkeypatch.setattr(gpu.driver, "cuInit", missing, raising=False)
    with pytest.raises(DeviceError, match=r"expected an NVIDIA driver .* \(libcuda.so.1 was not"):
        artifact.session()


def test_a_device_that_is_not_there(gpu: Machine) -> None:
    from kvgraph.runtime.sessions.tensorrt.session import TensorRTSession

    with pytest.raises(DeviceError, match="cuda:3: expected one of 1 devices of this machine"):
        TensorRTSession(gpu.artifact(), device=3)


def test_plugins_that_tensorrt_refuses(gpu: Machine) -> None:
    gpu.trt.options["plugins"] = "getCreators is not exported"
    with pytest.raises(KernelError, match=r"libtensorrt\.so.*getCreators is not exported"):
        gpu.artifact().session()


def test_an_engine_with_its_plugins_inside_needs_no_library(gpu: Machine) -> None:
    gpu.artifact(engine={"host_code": True}).session()
    assert gpu.trt.libraries == []


MISBOUND = {
    "dtype": ({"dtypes": {"tokens": "float32"}}, "tokens: expected dtype INT32.*, got FLOAT"),
    "dims": (
        {"dims": {"logits": ["num_logits", 7]}},
        r"logits: expected dims \['num_logits', \d+\] from the manifest, got \[-1, 7\]",
    ),
    "static": (
        {"dims": {"tokens": [8]}},
        r"tokens: expected dims \['total_seq_len'\] from the manifest, got \[8\]",
    ),
    "rank": ({"dims": {"lookup_table": [-1]}}, "lookup_table: expected dims"),
    "missing": ({"without": "lookup_table"}, "expected an input or output 'lookup_table' from"),
    "format": ({"formats": {"kv_blocks": 5}}, "kv_blocks: expected format LINEAR.*, got CHW32"),
    "alias": (
        {"aliases": {"kv_blocks_out": "tokens"}},
        "kv_blocks_out: expected an alias of kv_blocks from the manifest, got tokens",
    ),
    "aliased logits": (
        {"aliases": {"logits": "tokens"}},
        "logits: expected an alias of None from the manifest, got tokens",
    ),
    "host": ({"hosted": ["tokens"]}, "tokens: expected memory DEVICE.*, got HOST"),
}


@pytest.mark.parametrize("case", MISBOUND)
def test_an_engine_that_is_not_the_manifests(gpu: Machine, case: str) -> None:
    said, sentence = MISBOUND[case]
    gpu.trt.options.update(said)
    with pytest.raises(ArtifactError, match=sentence):
        gpu.artifact().session()


def test_an_alias_that_the_engine_promises_is_the_manifests(gpu: Machine) -> None:
    gpu.trt.options["aliases"] = {"kv_blocks_out": "kv_blocks"}
    gpu.artifact().session()


def test_profiles_that_are_not_the_manifests(gpu: Machine) -> None:
    artifact = gpu.artifact()
    path = artifact.folder / "model.engine"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"profiles": said["profiles"][:1]}))
    with pytest.raises(ArtifactError, match=r"expected 2 optimisation profiles.*, got 1"):
        artifact.session()
    said["profiles"][1]["max"]["total_seq_len"] = 95
    path.write_text(json.dumps(said))
    sentence = r"tokens: expected shapes .*\(96,\)\] in profile 'prefill' of the manifest, got"
    with pytest.raises(ArtifactError, match=sentence):
        artifact.session()


def test_a_step_beyond_every_profile(gpu: Machine) -> None:
    session = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", list(range(3, 103)))
    sentence = "total_seq_len: expected 1 to 96 from the engine's profiles, got 100"
    with pytest.raises(BindingError, match=sentence):
        prefill(session, manager, context)


def test_more_pages_than_the_engine_takes(gpu: Machine) -> None:
    session = gpu.artifact().session()
    with pytest.raises(BindingError, match=r"num_page_slots: expected 1 to 512 .*, got 513"):
        manager_of(session, num_pages=512)


def test_an_engine_keeps_its_batches_within_the_profiles(gpu: Machine) -> None:
    engine = kvgraph.Engine(gpu.artifact(), num_pages=64)  # 64 rows and 2048 tokens by default
    done = engine.generate([[3 + i] * 20 for i in range(9)], SamplingParams(max_new_tokens=2))
    assert len(done) == 9
    assert max(context.most_tokens for context in gpu.engine.contexts) == 96


def test_memory_of_another_session(gpu: Machine) -> None:
    artifact = gpu.artifact()
    session, other = artifact.session(), artifact.session()
    manager = manager_of(other)
    with pytest.raises(BindingError, match="kv_blocks: expected memory that this session alloc"):
        prefill(session, manager, TextContext("a", [3]))
    kv = manager.runtime_inputs([[TextContext("a", [3])]])
    kv.inputs[0].kv_blocks.handle = np.zeros(kv.inputs[0].kv_blocks.shape, np.float32)
    with pytest.raises(BindingError, match=r"kv_blocks: expected memory .*, got ndarray"):
        session.run(ONE_TOKEN, kv)


def test_a_pool_that_does_not_fit(gpu: Machine) -> None:
    session = gpu.artifact().session()
    gpu.driver.memory = 1 << 16
    sentence = r"kv_blocks \[512, .*cuMemAlloc: expected CUDA_SUCCESS, got CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(CapacityError, match=sentence):
        manager_of(session, num_pages=511)


def test_an_execution_that_fails_says_why(gpu: Machine) -> None:
    gpu.trt.options["fails"] = "misaligned   address\nin layer 3"
    session = gpu.artifact().session()
    with pytest.raises(KernelError, match="tensorrt: execution: misaligned address in layer 3"):
        prefill(session, manager_of(session), TextContext("a", [3]))


def test_a_capture_that_fails_is_ended(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = gpu.artifact().session()
    manager = manager_of(session)
    run = FakeContext.execute_async_v3

    def refuse(self: FakeContext, stream_handle: int) -> bool:
        return self.driver.captured is None and run(self, stream_handle)

    monkeypatch.setattr(FakeContext, "execute_async_v3", refuse)
    manager.claim("a")
    context = TextContext("a", [3])
    manager.alloc(context)
    with pytest.raises(KernelError, match="tensorrt: execution"):
        session.run(ONE_TOKEN, manager.runtime_inputs([[context]]), capture=True)
    assert gpu.driver.captured is None
    assert session.run(ONE_TOKEN, manager.runtime_inputs([[context]])).shape[0] == 1
