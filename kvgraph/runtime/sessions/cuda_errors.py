"""Classifies CUDA errors of the driver, torch, TensorRT and ONNX Runtime.

The driver returns numbers. The others raise messages that contain its names or descriptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgraph.errors import CapacityError, DeviceError, DeviceLostError, KernelError, KVGraphError
from kvgraph.signal_handlers import reraise_if_signalled

OUT_OF_MEMORY = 2

LOST = {
    214: ("CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"),
    220: ("CUDA_ERROR_NVLINK_UNCORRECTABLE", "uncorrectable NVLink error detected"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    702: ("CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"),
    710: ("CUDA_ERROR_ASSERT", "device-side assert triggered"),
    714: ("CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"),
    715: ("CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"),
    716: ("CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"),
    717: ("CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on global/shared address"),
    718: ("CUDA_ERROR_INVALID_PC", "invalid program counter"),
    719: ("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
    721: ("CUDA_ERROR_TENSOR_MEMORY_LEAK", "tensor memory not completely freed"),
}
"""Errors after which every call in the context fails (CUresult): name, and start of the text."""

START_AGAIN = "nothing runs on this device in this process any more: start it again"

_LOST = re.compile(
    "|".join([START_AGAIN, *(name for name, _ in LOST.values())])
    + r"|\bcuda (error|failure \d+|runtime|driver)(: | \()("
    + "|".join(re.escape(text) for _, text in LOST.values())
    + ")",
    re.IGNORECASE,
)
_FULL = re.compile(
    r"out[ _]?of[ _]?memory|failed to allocate memory|ALLOC(ATION)?_FAILED"
    r"|expected success of the CUDA driver, got .* \(2\):",
    re.IGNORECASE,
)
"""The last pattern is our launcher's message, if the driver has no name for the number."""


def of_number(number: int, sentence: str) -> DeviceError | CapacityError:
    """The error class for status `number` of the driver, with message `sentence`."""
    if number == OUT_OF_MEMORY:
        return CapacityError(sentence)
    return _lost(sentence) if number in LOST else DeviceError(sentence)


def of_text(text: str) -> type[CapacityError | DeviceLostError] | None:
    """The kind of error that a framework's message `text` describes; None: neither of the two."""
    if _LOST.search(text):
        return DeviceLostError
    return CapacityError if _FULL.search(text) else None


def step_error(sentence: str, text: str) -> KVGraphError:
    """The error for a step that a framework refused with `text`."""
    kind = of_text(text) or KernelError
    return _lost(sentence) if kind is DeviceLostError else kind(sentence)


def opening_error(path: Path, text: str) -> KVGraphError | None:
    """The error for file `path`, if `text` says that the GPU is the cause; None if it is not."""
    kind, lines = of_text(text), text.strip().splitlines()
    if kind is CapacityError:
        return CapacityError(
            f"{path}: expected memory on the GPU for what the file holds, got too little "
            f"({lines[0]}); end what else runs there, or compile the model with a smaller --weights"
        )
    return None if kind is None else _lost(f"{path}: {lines[0]}")


def _lost(sentence: str) -> DeviceLostError:
    """The error with the remedy, which the sentence may contain already."""
    return DeviceLostError(sentence if START_AGAIN in sentence else f"{sentence}; {START_AGAIN}")


@contextmanager
def raising_cuda_errors() -> Iterator[None]:
    """Convert torch's errors to CapacityError, DeviceLostError or KernelError.

    A plain DeviceError of our launcher becomes one of the first two if its text says so."""
    try:
        yield
    except KVGraphError as error:
        kind = of_text(str(error)) if type(error) is DeviceError else None
        if kind is None:
            raise
        raise (_lost if kind is DeviceLostError else kind)(str(error)) from error
    except RuntimeError as error:  # includes torch.OutOfMemoryError and torch.AcceleratorError
        reraise_if_signalled(error)
        lines = str(error).splitlines() or [type(error).__name__]
        raise step_error(f"cuda: {lines[0]}", str(error)) from error
