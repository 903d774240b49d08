"""Collectives between the GPUs of ranks: NCCL, by torch.distributed.

Decision: an op of ours in the program, and torch's library behind it on CUDA. On a CPU the same
op runs over shared memory (`plugins/cpu/collectives.cpp`), so a program for several GPUs runs
without one. Nothing here has run on hardware.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from kvgraph.errors import RankError
from kvgraph.ops.group import Group, entered, gone
from kvgraph.ops.spec import OPSET_DOMAIN

TIMEOUT = timedelta(seconds=120)
"""NCCL's own, after which its watchdog ends the process: behind our deadline of 60 s, which names
the rank. It is for a host that waits in a launch, as the queue of the GPU is full."""

POLL_SECONDS = 2e-5


def join(rank: int, ranks: int) -> None:
    """Meet the other ranks at torchrun's address; from then on the ops run on CUDA.

    RankError where they do not meet.
    """
    _register()
    if not dist.is_initialized():
        try:
            dist.init_process_group(
                "nccl",
                rank=rank,
                world_size=ranks,
                timeout=TIMEOUT,
                device_id=torch.device("cuda", rank),
            )
        except (RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise RankError(
                f"rank {rank}: expected NCCL to join {ranks} ranks, got {why}"
            ) from error


def settle(stream: torch.cuda.Stream, ranks: int) -> None:
    """Wait until what is on `stream` has run. RankError where another rank has ended or failed, or
    the group's deadline passes: a collective would wait for it for ever, and NCCL's watchdog does
    not see those of a CUDA graph."""
    group = entered() if ranks > 1 else None
    if group is None:
        stream.synchronize()
        return
    event, end = stream.record_event(), time.monotonic() + group.timeout
    while not event.query():
        _require_whole(group)
        if time.monotonic() > end:
            raise RankError(
                f"rank {group.rank}: expected the end of a step of {ranks} ranks in "
                f"{group.timeout:g} s (--collective-timeout), got none; start all ranks again"
            )
        time.sleep(POLL_SECONDS)


def _require_whole(group: Group) -> None:
    """No collective of ours runs on GPUs, that would look whether processes have ended."""
    ended = group.ended()
    group.require_whole()  # one that failed has said so before it ended
    if ended:
        raise gone(ended[0])


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
