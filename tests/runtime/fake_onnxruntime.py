"""An `onnxruntime` whose CUDA provider is the CPU's over a fake driver's memory.

A run does what was enqueued on the provider's stream, then runs the model, by the real runtime, at
the very addresses that were bound: those said to be on the device must be the fake driver's.
"""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import numpy as np
import onnxruntime as real

from tests.runtime.fake_cuda import FakeDriver

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
BYTES = {1: 4, 3: 1, 6: 4, 10: 2, 16: 2, 17: 1, np.float32: 4}
"""Of an element, by how a binding names its type."""


class FakeOnnxRuntime(types.ModuleType):
    """`sessions` are those that were made. `loads`: whether the provider can be loaded."""

    SessionOptions = real.SessionOptions
    ExecutionMode = real.ExecutionMode

    __version__ = real.__version__

    def __init__(self, driver: FakeDriver, *, loads: bool = True) -> None:
        super().__init__("onnxruntime")
        self.__spec__ = real.__spec__  # torch looks for it
        self.driver, self.loads = driver, loads
        self.sessions: list[FakeSession] = []
        self.OrtValue = types.SimpleNamespace(ortvalue_from_shape_and_type=self._allocate)

    def _allocate(self, shape: list[int], element_type: Any, device: str, ordinal: int) -> object:
        assert (device, ordinal) == ("cuda", 0)
        if not self.loads:
            raise RuntimeError("CUDA Provider not available, can't get interface for it")
        return object()

    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]

    def InferenceSession(self, model: str, options: Any, providers: list[Any], **_: Any) -> Any:
        [(provider, settings)] = providers
        assert provider == CUDA
        session = real.InferenceSession(model, options, providers=[CPU])
        if not self.loads:
            return session
        self.sessions.append(FakeSession(self.driver, session, settings))
        return self.sessions[-1]


class FakeSession:
    """`bound`: the places of the last run, by name and direction."""

    def __init__(self, driver: FakeDriver, session: Any, settings: dict[str, str]) -> None:
        self.driver, self.settings, self._session = driver, settings, session
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs
        self.bound: dict[tuple[str, str], tuple[Any, ...]] = {}
        self.runs: Counter[str] = Counter()

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def io_binding(self) -> FakeBinding:
        return FakeBinding()

    def run_with_iobinding(self, binding: FakeBinding) -> None:
        assert self.settings["user_compute_stream"] == str(FakeDriver.STREAM)
        self.driver.cuStreamSynchronize(FakeDriver.STREAM)  # the provider waits at the end anyway
        self.bound = dict(binding.places)
        host = self._session.io_binding()
        for (name, direction), place in binding.places.items():
            device, ordinal, kind, shape, address = place
            assert (device, ordinal) in (("cuda", 0), ("cpu", 0))
            nbytes = int(np.prod(shape)) * BYTES[kind]
            if device == "cuda":
                self.driver.view(self.driver.device, address, nbytes)
            else:
                assert address not in self.driver.device
            getattr(host, f"bind_{direction}")(name, "cpu", 0, kind, shape, address)
        self._session.run_with_iobinding(host)


class FakeBinding:
    def __init__(self) -> None:
        self.places: dict[tuple[str, str], tuple[Any, ...]] = {}

    def bind_input(self, name: str, *place: Any) -> None:
        self.places[name, "input"] = place

    def bind_output(self, name: str, *place: Any) -> None:
        self.places[name, "output"] = place
