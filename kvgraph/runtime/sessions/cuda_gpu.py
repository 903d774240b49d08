"""The GPU of this machine: the artifact's cubins on torch's streams, in torch's CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from kvgraph.errors import MissingDependencyError
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.variants import Variant
from kvgraph.runtime.cubins import Cubins
from kvgraph.runtime.sessions import nccl
from kvgraph.runtime.sessions.launches import Operands
from kvgraph.runtime.sessions.uncollected import uncollected


class CudaGpu:
    """GPU `ordinal` with the kernels of an artifact's folder, on torch's current stream.

    `ranks`: of the artifact; with several, their collectives are among what is waited for.
    """

    def __init__(self, folder: Path, ordinal: int = 0, ranks: int = 1) -> None:
        if not torch.cuda.is_available():
            raise MissingDependencyError(
                f"torch: expected a build with CUDA that sees this machine's GPU, got "
                f"{torch.__version__}; pip install torch"
            )
        self.device, self._ranks = torch.device("cuda", ordinal), ranks
        torch.zeros(1, device=self.device)  # its context is the one that cubins are loaded into
        self._cubins = Cubins(folder / "kernels", ordinal)
        self.arch, self.multiprocessors = self._cubins.arch, self._cubins.multiprocessors
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # that share the pool's memory
        self._stream = torch.cuda.Stream(self.device)

    def free_memory(self) -> int:
        """Memory that torch keeps for later tensors is not free."""
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free

    def require(self, variants: Iterable[Variant]) -> None:
        self._cubins.require(variants)

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        """Scratch memory goes back to torch's allocator at once: the stream orders its reuse."""
        if plan.scratch:
            operands = {**operands, **self._scratch(plan)}
        addresses = {name: tensor.data_ptr() for name, tensor in operands.items()}
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        self._cubins.launch(plan, addresses, stream)

    def _scratch(self, plan: LaunchPlan) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(plan.scratch[name], dtype=getattr(torch, dtype), device=self.device)
            for name, dtype in plan.scratch_dtypes().items()
        }

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Once for real, as libraries set themselves up; then recorded, on the same stream.

        One stream for all captures: libraries keep workspaces per stream, and these must not come
        from the graphs' memory. Not by `torch.cuda.graph`, which gives all that torch's allocator
        keeps back to the driver: graphs would take the memory of the largest step.
        """
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                step()
                nccl.settle(stream, self._ranks)
                with uncollected():
                    result = self._record(graph, step)
        finally:  # a step that cannot be recorded has written to the pools all the same
            torch.cuda.current_stream(self.device).wait_stream(stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def _record(
        self, graph: torch.cuda.CUDAGraph, step: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Ends the capture on every way out; the step's own error is the one that is told."""
        if not self._graphs:  # torch refuses a pool whose last graph has gone
            if self._pool is not None:
                torch.cuda.empty_cache()  # a capture does not get at the old pool's memory
            self._pool = torch.cuda.graph_pool_handle()
        # Errors of this thread alone: copies between tiers go on meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.add(graph)
        try:
            result = step()
        except BaseException:
            with suppress(RuntimeError):
                self._end(graph)
            raise
        self._end(graph)
        return result

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._graphs = WeakSet()  # torch may go on recording into this pool
            raise
