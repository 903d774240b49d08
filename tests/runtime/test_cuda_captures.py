"""Captures on a GPU, where there is none: what goes on in torch meanwhile, and in Python."""

from __future__ import annotations

import gc
import itertools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import pytest

torch = pytest.importorskip("torch", reason="captures")

from kvgraph.errors import CapacityError  # noqa: E402
from kvgraph.runtime.sessions.cuda_driver import CudaDevice  # noqa: E402
from kvgraph.runtime.sessions.cuda_errors import raising_cuda_errors  # noqa: E402
from kvgraph.runtime.sessions.cuda_gpu import CudaGpu  # noqa: E402
from kvgraph.runtime.sessions.uncollected import uncollected  # noqa: E402
from tests.runtime.fake_cuda import FakeDriver, install  # noqa: E402


class Torch:
    """What is called of torch, in order. `refuses`: what the end of a capture raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.refuses = refuses
        self.stream = types.SimpleNamespace(
            wait_stream=lambda stream: None, synchronize=lambda: self.calls.append("synchronize")
        )
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda it: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self.calls, self.refuses))
        pools = map("pool {}".format, itertools.count(1))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.calls.append("empty"))

    def gpu(self) -> CudaGpu:
        made = CudaGpu.__new__(CudaGpu)
        made.device, made._ranks, made._pool = torch.device("cuda"), 1, None
        made._stream, made._graphs = self.stream, WeakSet()  # type: ignore[assignment]
        return made


class Graph:
    def __init__(self, calls: list[str], refuses: Exception | None) -> None:
        self._calls, self._refuses = calls, refuses

    def capture_begin(self, *, pool: str, capture_error_mode: str) -> None:
        self._calls.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self._calls.append("end")
        if self._refuses is not None:
            raise self._refuses

    def replay(self) -> None:
        self._calls.append("replay")


def test_a_capture_leaves_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the largest step stays in torch's cache; `torch.cuda.graph` would empty it."""
    fake, result = Torch(monkeypatch), torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def step() -> Any:
        fake.calls.append("step" if gc.isenabled() else "step, uncollected")
        return result

    assert fake.gpu().capture(step)() is result
    assert fake.calls == [
        "step", "synchronize", "begin in pool 1, thread_local", "step, uncollected", "end",
        "replay",
    ]  # fmt: skip
    assert gc.isenabled()


def test_graphs_share_memory_that_goes_with_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses a capture into a pool that had graphs and has none."""
    fake, result = Torch(monkeypatch), torch.zeros(1)
    gpu = fake.gpu()
    first = gpu.capture(lambda: result)
    second = gpu.capture(lambda: result)
    del first
    third = gpu.capture(lambda: result)
    del second, third
    gpu.capture(lambda: result)
    made = [call.split(",")[0] for call in fake.calls if call.startswith(("begin", "empty"))]
    assert made == ["begin in pool 1"] * 3 + ["empty", "begin in pool 2"]


def test_the_error_of_a_step_is_told_and_not_that_of_its_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invalidated = RuntimeError("CUDA error: operation failed due to a previous error")
    fake, results = Torch(monkeypatch, invalidated), [torch.zeros(1)]

    def step() -> Any:
        if not results:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return results.pop()

    with pytest.raises(CapacityError, match="CUDA out of memory"), raising_cuda_errors():
        fake.gpu().capture(step)
    assert fake.calls[-1] == "end"
    assert gc.isenabled()


def test_a_capture_that_does_not_end_leaves_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may go on recording into it."""
    fake, result = Torch(monkeypatch), torch.zeros(1)
    gpu = fake.gpu()
    kept = gpu.capture(lambda: result)
    fake.refuses = RuntimeError("CUDA error: operation failed due to a previous error")
    with pytest.raises(RuntimeError, match="previous error"):
        gpu.capture(lambda: result)
    fake.refuses = None
    gpu.capture(lambda: result)
    assert [call for call in fake.calls if call.startswith("begin in pool 2")]
    assert kept() is result


def test_no_collection_frees_memory_within_a_capture_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    install(monkeypatch, driver)
    device, seen = CudaDevice(), []
    with device.current():
        device.capture(lambda: seen.append(gc.isenabled()))
        with pytest.raises(ZeroDivisionError):
            device.capture(lambda: seen.append(1 // 0 > 0))
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("switch", [gc.enable, gc.disable])
def test_the_collector_is_left_as_it_was(switch: Callable[[], None]) -> None:
    before = gc.isenabled()
    try:
        switch()
        was = gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == was
    finally:
        (gc.enable if before else gc.disable)()
