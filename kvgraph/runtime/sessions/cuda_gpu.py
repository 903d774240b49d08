"""CudaGpu: launches an artifact's cubins on torch's streams, and captures CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

from kvgraph.errors import MissingDependencyError
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.variants import Variant
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions import nccl
from kvgraph.runtime.sessions.cubins import Cubins
from kvgraph.runtime.sessions.launches import Operands
from kvgraph.runtime.sessions.uncollected import uncollected


class CudaGpu:
    """The GPU of the rank's index with the kernels of an artifact, on torch's current stream.

    With several ranks, waits include the ranks' collectives.
    """

    def __init__(self, artifact: ArtifactFolder) -> None:
        if not torch.cuda.is_available():
            raise MissingDependencyError(
                f"torch: expected a build with CUDA that sees this machine's GPU, got "
                f"{torch.__version__}; pip install torch"
            )
        self.device, self._ranks = torch.device("cuda", artifact.rank), artifact.ranks
        torch.zeros(1, device=self.device)  # creates the context that cubins are loaded into
        self._cubins = Cubins(artifact.folder, artifact.manifest.files, artifact.rank)
        self.arch, self.multiprocessors = self._cubins.arch, self._cubins.multiprocessors
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # graphs that use `_pool`
        self._stream = torch.cuda.Stream(self.device)

    def free_memory(self) -> int:
        """Free bytes of the device, without memory that torch caches for later tensors."""
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free

    def require(self, variants: Iterable[Variant]) -> None:
        self._cubins.require(variants)

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        """Enqueue `plan`. Its scratch memory is freed at once: the stream orders its reuse."""
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
        """Run `step` once, so that libraries initialise, then record it on the same stream.

        All captures share one stream: libraries keep a workspace per stream, which must not come
        from the graphs' memory. `torch.cuda.graph` is not used, as it returns the memory that
        torch's allocator caches to the driver: graphs would take the memory of the largest step.
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
        """Record `step`. The capture ends even on errors, and the step's own error is raised."""
        if not self._graphs:  # torch rejects a pool whose last graph was freed
            if self._pool is not None:
                torch.cuda.empty_cache()  # a capture cannot reuse the old pool's memory
            self._pool = torch.cuda.graph_pool_handle()
        # Thread-local mode: copies between tiers continue in other threads.
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
            self._graphs = WeakSet()  # torch may still record into this pool: use another one
            raise
