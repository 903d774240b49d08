"""CudaSession: torch on an NVIDIA GPU, with the weightless program, our cubins, and CUDA graphs.

    host index tensors -> pinned memory -> fixed device addresses -> program -> pinned logits

Prefill and mixed steps run the program op by op, on torch's stream. A decode step of a bucket's
sizes is captured the first time and replayed afterwards, without Python between its layers.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvgraph.contract.abilities import Rows, Upload
from kvgraph.contract.dims import TensorType
from kvgraph.contract.inputs import Buffer
from kvgraph.contract.signature import LOGITS_INDICES
from kvgraph.errors import CapacityError, KernelError
from kvgraph.kernels import launch, variants
from kvgraph.ops.torch_arrays import tensor_over
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions import nccl
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.sessions.captured import CapturedSteps
from kvgraph.runtime.sessions.cuda_errors import raising_cuda_errors
from kvgraph.runtime.sessions.cuda_pages import PageCopies
from kvgraph.runtime.sessions.launches import Gpu
from kvgraph.runtime.sessions.program import load_program

LEAST_CAPACITY = 1 << 13
"""Elements of an index tensor's first memory: a decode step's tokens never outgrow it."""


class CudaSession(Session):
    """Runs a `cuda` artifact. `gpu`: launches the kernels; default: the GPU of the rank's index."""

    host_pools = False
    memory = torch.Tensor
    captures = True

    def __init__(self, artifact: ArtifactFolder, gpu: Gpu | None = None) -> None:
        super().__init__(artifact)
        if gpu is None:
            from kvgraph.runtime.sessions.cuda_gpu import CudaGpu

            with raising_cuda_errors():
                gpu = CudaGpu(artifact)
            if artifact.ranks > 1:
                nccl.join(artifact.rank, artifact.ranks)
        self.gpu = gpu
        self._program = load_program(artifact, gpu)
        gpu.require([variants.increment_variant()])
        self._pages = PageCopies(gpu.device)
        self._on_host = [symbol.device.kind == "host" for symbol in self.signature.inputs]
        self._logits = itertools.cycle(_Logits(gpu.device, artifact.ranks) for _ in range(2))
        self._captured = CapturedSteps[Callable[[], torch.Tensor]]()
        self._records = True  # whether new steps may be captured
        self._captured_logits = torch.empty(0)  # output of all graphs
        # Separate uploaders: a long prompt that needs more memory must not move graphs' inputs.
        self._upload, self._upload_captured = self.uploader(), self.uploader(self._captured.clear)

    # -- memory

    def _address_of(self, array: Any) -> int:
        address: int = array.data_ptr()
        return address

    def allocate(self, symbol: TensorType, sizes: Mapping[str, int]) -> Buffer:
        """Allocate zeroed device memory; zeroed on return, as another stream copies pages into it.
        CapacityError if the device has too little memory.

        Captured steps are dropped. They would never match again, or only on the one rank where the
        new pool has the address of the old one.
        """
        self._require_known(symbol)
        self._captured.clear()
        shape = symbol.extents(sizes)
        dtype = getattr(torch, symbol.dtype)
        try:
            with raising_cuda_errors():
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
        with raising_cuda_errors():
            return self.gpu.free_memory()

    def uploader(self, moved: Callable[[], object] = lambda: None) -> Upload:
        """Make a function that copies index tensors to the device, to one address per symbol.

        When a tensor outgrows its memory, it gets another address, and `moved` is called."""
        tensors: dict[str, _IndexTensor] = {}

        def upload(symbol: TensorType, values: npt.NDArray[np.int32], capacity: int) -> Buffer:
            tensor = tensors.setdefault(symbol.name, _IndexTensor(self.gpu.device))
            with raising_cuda_errors():
                if tensor.grow(values.size, capacity):
                    moved()
                handle = tensor.upload(values)
            return Buffer(symbol.dtype, values.shape, symbol.device, handle)

        return upload

    def copy_pages_out(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        with raising_cuda_errors():
            self._pages.out(buffer, pages, rows)

    def copy_pages_in(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        with raising_cuda_errors():
            self._pages.into(buffer, pages, rows)

    def pinned_host_bytes(self, nbytes: int) -> npt.NDArray[np.uint8]:
        with raising_cuda_errors():
            return self._pages.pinned(nbytes)

    def increment(self, cache_lengths: Buffer, row_offsets: Any) -> None:
        """Enqueue `cache_lengths += row_offsets[1:] - row_offsets[:-1]` on the device."""
        offsets = row_offsets
        with raising_cuda_errors():
            if isinstance(row_offsets, np.ndarray):
                offsets = torch.from_numpy(row_offsets.copy()).to(self.gpu.device)
            operands = {"cache_lengths": cache_lengths.handle, "input_row_offsets": offsets}
            self.gpu.launch(launch.plan_increment(cache_lengths.shape[0]), operands)

    # -- a step

    def _run(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        return self._fitted(lambda: self._program(*self._place(arrays, self._upload))[0])

    def _run_captured(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        return self._fitted(lambda: self._replay(self._place(arrays, self._upload_captured)))

    def _fitted(self, step: Callable[[], torch.Tensor]) -> npt.NDArray[np.float32]:
        """Run the step and return its logits. If memory is short, drop the graphs and run it once
        more: it writes the same values. With other ranks raise: they have already run the step."""
        try:
            return self._once(step)
        except CapacityError as error:
            if self.artifact.ranks > 1 or not self._captured:
                raise
            self._drop_graphs(error)
        gc.collect()  # frees the error, and the tensors of the failed step that it refers to
        if self.gpu.device.type == "cuda":
            torch.cuda.empty_cache()  # returns the graphs' memory to allocators other than torch's
        return self._once(step)

    def _once(self, step: Callable[[], torch.Tensor]) -> npt.NDArray[np.float32]:
        with raising_cuda_errors(), torch.inference_mode():
            logits = step()  # if this raises, the logits of the last call stay valid
            return next(self._logits).download(logits)

    def _synchronize(self) -> None:
        if self.gpu.device.type == "cuda":
            with raising_cuda_errors():
                torch.cuda.synchronize(self.gpu.device)

    def _place(self, arrays: Sequence[Any], upload: Upload) -> list[torch.Tensor]:
        """Every input where the program reads it; tensors on the device stay where they are."""
        return [
            self._tensor(symbol, array, upload)
            for symbol, array in zip(self.signature.inputs, arrays, strict=True)
        ]

    def _tensor(self, symbol: TensorType, array: Any, upload: Upload) -> torch.Tensor:
        if isinstance(array, torch.Tensor):
            return array
        if symbol.device.kind == "host":
            return tensor_over(array, symbol.dtype)
        handle: torch.Tensor = upload(symbol, array, array.size).handle
        return handle

    def _replay(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        host = self._on_host
        key = tuple(_seen(t, on_host) for t, on_host in zip(tensors, host, strict=True))
        step = self._captured.used(key)
        if step is None and self._records:
            self._captured.make_room()
            step = self._capture(tensors)
            if step is not None:
                self._captured[key] = step
        if step is None:
            logits: torch.Tensor = self._program(*tensors)[0]
            return logits
        return step()

    def _capture(self, tensors: list[torch.Tensor]) -> Callable[[], torch.Tensor] | None:
        """Capture a step; None if memory is short: existing graphs stay, and no more are made.

        With other ranks raise: they would wait for a different number of collectives.
        """
        # A graph keeps the host values of its captured step, which decide the kernels' grids.
        kept = [t.clone() if h else t for t, h in zip(tensors, self._on_host, strict=True)]
        try:
            with raising_cuda_errors():
                logits = self._rows_of_logits(len(kept[LOGITS_INDICES]))
                return self.gpu.capture(lambda: logits.copy_(self._program(*kept)[0]))
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

    def _rows_of_logits(self, rows: int) -> torch.Tensor:
        """Output memory that all graphs share: a step's logits are copied to the host before the
        next step runs. Graphs of fewer rows keep the tensor that they were captured with."""
        if len(self._captured_logits) < rows:
            most = max(rows, 2 * len(self._captured_logits))
            self._captured_logits = torch.empty(
                most, self._vocab, dtype=torch.float32, device=self.gpu.device
            )
        return self._captured_logits[:rows]

    def _drop_graphs(self, error: CapacityError) -> None:
        count, self._records = len(self._captured), False
        self._captured.clear()
        self._captured_logits = torch.empty(0)
        warnings.warn(
            f"{self.gpu.device}: expected memory for a step beside {count} CUDA graphs, got "
            f"{error}: the graphs are dropped, and steps are launched one kernel after the other",
            stacklevel=2,
        )


def _seen(tensor: torch.Tensor, on_host: bool) -> tuple[object, ...]:
    """Part of a captured step's key: an address and shape on the device, or values on the host."""
    if on_host:
        return tuple(tensor.flatten().tolist())
    return (tensor.data_ptr(), *tensor.shape)


class _IndexTensor:
    """Device memory at one address, and page-locked host memory for asynchronous copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._there = torch.empty(0, dtype=torch.int32)

    def grow(self, size: int, capacity: int) -> bool:
        """Grow to `size` elements if needed; return whether the address changed."""
        if self._there.numel() >= size:
            return False
        capacity = max(capacity, LEAST_CAPACITY, 2 * self._there.numel())
        self._host = _page_locked(self._device, capacity, torch.int32)
        self._there = torch.empty(capacity, dtype=torch.int32, device=self._device)
        return True

    def upload(self, values: npt.NDArray[np.int32]) -> torch.Tensor:
        """Enqueue a copy of `values` to the device. The host copy is reusable after the step."""
        host, there = self._host[: values.size], self._there[: values.size]
        host.numpy()[:] = values.reshape(-1)
        there.copy_(host, non_blocking=True)
        return there.view(values.shape)


class _Logits:
    """Page-locked host memory for a step's logits."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._ranks = device, ranks
        self._host = torch.empty(0)

    def download(self, values: torch.Tensor) -> npt.NDArray[np.float32]:
        """Copy `values` to the host, and wait for all earlier work on the stream."""
        if values.device.type == "cpu":
            return values.clone().numpy()
        if self._host.numel() < values.numel():
            self._host = _page_locked(self._device, values.numel(), values.dtype)
        host = self._host[: values.numel()].view(values.shape)
        host.copy_(values, non_blocking=True)
        nccl.settle(torch.cuda.current_stream(self._device), self._ranks)
        result: npt.NDArray[np.float32] = host.numpy()
        return result


def _page_locked(device: torch.device, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(elements, dtype=dtype, pin_memory=device.type == "cuda")
