"""torch session on an NVIDIA GPU: the weightless program, our cubins, CUDA graphs.

    host index tensors -> pinned memory -> fixed device addresses -> program -> pinned logits

Prefill and mixed steps run the program operator by operator, on torch's stream; a decode step of
a bucket's sizes is captured on first sight and replayed after, without Python between its layers.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvgraph.contract.dims import TensorType
from kvgraph.contract.inputs import Buffer
from kvgraph.errors import CapacityError, KernelError
from kvgraph.kernels import launch, variants
from kvgraph.kv.pool.batch import Upload
from kvgraph.kv.tiers.copies import Rows
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions import nccl
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.sessions.cuda_errors import told_by_torch
from kvgraph.runtime.sessions.cuda_pages import PageCopies
from kvgraph.runtime.sessions.program import Gpu, load_program

LEAST_CAPACITY = 1 << 13
"""Elements of an index tensor's first memory: a decode step's tokens never outgrow it."""

MAX_CAPTURED = 256
"""Graphs kept; the least recently run one goes first."""


class CudaSession(Session):
    """Runs a `cuda` artifact. `gpu` is what launches: by default the GPU of the rank's number."""

    host_pools = False
    captures = True

    def __init__(self, artifact: ArtifactFolder, gpu: Gpu | None = None) -> None:
        super().__init__(artifact)
        if gpu is None:
            from kvgraph.runtime.sessions.cuda_gpu import CudaGpu

            with told_by_torch():
                gpu = CudaGpu(artifact.folder, artifact.rank)
            if artifact.ranks > 1:
                nccl.join(artifact.rank, artifact.ranks)
        self.gpu = gpu
        self._program = load_program(artifact, gpu)
        gpu.require([variants.increment_variant()])
        self._pages = PageCopies(gpu.device)
        self._on_host = [symbol.device.kind == "host" for symbol in self.signature.inputs]
        # Of their own: a long prompt that needs more memory must not move what graphs read.
        self._upload, self._upload_captured = self.uploader(), self.uploader()
        self._logits = itertools.cycle([_Logits(gpu.device), _Logits(gpu.device)])
        self._captured: dict[tuple[object, ...], Callable[[], torch.Tensor]] = {}
        self._records = True  # whether steps are captured from now on

    # -- memory

    def allocate(self, symbol: TensorType, sizes: Mapping[str, int]) -> Buffer:
        """Zeroed device memory, once this returns: pages are copied into it on another stream.
        CapacityError where the device has too little."""
        self._require_known(symbol)
        shape = symbol.extents(sizes)
        dtype = getattr(torch, symbol.dtype)
        try:
            with told_by_torch():
                handle = torch.zeros(shape, dtype=dtype, device=self.gpu.device)
                self._pages.settle()
        except (CapacityError, KernelError) as error:
            nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
            free = self.free_memory()
            raise CapacityError(
                f"{symbol.name}: expected {nbytes} bytes for {list(shape)} on {self.gpu.device}, "
                f"got {free} free ones"
            ) from error
        return Buffer(symbol.dtype, shape, symbol.device, handle)

    def free_memory(self) -> int | None:
        with told_by_torch():
            return self.gpu.free_memory()

    def uploader(self) -> Upload:
        """Copies index tensors to the device, each symbol's to one address for life."""
        tensors: dict[str, _IndexTensor] = {}

        def upload(symbol: TensorType, values: npt.NDArray[np.int32], capacity: int) -> Buffer:
            tensor = tensors.setdefault(symbol.name, _IndexTensor(self.gpu.device))
            with told_by_torch():
                handle = tensor.upload(values, capacity)
            return Buffer(symbol.dtype, values.shape, symbol.device, handle)

        return upload

    def copy_pages_out(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        with told_by_torch():
            self._pages.out(buffer, pages, rows)

    def copy_pages_in(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        with told_by_torch():
            self._pages.into(buffer, pages, rows)

    def pinned_host_bytes(self, nbytes: int) -> npt.NDArray[np.uint8]:
        with told_by_torch():
            return self._pages.pinned(nbytes)

    def increment(self, cache_lengths: Buffer, row_offsets: Any) -> None:
        """`cache_lengths += row_offsets[1:] - row_offsets[:-1]` on the device; nothing waits."""
        offsets = row_offsets
        with told_by_torch():
            if isinstance(row_offsets, np.ndarray):
                offsets = torch.from_numpy(row_offsets.copy()).to(self.gpu.device)
            operands = {"cache_lengths": cache_lengths.handle, "input_row_offsets": offsets}
            self.gpu.launch(launch.plan_increment(cache_lengths.shape[0]), operands)

    # -- a step

    def _run(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        with told_by_torch(), torch.inference_mode():
            step = self._program(*self._place(arrays, self._upload))
            return next(self._logits).download(step[0])

    def _run_captured(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        with told_by_torch(), torch.inference_mode():
            step = self._replay(self._place(arrays, self._upload_captured))
            return next(self._logits).download(step)

    def _synchronize(self) -> None:
        if self.gpu.device.type == "cuda":
            with told_by_torch():
                torch.cuda.synchronize(self.gpu.device)

    def _place(self, arrays: Sequence[Any], upload: Upload) -> list[torch.Tensor]:
        """Every input where the program reads it; what is on the device already stays."""
        return [
            self._tensor(symbol, array, upload)
            for symbol, array in zip(self.signature.inputs, arrays, strict=True)
        ]

    def _tensor(self, symbol: TensorType, array: Any, upload: Upload) -> torch.Tensor:
        if isinstance(array, torch.Tensor):
            return array
        if symbol.device.kind == "host":
            return torch.from_numpy(array if array.flags.writeable else array.copy())
        handle: torch.Tensor = upload(symbol, array, array.size).handle
        return handle

    def _replay(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        host = self._on_host
        key = tuple(_seen(t, on_host) for t, on_host in zip(tensors, host, strict=True))
        step = self._captured.pop(key, None)
        if step is None and self._records:
            if len(self._captured) >= MAX_CAPTURED:
                del self._captured[next(iter(self._captured))]
            step = self._capture(tensors)
        if step is None:
            logits: torch.Tensor = self._program(*tensors)[0]
            return logits
        self._captured[key] = step  # the youngest
        return step()

    def _capture(self, tensors: list[torch.Tensor]) -> Callable[[], torch.Tensor] | None:
        """None where memory is too little: what was captured stays, and nothing more is.

        Not so with other ranks, which would wait for another number of collectives.
        """
        # Values that decide grids are the captured step's own.
        kept = [t.clone() if h else t for t, h in zip(tensors, self._on_host, strict=True)]
        try:
            with told_by_torch():
                return self.gpu.capture(lambda: self._program(*kept)[0])
        except CapacityError as error:
            if self.artifact.ranks > 1:
                raise
            self._records = False
            warnings.warn(
                f"{self.gpu.device}: expected memory for one more CUDA graph than "
                f"{len(self._captured)}, got {error}: from now on, steps that were not captured "
                "are launched one kernel after the other",
                stacklevel=2,
            )
            return None


def _seen(tensor: torch.Tensor, on_host: bool) -> tuple[object, ...]:
    """What a captured step depends on: addresses on the device, values on the host."""
    if on_host:
        return tuple(tensor.flatten().tolist())
    return (tensor.data_ptr(), *tensor.shape)


class _IndexTensor:
    """Device memory at one address, and page-locked host memory, for copies that do not wait.

    Grows when more is asked than its capacity; what holds the old address keeps that memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._there = torch.empty(0, dtype=torch.int32)

    def upload(self, values: npt.NDArray[np.int32], capacity: int) -> torch.Tensor:
        """`values` on the device; the host copy may be overwritten once the step has run."""
        if self._there.numel() < values.size:
            capacity = max(capacity, LEAST_CAPACITY, 2 * self._there.numel())
            self._host = _page_locked(self._device, capacity, torch.int32)
            self._there = torch.empty(capacity, dtype=torch.int32, device=self._device)
        host, there = self._host[: values.size], self._there[: values.size]
        host.numpy()[:] = values.reshape(-1)
        there.copy_(host, non_blocking=True)
        return there.view(values.shape)


class _Logits:
    """Page-locked host memory that a step's logits come to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0)

    def download(self, values: torch.Tensor) -> npt.NDArray[np.float32]:
        """`values` on the host, once everything before them on the stream has run."""
        if values.device.type == "cpu":
            return values.numpy()
        if self._host.numel() < values.numel():
            self._host = _page_locked(self._device, values.numel(), values.dtype)
        host = self._host[: values.numel()].view(values.shape)
        host.copy_(values, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        result: npt.NDArray[np.float32] = host.numpy()
        return result


def _page_locked(device: torch.device, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(elements, dtype=dtype, pin_memory=device.type == "cuda")
