"""The TensorRT session: what it binds, captures and refuses, over a fake driver and runtime.

The last test runs the real thing where there is a GPU that TensorRT supports.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the fake runtime evaluates ONNX graphs")

import kvgraph
from kvgraph import SamplingParams, TextContext
from kvgraph.contract.manifest import (
    EngineInfo,
    Manifest,
    ProfileInfo,
    hash_file,
    read_manifest,
    write_manifest,
)
from kvgraph.errors import (
    ArtifactError,
    BindingError,
    CapacityError,
    DeviceError,
    KernelError,
    MissingDependencyError,
    UnsupportedError,
)
from kvgraph.runtime.sessions.cuda_driver import CudaDevice
from kvgraph.runtime.sessions.device_arrays import Slot
from kvgraph.runtime.sessions.tensorrt import engine as tensorrt_engine
from tests.runtime.drive import prefill, run_step
from tests.runtime.fake_cuda import CUresult, FakeDriver, install
from tests.runtime.fake_tensorrt import FakeContext, FakeEngine, FakeTensorRT

PROMPTS = ["The import statement", "A list", "def f(x):", "In Python, a dictionary"]
GREEDY = SamplingParams(max_new_tokens=12)


@dataclasses.dataclass
class Machine:
    """A machine with a fake GPU and a fake TensorRT, and artifacts for it."""

    driver: FakeDriver
    trt: FakeTensorRT
    make: Callable[..., Path]

    def artifact(self, model: str = "tiny-llama", **changes: Any) -> Any:
        return kvgraph.load(self.make(model, **changes), verify=False)

    @property
    def engine(self) -> FakeEngine:
        return self.trt.engines[-1]


@pytest.fixture
def gpu(compiled: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    driver = FakeDriver()
    trt = FakeTensorRT(driver, hosted=["max_lengths"])
    install(monkeypatch, driver, tensorrt_rtx=trt)
    monkeypatch.setattr(tensorrt_engine, "library_path", lambda name: Path(f"lib{name}.so"))

    def make(model: str, **changes: Any) -> Path:
        options = changes.pop("options", {})
        folder = tmp_path / f"artifact-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(compiled(model, **options), folder)
        return as_tensorrt(folder, **changes)

    return Machine(driver, trt, make)


def profiles(manifest: Manifest) -> list[ProfileInfo]:
    """Decode: up to 8 rows of one token; prefill: up to 96 tokens of 8 rows."""
    dims = {d.partition(" + ")[0] for b in manifest.inputs for d in b.dims if isinstance(d, str)}
    least = dict.fromkeys(dims, 1)
    most = {d: 512 if d.endswith("_page_slots") else 64 for d in dims}
    most |= {d: n for d, n in {"num_steps": 1, "max_seq_len": 2048}.items() if d in dims}
    rows = {"batch_size": 8, "num_logits": 8, "total_seq_len": 8}
    decode = most | rows
    prefill = most | rows | {"num_logits": 96, "total_seq_len": 96}
    return [
        ProfileInfo("decode", least, decode, decode),
        ProfileInfo("prefill", least, prefill, prefill),
    ]


def as_tensorrt(
    folder: Path,
    engine: dict[str, Any] | None = None,
    target: str = "cuda:sm_86",
    **described: Any,
) -> Path:
    """Turn an ONNX artifact into one of backend tensorrt whose engine is the fake's."""
    manifest = read_manifest(folder)
    ranges = profiles(manifest)
    said = {
        "onnx": str(folder / "model.onnx"),
        "profiles": [dataclasses.asdict(p) for p in ranges],
        **described,
    }
    (folder / "model.engine").write_text(json.dumps(said))
    info = EngineInfo("tensorrt_rtx", "1.7.1.116", ["sm_86"], ranges)

    def moved(bindings: list[Any]) -> list[Any]:
        return [dataclasses.replace(b, device=b.device.replace("cpu", "cuda")) for b in bindings]

    write_manifest(
        folder,
        dataclasses.replace(
            manifest,
            backend="tensorrt",
            target=target,
            inputs=moved(manifest.inputs),
            outputs=moved(manifest.outputs),
            files=manifest.files | {"model.engine": hash_file(folder / "model.engine")},
            engine=dataclasses.replace(info, **(engine or {})),
        ),
    )
    return folder


def tokens_of(engine: kvgraph.Engine, prompts: list[Any]) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(prompts, GREEDY)]


# -- tokens


def test_tokens_are_those_of_the_onnx_session(gpu: Machine, compiled: Callable[..., Path]) -> None:
    engine = kvgraph.Engine(gpu.artifact(), max_batch_size=4, max_batch_tokens=24, num_pages=64)
    expected = kvgraph.Engine(compiled("tiny-llama"), max_batch_size=4, num_pages=64)
    assert tokens_of(engine, PROMPTS) == tokens_of(expected, PROMPTS)
    assert gpu.trt.libraries == ["libtensorrt.so"]
    assert gpu.driver.calls["cuGraphLaunch"] > 2 * gpu.driver.calls["cuStreamEndCapture"] > 0


@pytest.mark.parametrize("hosted", [["max_lengths"], []], ids=["host", "device"])
@pytest.mark.parametrize("options", [{}, {"cache_dtype": "int8"}], ids=["two-pools", "int8"])
def test_tokens_of_two_pools_and_of_quantised_ones(
    gpu: Machine, compiled: Callable[..., Path], options: Any, hosted: list[str]
) -> None:
    prompts = [[5, 6, 7, 8, 9] * 7, [11, 12]]
    artifact = gpu.artifact("gemma2", options=options)
    names = [s.name for s in artifact.signature.inputs if s.name.endswith("max_lengths")]
    gpu.trt.options["hosted"] = names if hosted else []
    engine = kvgraph.Engine(artifact, max_batch_size=2, max_batch_tokens=24)
    expected = kvgraph.Engine(compiled("gemma2", **options), max_batch_size=2)
    assert tokens_of(engine, prompts) == tokens_of(expected, prompts)
    assert gpu.driver.calls["cuGraphLaunch"] > 0


def test_tokens_of_a_cache_without_pages(gpu: Machine, compiled: Callable[..., Path]) -> None:
    artifact = gpu.artifact("tiny-llama", options={"cache": "continuous"})
    engine = kvgraph.Engine(artifact, max_batch_size=2, max_batch_tokens=24)
    expected = kvgraph.Engine(compiled("tiny-llama", cache="continuous"), max_batch_size=2)
    assert tokens_of(engine, PROMPTS[:2]) == tokens_of(expected, PROMPTS[:2])


def test_a_padded_cache_is_refused(gpu: Machine) -> None:
    artifact = gpu.artifact(options={"cache": "padded"})
    with pytest.raises(UnsupportedError, match=r"expected a paged or continuous cache, .*a padded"):
        artifact.session()


ONE_TOKEN = kvgraph.ModelInputs(
    np.array([3], np.int32), np.array([0, 1], np.int32), np.zeros(1, np.int32)
)


def manager_of(session: Any, num_pages: int = 16) -> kvgraph.PagedKVCacheManager:
    params = session.artifact.params()
    return kvgraph.PagedKVCacheManager(params, session, num_pages, max_batch_size=4)


def test_a_pool_has_one_address_and_index_tensors_keep_theirs(gpu: Machine) -> None:
    session = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", [3, 4, 5])
    prefill(session, manager, context)
    context.update(7)
    before = dict(gpu.engine.contexts[0].addresses)
    run_step(session, manager, context)
    pool = manager.get_device_buffer(0).all_buffers[0].handle
    decode, longer = gpu.engine.contexts[0].addresses, before
    assert decode["kv_blocks"] == decode["kv_blocks_out"] == pool.address
    assert {n: a for n, a in decode.items() if n != "logits"} == {
        n: a for n, a in longer.items() if n != "logits"
    }


def test_a_size_that_comes_again_is_captured_once_and_replayed(gpu: Machine) -> None:
    session = gpu.artifact().session()
    plain = session.artifact.session("reference")
    logits = []
    for each, capture in ((session, True), (plain, False)):
        manager = manager_of(each)
        context = TextContext("a", list(range(3, 12)))
        prefill(each, manager, context)
        rows = []
        for token in (5, 6, 7, 8):
            context.update(token)
            manager.alloc(context)
            kv = manager.runtime_inputs(
                [[context]], batch_characteristics=kvgraph.BatchCharacteristics(1, 1, 32)
            )
            inputs = kvgraph.ModelInputs(
                np.array([token], np.int32), np.array([0, 1], np.int32), np.zeros(1, np.int32)
            )
            rows.append(each.run(inputs, kv, capture=capture).copy())
            context.update()
            manager.step([[context]])
        logits.append(np.concatenate(rows))
    np.testing.assert_array_equal(*logits)
    assert gpu.driver.calls["cuStreamEndCapture"] == 1
    assert gpu.driver.calls["cuGraphLaunch"] == 3


def test_an_engine_that_cannot_be_captured_says_so_once(gpu: Machine) -> None:
    gpu.trt.options["capturable"] = False
    artifact = gpu.artifact()
    session = artifact.session()
    engine = kvgraph.Engine(artifact, session=session, max_batch_size=2, num_pages=16)
    with pytest.warns(UserWarning, match=r"model\.engine: expected an engine that can be captured"):
        first = tokens_of(engine, [[3, 4, 5]])
    again = kvgraph.Engine(artifact, session=session, max_batch_size=2, num_pages=16)
    assert tokens_of(again, [[3, 4, 5]]) == first
    assert gpu.driver.calls["cuGraphLaunch"] == 0


def test_another_pool_is_another_graph(gpu: Machine) -> None:
    session = gpu.artifact().session()
    for manager in (manager_of(session), manager_of(session)):
        context = TextContext("a", [3])
        manager.claim("a")
        manager.alloc(context)
        kv = manager.runtime_inputs([[context]])
        session.run(ONE_TOKEN, kv, capture=True)
    assert gpu.driver.calls["cuStreamEndCapture"] == 2


def test_logits_are_valid_until_the_next_call_but_one(gpu: Machine) -> None:
    session = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", [3, 4, 5])
    first = prefill(session, manager, context)
    kept = first.copy()
    context.update(7)
    run_step(session, manager, context)
    np.testing.assert_array_equal(first, kept)


def test_a_step_without_logits_is_run(gpu: Machine) -> None:
    session = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", [3, 4, 5])
    manager.claim("a")
    manager.alloc(context)
    inputs = kvgraph.ModelInputs(
        np.array([3, 4, 5], np.int32), np.array([0, 3], np.int32), np.zeros(0, np.int32)
    )
    assert session.run(inputs, manager.runtime_inputs([[context]])).shape[0] == 0
    pool = manager.get_device_buffer(0).all_buffers[0].handle
    assert gpu.driver.view(gpu.driver.device, pool.address, pool.nbytes).any()


def test_a_step_that_was_interrupted_ends_before_the_next(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next one would write over the index tensors that its copies still read."""
    session = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", [3, 4, 5])
    manager.claim("a")
    with monkeypatch.context() as patch:
        patch.setattr(session, "_take_logits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_step(session, manager, context)
    assert gpu.driver.queue
    fill = Slot.fill

    def checked(*arguments: Any) -> None:
        assert not gpu.driver.queue
        fill(*arguments)

    monkeypatch.setattr(Slot, "fill", checked)
    logits, _ = run_step(session, manager, context)
    plain = session.artifact.session("reference")
    expected = prefill(plain, manager_of(plain), TextContext("a", [3, 4, 5]))
    np.testing.assert_array_equal(logits, expected)


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_memory_goes_back_with_its_last_user(gpu: Machine) -> None:
    session = gpu.artifact().session()
    before = len(gpu.driver.device)
    manager = manager_of(session)
    assert len(gpu.driver.device) == before + 1
    del manager
    assert len(gpu.driver.device) == before
    del session
    assert not gpu.driver.device
    assert not gpu.driver.pinned


# -- refusals


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
    artifact = gpu.artifact(engine=engine)
    if engine is None:
        manifest = dataclasses.replace(artifact.manifest, engine=None)
        artifact = dataclasses.replace(artifact, manifest=manifest)
    with pytest.raises(ArtifactError, match=r"engine: expected what built model\.engine"):
        artifact.session()


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


# -- weights that the engine lacks


def weights_of(artifact: Any) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    loaded = load_file(artifact.folder / "weights.safetensors")
    return {name: array.tobytes() for name, array in loaded.items()}


def test_weights_are_refitted_from_the_one_file(gpu: Machine) -> None:
    weights = weights_of(gpu.artifact())
    sizes = {name: len(data) for name, data in weights.items()}
    gpu.artifact(engine={"refit": list(weights)}, stripped=sizes).session()
    assert gpu.trt.refitted == weights


def test_weights_that_do_not_fit_the_engine(gpu: Machine) -> None:
    name, data = next(iter(weights_of(gpu.artifact()).items()))
    short = gpu.artifact(engine={"refit": [name]}, stripped={name: len(data) - 4})
    with pytest.raises(ArtifactError, match=rf"{name}: expected the weights that .* do not fit"):
        short.session()
    more = gpu.artifact(engine={"refit": [name]}, stripped={name: len(data), "other": 4})
    with pytest.raises(ArtifactError, match=r"to be all that it lacks, got \['other'\]"):
        more.session()
    unknown = gpu.artifact(engine={"refit": ["nowhere"]}, stripped={"nowhere": 4})
    with pytest.raises(ArtifactError, match=r"nowhere: expected a tensor from model.engine"):
        unknown.session()


# -- what compile writes


@pytest.fixture(scope="module")
def built(compiled: Callable[..., Path]) -> Path:
    """Built by the real TensorRT; module scope, so before anything stands for it."""
    pytest.importorskip("tensorrt_rtx", reason="compiling needs tensorrt-rtx")
    pytest.importorskip("triton", reason="compiling needs triton")
    return compiled("tiny-llama", "tensorrt", target="cuda:sm_86,sm_89,sm_120", dtype="bfloat16")


def test_an_artifact_of_the_compiler(built: Path, gpu: Machine) -> None:
    """Its manifest, profiles and files as they are; only the engine is run by its graph."""
    info = read_manifest(built).engine
    assert info is not None
    gpu.trt.__version__ = info.version
    gpu.trt.options["hosted"] = []
    gpu.trt.options["engine"] = {
        "onnx": str(built / "model.onnx"),
        "profiles": [dataclasses.asdict(profile) for profile in info.profiles],
    }
    engines = [kvgraph.Engine(built, session=kind, num_pages=64) for kind in (None, "reference")]
    first, second = (tokens_of(engine, PROMPTS[:2]) for engine in engines)
    assert first == second
    assert gpu.driver.calls["cuGraphLaunch"] > 0


@pytest.mark.cuda
def test_tokens_on_a_gpu(compiled: Callable[..., Path]) -> None:
    """No fake: an engine for this machine's GPU, against ONNX Runtime."""
    for module in ("tensorrt_rtx", "triton", "cuda.bindings.driver"):
        pytest.importorskip(module, reason=f"runs engines with {module}")
    try:
        target = f"cuda:{CudaDevice().arch}"
        folder = compiled("tiny-llama", "tensorrt", target=target)
    except (DeviceError, UnsupportedError) as error:
        pytest.skip(str(error))
    engines = [kvgraph.Engine(path, max_batch_size=4) for path in (folder, compiled("tiny-llama"))]
    first, second = (tokens_of(engine, PROMPTS) for engine in engines)
    assert first == second


# -- the fakes' names are those of the real modules


def test_the_fake_driver_has_the_real_ones_functions() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name, method in inspect.getmembers(FakeDriver, inspect.isfunction):
        if name.startswith("cu"):
            text = getattr(driver, name).__doc__.splitlines()[0]
            given = text[text.index("(") + 1 : text.rindex(")")]
            found = [part.partition(":")[0].split()[-1] for part in given.split(",") if part]
            assert found == list(inspect.signature(method).parameters)[1:], name
    enumerations = {
        "CUresult": CUresult,
        "CUdevice_attribute": FakeDriver.CUdevice_attribute,
        "CUstreamCaptureMode": FakeDriver.CUstreamCaptureMode,
    }
    for kind, enumeration in enumerations.items():
        real = getattr(driver, kind)
        assert {e.name: int(e) for e in enumeration} == {
            e.name: int(getattr(real, e.name)) for e in enumeration
        }


def test_the_fake_runtime_has_the_real_ones_names() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    for name in ("DataType", "TensorIOMode", "TensorLocation", "TensorFormat"):
        for member in getattr(FakeTensorRT, name):
            assert hasattr(getattr(trt, name), member.name), f"{name}.{member.name}"
    pairs = {
        "Runtime": ("get_plugin_registry", "deserialize_cuda_engine", "engine_host_code_allowed"),
        "IPluginRegistry": ("load_library", "all_creators_recursive"),
        "IPluginCreatorV3One": ("plugin_namespace",),
        "Refitter": ("set_named_weights", "get_missing_weights", "refit_cuda_engine"),
        "IRuntimeConfig": (
            "set_execution_context_allocation_strategy",
            "dynamic_shapes_kernel_specialization_strategy",
        ),
        "ICudaEngine": [n for n in vars(FakeEngine) if n.startswith(("get_", "create_"))],
        "IExecutionContext": [
            n for n in vars(FakeContext) if n.startswith(("set_", "infer", "exec"))
        ],
    }
    for kind, names in pairs.items():
        for name in names:
            assert hasattr(getattr(trt, kind), name), f"{kind}.{name}"
    assert hasattr(trt.ICudaEngine, "num_io_tensors")
    assert hasattr(trt.ICudaEngine, "num_optimization_profiles")
    assert {s.name for s in FakeTensorRT.ILogger.Severity} <= set(trt.ILogger.Severity.__members__)
    for name in ("ExecutionContextAllocationStrategy", "DynamicShapesKernelSpecializationStrategy"):
        members = {member.name for member in getattr(FakeTensorRT, name)}
        assert members <= set(getattr(trt, name).__members__)


def test_the_real_runtime_refuses_an_engine_without_a_gpu(compiled: Callable[..., Path]) -> None:
    """The real module's logger, registry and buffer types, as far as no GPU is needed."""
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    logger = tensorrt_engine._logger(trt)
    runtime = trt.Runtime(logger)
    data = tensorrt_engine._mapped(compiled("tiny-llama") / "model.onnx")
    assert runtime.deserialize_cuda_engine(data) is None
    assert logger.errors
