"""What sessions over the CUDA driver hold and give back, on a fake one: contexts, memory, streams,
graphs. Both kinds of session, where it is the same for both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the fake runtimes evaluate ONNX graphs")

import kvgraph
from kvgraph import BatchCharacteristics, TextContext
from kvgraph.errors import CapacityError, DeviceLostError, KernelError
from kvgraph.runtime.buckets import LEAST_CONTEXT, batch_sizes
from kvgraph.runtime.sessions import captured
from kvgraph.runtime.sessions.cuda_driver import CudaDevice, _free
from kvgraph.runtime.sessions.tensorrt.engine import LoadedEngine
from tests.runtime.drive import inputs_of, prefill
from tests.runtime.fake_cuda import CUresult, FakeDriver, install
from tests.runtime.fake_tensorrt import FakeContext
from tests.runtime.tensorrt_machine import (
    ONE_TOKEN,
    PROMPTS,
    Machine,
    fake_machine,
    manager_of,
    tokens_of,
)

FULL = CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
GONE = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, None
CALLER = 4711
"""The context that a caller made current."""


Opened = tuple[FakeDriver, Callable[[], Any]]


@pytest.fixture(params=["tensorrt", "onnxruntime"])
def opened(
    request: pytest.FixtureRequest,
    compiled: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Opened:
    """A driver, and what opens a session on it."""
    if request.param == "tensorrt":
        gpu = fake_machine(compiled, tmp_path, monkeypatch)
        artifact = gpu.artifact()
        return gpu.driver, artifact.session
    pytest.importorskip("onnxruntime", reason="runs the graphs")
    pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    from tests.runtime.fake_onnxruntime import FakeOnnxRuntime

    driver = FakeDriver()
    ort = FakeOnnxRuntime(driver)
    install(monkeypatch, driver, onnxruntime=ort)
    made = compiled("tiny-llama", "onnx", target="cuda:sm_86", dtype="float32")
    return driver, kvgraph.load(made).session


def fails(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, name: str, answer: Any) -> None:
    monkeypatch.setattr(driver, name, lambda *_: answer, raising=False)


# -- memory and streams


def test_logits_outlive_their_session(opened: Opened) -> None:
    driver, session_of = opened
    session = session_of()
    manager, context = manager_of(session), TextContext("a", [3, 4, 5])
    manager.claim("a")
    manager.alloc(context)
    logits = session.run(inputs_of([context]), manager.runtime_inputs([[context]]))
    kept, rows = logits.copy(), logits[:1]
    del session, manager, logits
    gc.collect()
    assert len(driver.pinned) == 1, "the copy that the rows lie in"
    np.testing.assert_array_equal(rows, kept)
    del rows
    gc.collect()
    assert not driver.pinned


def test_streams_go_with_their_sessions(opened: Opened) -> None:
    driver, session_of = opened
    for _ in range(3):
        session = session_of()
        prefill(session, manager_of(session), TextContext("a", [3, 4, 5]))
        del session
        gc.collect()
    assert driver.calls["cuStreamDestroy"] == driver.calls["cuStreamCreate"] == 3
    assert not driver.device


def test_the_callers_context_is_current_after_every_call(opened: Opened) -> None:
    """The fake driver takes no memory without a current context."""
    driver, session_of = opened
    driver.contexts.append(CALLER)
    session = session_of()
    manager = manager_of(session)
    context = TextContext("a", [3, 4, 5])
    prefill(session, manager, context)
    context.update(7)
    session.free_memory()
    with pytest.raises(kvgraph.KVGraphError):
        manager_of(session, 1_000_000)
    session._last_run_completed = False
    session.synchronize()
    session.run(ONE_TOKEN, manager.runtime_inputs([[context]]), capture=True)
    assert driver.contexts == [CALLER]
    del session, manager
    gc.collect()
    assert driver.contexts == [CALLER]
    assert not driver.device


def test_memory_comes_from_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the garbage collector frees between, of another device."""
    driver = FakeDriver()
    monkeypatch.setattr(driver, "cuDeviceGetCount", lambda: (CUresult.CUDA_SUCCESS, 2))
    retain = "cuDevicePrimaryCtxRetain"
    monkeypatch.setattr(driver, retain, lambda dev: (CUresult.CUDA_SUCCESS, 100 + dev))
    install(monkeypatch, driver)
    first, second = CudaDevice(0), CudaDevice(1)
    freed: list[int] = []
    free = driver.cuMemFree

    def noted(dptr: int) -> Any:
        freed.append(driver.contexts[-1])
        return free(dptr)

    monkeypatch.setattr(driver, "cuMemFree", noted)
    with second.current():
        array = second.zeros("float32", (4,))
    with first.current():
        del array
        gc.collect()
        assert freed == [101]
        assert driver.contexts == [100]
    assert not driver.contexts


def test_memory_that_cannot_be_freed_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of memory is an answer to any call, and no caller is left."""
    driver = FakeDriver()
    install(monkeypatch, driver)
    device = CudaDevice()
    asked: list[int] = []
    for answer in (FULL, GONE):

        def refuse(handle: int, answer: Any = answer) -> Any:
            asked.append(handle)
            return answer

        monkeypatch.setattr(driver, "cuMemFree", refuse)
        _free(device, "cuMemFree", 1)
    fails(monkeypatch, driver, "cuCtxPushCurrent", FULL)
    _free(device, "cuMemFree", 1)
    assert asked == [1, 1]


# -- captures


def engine_of(gpu: Machine, **given: Any) -> kvgraph.Engine:
    return kvgraph.Engine(
        gpu.artifact(), max_batch_size=4, max_batch_tokens=24, num_pages=64, **given
    )


def test_a_graph_that_memory_is_too_little_for(
    gpu: Machine, compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was to be captured has run; those that come run too, and one warning says so.
    Graphs that there are stay."""
    expected = tokens_of(kvgraph.Engine(compiled("tiny-llama"), num_pages=64), PROMPTS)
    engine = engine_of(gpu)
    assert tokens_of(engine, PROMPTS[:1]) == expected[:1]
    graphs, replays = (gpu.driver.calls[n] for n in ("cuStreamEndCapture", "cuGraphLaunch"))
    assert graphs
    fails(monkeypatch, gpu.driver, "cuGraphInstantiate", FULL)
    said = (
        rf"expected memory for one more CUDA graph than {graphs}, got .*OUT_OF_MEMORY: from now on"
    )
    with pytest.warns(UserWarning, match=said) as warned:
        assert tokens_of(engine, PROMPTS) == expected
    assert len(warned) == 1
    assert gpu.driver.calls["cuStreamEndCapture"] == graphs + 1
    assert tokens_of(engine, PROMPTS[:1]) == expected[:1]
    assert gpu.driver.calls["cuGraphLaunch"] > replays


def test_a_context_that_memory_is_too_little_for(
    gpu: Machine, compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT's own, which a capture needs."""
    expected = tokens_of(kvgraph.Engine(compiled("tiny-llama"), num_pages=64), PROMPTS)
    engine = engine_of(gpu)
    context = LoadedEngine.context

    def full(self: Any, profile: int, stream: int, *, captured: bool) -> Any:
        if captured:
            raise CapacityError("tensorrt: profile 0: OutOfMemory")
        return context(self, profile, stream, captured=captured)

    monkeypatch.setattr(LoadedEngine, "context", full)
    with pytest.warns(UserWarning, match="expected memory for one more CUDA graph than 0, got ten"):
        assert tokens_of(engine, PROMPTS) == expected


def test_a_lost_device_is_not_an_engine_that_cannot_be_captured(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.trt.options["enterprise"] = True
    session = gpu.artifact().session()
    fails(monkeypatch, gpu.driver, "cuStreamBeginCapture", GONE)
    with pytest.raises(DeviceLostError, match="cuStreamBeginCapture"):
        decode_once(session, manager_of(session))
    assert session._records


@pytest.mark.parametrize("enterprise", [False, True])
def test_why_an_engine_cannot_be_captured(gpu: Machine, enterprise: bool) -> None:
    gpu.trt.options |= {"capturable": False, "enterprise": enterprise}
    session = gpu.artifact().session()
    why = "operation not permitted when stream is capturing" if enterprise else "TensorRT's answer"
    with pytest.warns(UserWarning, match=f"can be captured in a CUDA graph, got .*{why}"):
        decode_once(session, manager_of(session))


def test_a_capture_whose_body_raises_keeps_no_graph(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = gpu.artifact().session()
    manager = manager_of(session)
    run = FakeContext.execute_async_v3

    def outside(self: Any, stream_handle: int) -> bool:
        return self.driver.captured is None and run(self, stream_handle)

    monkeypatch.setattr(FakeContext, "execute_async_v3", outside)
    for _ in range(3):
        with pytest.raises(KernelError, match="tensorrt: execution"):
            decode_once(session, manager)
    assert gpu.driver.calls["cuGraphDestroy"] == gpu.driver.calls["cuStreamEndCapture"] == 3
    fails(monkeypatch, gpu.driver, "cuStreamEndCapture", FULL)
    with pytest.raises(KernelError, match="tensorrt: execution"):
        decode_once(session, manager)


def decode_once(session: Any, manager: Any, longest: int = 1) -> None:
    context = TextContext("a", [3])
    manager.claim("a")
    manager.alloc(context)
    sizes = BatchCharacteristics(1, 1, longest)
    kv = manager.runtime_inputs([[context]], batch_characteristics=sizes)
    try:
        session.run(ONE_TOKEN, kv, capture=True)
    finally:
        manager.release("a")


def test_the_graph_that_was_replayed_last_stays_longest(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "MAX_CAPTURED", 2)
    session = gpu.artifact().session()
    manager = manager_of(session)
    captures = []
    for longest in (1, 2, 1, 3, 1, 2):
        decode_once(session, manager, longest)
        captures.append(gpu.driver.calls["cuStreamEndCapture"])
    assert captures == [1, 2, 2, 3, 3, 4]


def test_more_graphs_are_kept_than_an_engine_has_sizes() -> None:
    lengths = [1 << n for n in range(18) if 1 << n >= LEAST_CONTEXT]
    sizes = len(batch_sizes(256)) * len(lengths)
    assert sizes <= captured.MAX_CAPTURED
