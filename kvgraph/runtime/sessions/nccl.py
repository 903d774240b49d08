"""Collectives between the GPUs of ranks: NCCL, by torch.distributed.

Decision: an op of ours in the program, and torch's library behind it on CUDA. On a CPU the same
op runs over shared memory (`plugins/cpu/collectives.cpp`), so a program for several GPUs runs
without one. Nothing here has run on hardware.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from kvgraph.errors import RankError
from kvgraph.ops.spec import OPSET_DOMAIN


def join(rank: int, ranks: int) -> None:
    """Meet the other ranks at torchrun's address; from then on the ops run on CUDA.

    RankError where they do not meet.
    """
    _register()
    if not dist.is_initialized():
        try:
            dist.init_process_group(
                "nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
            )
        except (RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise RankError(
                f"rank {rank}: expected NCCL to join {ranks} ranks, got {why}"
            ) from error


def all_reduce(
    x: torch.Tensor, residual: torch.Tensor | None = None, *, ranks: int
) -> torch.Tensor:
    """The sum of x `[rows, W]` over all ranks, and the residual."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total if residual is None else total.add_(residual)


def all_gather(x: torch.Tensor, *, ranks: int, out_width: int) -> torch.Tensor:
    """The columns of x `[rows, W]` of all ranks: `[rows, out_width]`."""
    rows = x.shape[0]
    parts = x.new_empty(ranks * rows, x.shape[1])  # one rank's rows behind another's
    dist.all_gather_into_tensor(parts, x.contiguous())
    return parts.view(ranks, rows, -1).transpose(0, 1).reshape(rows, out_width)


@cache
def _register() -> torch.library.Library:
    library = torch.library.Library(OPSET_DOMAIN, "IMPL")
    library.impl("all_reduce", all_reduce, "CUDA")
    library.impl("all_gather", all_gather, "CUDA")
    return library
