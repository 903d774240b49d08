"""What CUDA's errors are told as: too little memory, a device that is lost, or neither."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="the fake runtimes evaluate ONNX graphs")

import kvgraph
from kvgraph import AsyncEngine, SamplingParams
from kvgraph.errors import (
    ArtifactError,
    CapacityError,
    DeviceError,
    DeviceLostError,
    KernelError,
    RequestError,
)
from kvgraph.runtime.sessions.cuda_driver import CudaDevice
from kvgraph.runtime.sessions.cuda_errors import (
    LOST,
    START_AGAIN,
    of_text,
    raising_cuda_errors,
)
from kvgraph.runtime.sessions.opening import opening
from tests.runtime.fake_cuda import CUresult, FakeDriver, install
from tests.runtime.tensorrt_machine import Machine, tokens_of

FULL = CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
GONE = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, None


def test_the_numbers_are_the_drivers() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    assert [int(getattr(driver.CUresult, name)) for name, _ in LOST.values()] == list(LOST)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: an illegal memory access was encountered\nmore", DeviceLostError),
        ("CUDA error: device-side assert triggered", DeviceLostError),
        ("CUDA failure 719: unspecified launch failure ; GPU=0 ; expr=cuda", DeviceLostError),
        ("Error Code 1: Cuda Runtime (misaligned address)", DeviceLostError),
        (f"k: got CUDA_ERROR_LAUNCH_FAILED (719): no; {START_AGAIN}", DeviceLostError),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", CapacityError),
        ("CUDA error: out of memory", CapacityError),
        ("Failed to allocate memory for requested buffer of size 1073741824", CapacityError),
        ("Error Code 2: OutOfMemory (Requested size was 64 bytes.)", CapacityError),
        ("cuModuleLoadData: expected success of the CUDA driver, got CUDA_ERROR_OUT_OF_MEMORY (2)",
         CapacityError),
        ("CUDNN failure 4002: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", CapacityError),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", CapacityError),
        ("got CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701): too many resources", None),
        ("misaligned address of a tensor", None),
        ("Sizes of tensors must match except in dimension 0", None),
    ],
)  # fmt: skip
def test_what_a_framework_says(text: str, kind: type[Exception] | None) -> None:
    assert of_text(text) is kind


def test_of_torch_and_of_the_launcher() -> None:
    for raised, kind, sentence in (
        (RuntimeError("CUDA out of memory.\nmore"), CapacityError, "cuda: CUDA out of memory."),
        (RuntimeError("CUDA error: misaligned address\nmore"), DeviceLostError,
         f"cuda: CUDA error: misaligned address; {START_AGAIN}"),
        (RuntimeError("no such op\nmore"), KernelError, "cuda: no such op"),
        (RuntimeError(), KernelError, "cuda: RuntimeError"),
        (DeviceError(f"k: {START_AGAIN}"), DeviceLostError, f"k: {START_AGAIN}"),
        (DeviceError("k: got CUDA_ERROR_OUT_OF_MEMORY (2)"), CapacityError,
         "k: got CUDA_ERROR_OUT_OF_MEMORY (2)"),
        (DeviceError("k: another"), DeviceError, "k: another"),
    ):  # fmt: skip
        with pytest.raises(Exception) as caught, raising_cuda_errors():  # noqa: PT011
            raise raised
        assert (type(caught.value), str(caught.value)) == (kind, sentence)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, DeviceLostError),
        (CUresult.CUDA_ERROR_OUT_OF_MEMORY, CapacityError),
        (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, DeviceError),
        (CUresult.CUDA_ERROR_INVALID_VALUE, DeviceError),
    ],
)
def test_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, number: CUresult, kind: type[Exception]
) -> None:
    driver = FakeDriver()
    install(monkeypatch, driver)
    device = CudaDevice()
    monkeypatch.setattr(driver, "cuStreamSynchronize", lambda stream: (number,), raising=False)
    with pytest.raises(kind, match=f"expected CUDA_SUCCESS, got {number.name}") as caught:
        device.synchronize()
    assert type(caught.value) is kind
    assert str(caught.value).endswith(START_AGAIN) == (kind is DeviceLostError)


def test_a_driver_without_memory_to_start(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.driver, "cuInit", lambda Flags: FULL, raising=False)
    with pytest.raises(CapacityError, match=r"cuInit: .*CUDA_ERROR_OUT_OF_MEMORY$"):
        CudaDevice()


# -- weights


def test_weights_that_do_not_fit_are_not_a_damaged_file() -> None:
    sentence = (
        r"^w: expected memory on the GPU .*\(CUDA out of memory\. Tried\); end what .* --weights$"
    )
    with pytest.raises(CapacityError, match=sentence), opening(Path("w"), "torch 2"):
        raise RuntimeError("CUDA out of memory. Tried\nmore")
    with pytest.raises(DeviceLostError, match=r"^w: CUDA error: "), opening(Path("w"), "torch 2"):
        raise RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(ArtifactError, match="that torch 2 opens"), opening(Path("w"), "torch 2"):
        raise RuntimeError("not a file")


def test_an_engine_that_does_not_fit(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = gpu.artifact()
    (artifact.folder / "model.engine").write_bytes(b"not an engine")
    said = "Error Code 2: OutOfMemory (Requested size was 64 bytes.)"
    runtime = gpu.trt.Runtime

    def full(logger: Any) -> Any:
        made = runtime(logger)
        logger.log(gpu.trt.ILogger.Severity.ERROR, said)
        made.deserialize_cuda_engine = lambda serialized: None  # type: ignore[method-assign, assignment]
        return made

    monkeypatch.setattr(gpu.trt, "Runtime", full, raising=False)
    with pytest.raises(CapacityError, match=r"model\.engine: expected memory on the GPU"):
        artifact.session()


def test_a_step_that_tensorrt_has_no_memory_for(gpu: Machine) -> None:
    """So that the measure of the largest step says what to make smaller."""
    artifact = gpu.artifact()
    gpu.trt.options["fails"] = "Error Code 1: Cuda Runtime (out of memory)"
    with pytest.raises(CapacityError, match=r"^the largest step: .*; give a smaller max_batch_tok"):
        kvgraph.Engine(artifact, max_batch_tokens=16)


# -- a device that is lost


def test_a_lost_device_ends_an_async_engine(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = kvgraph.Engine(gpu.artifact(), max_batch_size=4, max_batch_tokens=24, num_pages=32)

    async def main() -> None:
        async with AsyncEngine(engine) as shared:
            greedy = SamplingParams(max_new_tokens=3, ignore_eos=True)
            assert [piece async for piece in shared.stream([1, 2, 3], greedy)]
            for name in ("cuMemcpyHtoDAsync", "cuStreamSynchronize", "cuGraphLaunch"):
                monkeypatch.setattr(gpu.driver, name, lambda *_: GONE, raising=False)
            done = await shared.generate([1, 2, 3], greedy)
            assert "thread has ended: DeviceLostError" in (done.error or "")
            assert shared.is_closed
            with pytest.raises(RequestError, match=f"stopped one: DeviceLostError.*{START_AGAIN}"):
                await shared.submit([1, 2, 3])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_request_that_finds_the_device_lost_ends_it_too(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each that comes would fail where it begins, and none would reach a step."""
    engine = kvgraph.Engine(gpu.artifact(), max_batch_size=4, max_batch_tokens=24, num_pages=32)

    def begin(request: object) -> None:
        raise DeviceLostError("cuda:0: lost")

    async def main() -> None:
        async with AsyncEngine(engine) as shared:
            monkeypatch.setattr(engine, "_begin", begin)
            done = await shared.generate([1, 2, 3])
            assert "thread has ended: DeviceLostError" in (done.error or "")
            assert shared.is_closed

    asyncio.run(asyncio.wait_for(main(), 60))


def test_tiers_are_refused_where_no_page_can_be_copied(gpu: Machine) -> None:
    """The support table of the README and docs/guides/tiers.md say so."""
    engine = kvgraph.Engine(gpu.artifact(), max_batch_size=2, num_pages=16)
    assert tokens_of(engine, [[3, 4, 5]])
    with pytest.raises(DeviceError, match="tiers: expected a session that copies pages of cuda"):
        kvgraph.Engine(gpu.artifact(), max_batch_size=2, num_pages=16, host_memory=1 << 20)
