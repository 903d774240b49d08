"""The GPU of this machine: the artifact's cubins on torch's streams, in torch's CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from kvgraph.errors import MissingDependencyError
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.variants import Variant
from kvgraph.runtime.cubins import Cubins
from kvgraph.runtime.sessions.program import Operands


class CudaGpu:
    """GPU `ordinal` with the kernels of an artifact's folder, on torch's current stream."""

    def __init__(self, folder: Path, ordinal: int = 0) -> None:
        if not torch.cuda.is_available():
            raise MissingDependencyError(
                f"torch: expected a build with CUDA that sees this machine's GPU, got "
                f"{torch.__version__}; pip install torch"
            )
        self.device = torch.device("cuda", ordinal)
        torch.zeros(1, device=self.device)  # its context is the one that cubins are loaded into
        self._cubins = Cubins(folder / "kernels", ordinal)
        self.arch, self.multiprocessors = self._cubins.arch, self._cubins.multiprocessors
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)

    def free_memory(self) -> int:
        """Memory that torch keeps for later tensors is not free."""
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free

    def require(self, variants: Iterable[Variant]) -> None:
        self._cubins.require(variants)

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        """Scratch memory goes back to torch's allocator at once: the stream orders its reuse."""
        scratch = {
            name: torch.empty(plan.scratch[name], dtype=getattr(torch, dtype), device=self.device)
            for name, dtype in plan.scratch_dtypes().items()
        }
        addresses = {name: tensor.data_ptr() for name, tensor in {**operands, **scratch}.items()}
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._cubins.launch(plan, addresses, stream)

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Once for real, as libraries set themselves up; then recorded, on the same stream.

        One stream for all captures: libraries keep workspaces per stream, and these must not come
        from the graphs' memory.
        """
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                step()
                # Errors of this thread alone: copies between tiers go on meanwhile.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                ):
                    result = step()
        finally:  # a step that cannot be recorded has written to the pools all the same
            torch.cuda.current_stream(self.device).wait_stream(stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
