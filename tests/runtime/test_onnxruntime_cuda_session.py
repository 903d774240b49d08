"""The session on ONNX Runtime's CUDA provider: what it binds and refuses, over fakes of the driver
and of the provider. The last test runs the real thing where there is a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="compiles the artifacts")
pytest.importorskip("onnxruntime", reason="runs the graphs")
pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")

import onnxruntime as real

import kvgraph
from kvgraph import PagedKVCacheManager, SamplingParams, TextContext
from kvgraph.contract.signature import output_name
from kvgraph.errors import (
    ArtifactError,
    BindingError,
    CapacityError,
    DeviceError,
    DeviceLostError,
    KernelError,
    MissingDependencyError,
)
from kvgraph.ops.cuda_native import launcher
from kvgraph.runtime.sessions.device_arrays import IndexTensor
from kvgraph.runtime.sessions.onnxruntime import OnnxRuntimeSession
from tests.runtime.drive import inputs_of, run_step
from tests.runtime.fake_cuda import FakeDriver, install
from tests.runtime.fake_onnxruntime import CPU, CUDA, FakeOnnxRuntime

PROMPTS = ["The import statement", "A list", "def f(x):", "In Python, a dictionary"]
GREEDY = SamplingParams(max_new_tokens=12)
OPTIONS = {"target": "cuda:sm_86", "dtype": "float32"}


@dataclasses.dataclass
class Machine:
    """A machine with a fake GPU and a fake provider for it."""

    driver: FakeDriver
    ort: FakeOnnxRuntime
    compiled: Callable[..., Path]

    def artifact(self, model: str = "tiny-llama", **options: Any) -> Any:
        return kvgraph.load(self.compiled(model, "onnx", **{**OPTIONS, **options}))


@pytest.fixture
def gpu(compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Machine:
    driver = FakeDriver()
    ort = FakeOnnxRuntime(driver)
    install(monkeypatch, driver, onnxruntime=ort)
    return Machine(driver, ort, compiled)


def tokens_of(engine: kvgraph.Engine, prompts: list[Any]) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(prompts, GREEDY)]


def expected_tokens(
    monkeypatch: pytest.MonkeyPatch, artifact: Any, prompts: list[Any]
) -> list[list[int]]:
    """Of the same graph in the CPU's session and in the real runtime."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", real)
        session = OnnxRuntimeSession(artifact)
        engine = kvgraph.Engine(artifact, session=session, max_batch_size=4, num_pages=64)
        return tokens_of(engine, prompts)


@pytest.mark.parametrize(
    ("model", "prompts"), [("tiny-llama", PROMPTS), ("gemma2", [[3, 4, 5] * 12, [7, 8]])]
)
def test_tokens_are_those_of_the_cpus_session(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, model: str, prompts: list[Any]
) -> None:
    """One pool, and two; decode rows with chunks."""
    artifact = gpu.artifact(model)
    engine = kvgraph.Engine(artifact, max_batch_size=4, max_batch_tokens=24, num_pages=64)
    assert tokens_of(engine, prompts) == expected_tokens(monkeypatch, artifact, prompts)


def manager_of(session: Any, pages: int = 8) -> PagedKVCacheManager:
    params = session.artifact.params()
    return PagedKVCacheManager(params, session, pages, max_batch_size=2)


def test_what_is_bound_where(gpu: Machine) -> None:
    """Pools at one address, max_lengths on the host, the rest on the device, all on one stream."""
    session = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", [3, 4, 5])
    manager.claim("a")
    run_step(session, manager, context)
    [made] = gpu.ort.sessions
    assert made.settings == {"device_id": "0", "user_compute_stream": "77", "use_tf32": "0"}
    hosted = {name for (name, _), place in made.bound.items() if place[0] == "cpu"}
    assert hosted == {"max_lengths"}
    for buffer in session.signature.buffers:
        place = made.bound[buffer.name, "input"]
        assert made.bound[output_name(buffer), "output"] == place
    assert made.bound["logits", "output"][3] == (1, session.artifact.manifest.model.vocab_size)


def test_index_tensors_keep_their_addresses_until_they_grow(gpu: Machine) -> None:
    session = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", [3] * 20)
    manager.claim("a")
    context.active_length = 18
    addresses = []
    for _ in range(3):
        run_step(session, manager, context)
        addresses.append(gpu.ort.sessions[0].bound["tokens", "input"][4])
        context.update(7)
    assert len(set(addresses)) == 1, "18 tokens, then 2, then 1"


def test_logits_last_until_the_next_step_but_one(gpu: Machine) -> None:
    session = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", [3, 4, 5])
    manager.claim("a")
    kept = []
    for token in (6, 7):
        manager.alloc(context)
        logits = session.run(inputs_of([context]), manager.runtime_inputs([[context]]))
        kept.append((logits, logits.copy()))
        context.update(token)
        manager.step([[context]])
    np.testing.assert_array_equal(*kept[0])
    np.testing.assert_array_equal(*kept[1])


def test_a_step_that_was_interrupted_ends_before_the_next(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next one would write over the index tensors that its copies still read."""
    session: Any = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", [3, 4, 5])
    manager.claim("a")

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session._session, "run_with_iobinding", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_step(session, manager, context)
    assert gpu.driver.queue
    fill = IndexTensor.fill

    def checked(*arguments: Any) -> None:
        assert not gpu.driver.queue or arguments[0] is not first
        fill(*arguments)

    first = session._index_tensors["tokens"]
    monkeypatch.setattr(IndexTensor, "fill", checked)
    run_step(session, manager, context)


# ---- refusals -----------------------------------------------------------------------------------


def test_a_build_without_the_provider(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = gpu.artifact()
    monkeypatch.setattr(gpu.ort, "get_available_providers", lambda: [CPU])
    sentence = rf"expected {CUDA} from the installed build, got \['{CPU}'\]; .*kvgraph\[onnx-gpu\]"
    with pytest.raises(MissingDependencyError, match=sentence):
        artifact.session()
    assert not gpu.driver.device, "nothing was allocated"


def test_the_installed_build_without_a_gpu(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real runtime: neither kind of it has the provider where there is no GPU."""
    artifact = gpu.artifact()
    monkeypatch.setitem(sys.modules, "onnxruntime", real)
    if CUDA in real.get_available_providers():
        pytest.skip("the GPU build of ONNX Runtime is installed")
    with pytest.raises(MissingDependencyError, match=f"onnxruntime: expected {CUDA} from the inst"):
        artifact.session()


def test_a_provider_that_cannot_be_loaded(gpu: Machine) -> None:
    gpu.ort.loads = False
    with pytest.raises(DeviceError, match=f"expected {CUDA} on this machine, got .*: it could not"):
        gpu.artifact().session()


def test_a_graph_of_bfloat16_where_the_provider_cannot_be_loaded(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU, to which ONNX Runtime falls back, has no kernels for it."""
    artifact = gpu.artifact()
    gpu.ort.loads = False

    def refuses(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("Could not find an implementation for MatMul(13)")

    monkeypatch.setattr(gpu.ort, "InferenceSession", refuses)
    sentence = f"expected {CUDA} on this machine, got none that can be loaded: CUDA Provider not av"
    with pytest.raises(DeviceError, match=sentence):
        artifact.session()


def test_the_fakes_have_the_real_ones_names() -> None:
    assert callable(real.OrtValue.ortvalue_from_shape_and_type)
    binding = inspect.signature(real.IOBinding.bind_input).parameters
    names = ["device_type", "device_id", "element_type", "shape", "buffer_ptr"]
    assert list(binding)[2:] == names
    assert list(inspect.signature(real.IOBinding.bind_output).parameters)[2:] == names


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("onnxruntime", "onnxruntime: needed to run this artifact, not installed"),
        ("cuda.bindings", r"cuda-bindings: needed .*; pip install 'kvgraph\[onnx-gpu\]'"),
    ],
)
def test_a_package_that_is_missing(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, module: str, sentence: str
) -> None:
    artifact = gpu.artifact()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=sentence):
        artifact.session()


def test_a_machine_without_a_gpu(compiled: Callable[..., Path]) -> None:
    folder = compiled("tiny-llama", "onnx", **OPTIONS)
    try:
        count = launcher().device_count()
    except DeviceError:
        count = 0
    if count:
        pytest.skip("there is a GPU here")
    with pytest.raises(ArtifactError, match="expected an NVIDIA GPU for 'cuda:sm_86' from this"):
        kvgraph.load(folder)


def test_a_model_that_the_runtime_refuses(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = gpu.artifact()

    def refuses(*_: Any, **__: Any) -> Any:
        raise ValueError("Could not find an implementation\nfor Sigmoid(13)")

    monkeypatch.setattr(gpu.ort, "InferenceSession", refuses)
    sentence = r"model\.onnx: .* it refuses: Could not find an implementation for Sigmoid\(13\)"
    with pytest.raises(ArtifactError, match=sentence):
        artifact.session()


def test_memory_of_another_session_is_refused(gpu: Machine) -> None:
    session, other = gpu.artifact().session(), gpu.artifact().session()
    manager = manager_of(other)
    context = TextContext("a", [3])
    manager.claim("a")
    sentence = "kv_blocks: expected memory that this session allocated, got DeviceArray"
    with pytest.raises(BindingError, match=sentence):
        run_step(session, manager, context)


def test_too_little_memory_names_the_pool(gpu: Machine) -> None:
    session = gpu.artifact().session()
    with pytest.raises(CapacityError, match=r"kv_blocks \[1000001, .*CUDA_ERROR_OUT_OF_MEMORY"):
        manager_of(session, 1_000_000)


def test_a_refused_step_is_one_sentence(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = gpu.artifact().session()
    manager = manager_of(session)
    context = TextContext("a", [3])
    manager.claim("a")

    def refuses(binding: Any) -> None:
        raise RuntimeError("Non-zero status code\nupdate_and_attend: expected image 12, got none")

    monkeypatch.setattr(gpu.ort.sessions[0], "run_with_iobinding", refuses)
    with pytest.raises(KernelError, match=r"^onnxruntime: update_and_attend: expected image 12, g"):
        run_step(session, manager, context)


ARENA = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running "
    "MatMul node. Status Message: bfc_arena.cc:359 Failed to allocate memory for requested buffer "
    "of size 1073741824\n"
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (ARENA, CapacityError),
        ("CUDNN failure 4: CUDNN_STATUS_ALLOC_FAILED ; GPU=0", CapacityError),
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", DeviceLostError),
    ],
)
def test_a_step_that_the_device_cannot_run(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    """The largest step says what to make smaller."""
    session = gpu.artifact().session()

    def refuses(binding: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(gpu.ort.sessions[0], "run_with_iobinding", refuses)
    is_full = kind is CapacityError
    said = r"^the largest step: .*; give a smaller max_b" if is_full else r"^onnxruntime: CUDA fail"
    with pytest.raises(kind, match=said):
        kvgraph.Engine(session.artifact, session=session, max_batch_tokens=16)


def test_weights_that_do_not_fit(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = gpu.artifact()

    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError(ARENA)

    monkeypatch.setattr(gpu.ort, "InferenceSession", refuses)
    with pytest.raises(
        CapacityError, match=r"model\.onnx: expected memory on the GPU for what the"
    ):
        artifact.session()


# ---- the real thing -----------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tokens_on_a_gpu_are_those_of_the_torch_session(
    compiled: Callable[..., Path], dtype: str
) -> None:
    torch = pytest.importorskip("torch", reason="the session that is compared with")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    if CUDA not in real.get_available_providers():
        pytest.skip("the installed ONNX Runtime has no CUDA provider")
    target = "cuda:sm_{}{}".format(*launcher().compute_capability())
    ours = kvgraph.Engine(compiled("tiny-llama", "onnx", target=target, dtype=dtype))
    expected = kvgraph.Engine(compiled("tiny-llama", "torch", target=target, dtype=dtype))
    assert tokens_of(ours, PROMPTS) == tokens_of(expected, PROMPTS)
