"""The TensorRT session: what it binds, captures and refuses, over a fake driver and runtime.

The last test runs the real thing where there is a GPU that TensorRT supports.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the fake runtime evaluates ONNX graphs")

import kvgraph
from kvgraph import TextContext
from kvgraph.contract.manifest import read_manifest
from kvgraph.errors import DeviceError, UnsupportedError
from kvgraph.runtime.sessions.cuda_driver import CudaDevice
from kvgraph.runtime.sessions.device_arrays import IndexTensor
from kvgraph.runtime.sessions.tensorrt import engine as tensorrt_engine
from tests.runtime.drive import prefill, run_step
from tests.runtime.fake_cuda import CUresult, FakeDriver
from tests.runtime.fake_tensorrt import FakeContext, FakeEngine, FakeTensorRT
from tests.runtime.tensorrt_machine import (
    ONE_TOKEN,
    PROMPTS,
    Machine,
    manager_of,
    tokens_of,
)

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


def test_tokens_of_an_engine_that_has_names_of_its_own(
    gpu: Machine, compiled: Callable[..., Path], tmp_path: Path
) -> None:
    """As torch-tensorrt builds it: inputs by position, and no output of a pool."""
    import onnx

    model = onnx.load(compiled("tiny-llama") / "model.onnx", load_external_data=False)
    graph = model.graph
    names = {value.name: f"inputs_{i}" for i, value in enumerate(graph.input)}
    names["logits"] = graph.output[0].name = "output0"
    for value in graph.input:
        value.name = names[value.name]
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    del graph.output[1:]
    gpu.trt.options["hosted"] = []
    path = compiled("tiny-llama") / "renamed.onnx"
    try:
        onnx.save(model, path)
        artifact = gpu.artifact(engine={"names": names}, onnx=str(path))
        engine = kvgraph.Engine(artifact, max_batch_size=4, max_batch_tokens=24, num_pages=64)
        expected = kvgraph.Engine(compiled("tiny-llama"), max_batch_size=4, num_pages=64)
        assert tokens_of(engine, PROMPTS) == tokens_of(expected, PROMPTS)
    finally:
        path.unlink(missing_ok=True)
    assert set(gpu.engine.contexts[0].addresses) == set(names.values())


def test_a_padded_cache_is_refused(gpu: Machine) -> None:
    artifact = gpu.artifact(options={"cache": "padded"})
    with pytest.raises(UnsupportedError, match=r"expected a paged or continuous cache, .*a padded"):
        artifact.session()


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


@pytest.mark.parametrize("enterprise", [False, True])
def test_an_engine_that_cannot_be_captured_says_so_once(gpu: Machine, enterprise: bool) -> None:
    """TensorRT has no question for it: its capture fails."""
    gpu.trt.options |= {"capturable": False, "enterprise": enterprise}
    artifact = gpu.artifact()
    session = artifact.session()
    engine = kvgraph.Engine(artifact, session=session, max_batch_size=2, num_pages=16)
    with pytest.warns(UserWarning, match=r"model\.engine: expected an engine that can be captured"):
        first = tokens_of(engine, [[3, 4, 5]])
    again = kvgraph.Engine(artifact, session=session, max_batch_size=2, num_pages=16)
    assert tokens_of(again, [[3, 4, 5]]) == first
    assert gpu.driver.calls["cuGraphLaunch"] == 0


def test_tensorrt_is_captured_without_being_asked(gpu: Machine) -> None:
    gpu.trt.options["enterprise"] = True
    engine = kvgraph.Engine(gpu.artifact(), max_batch_size=2, num_pages=16)
    assert tokens_of(engine, [[3, 4, 5]])
    assert gpu.driver.calls["cuGraphLaunch"] > 0


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
    fill = IndexTensor.fill

    def checked(*arguments: Any) -> None:
        assert not gpu.driver.queue
        fill(*arguments)

    monkeypatch.setattr(IndexTensor, "fill", checked)
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
