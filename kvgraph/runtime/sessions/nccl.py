"""Collectives between the GPUs of ranks: NCCL, by torch.distributed.

Decision: the program has an op of ours, which calls torch's library on CUDA. On a CPU the same op
uses shared memory (`plugins/cpu/collectives.cpp`), so a program for several GPUs runs without one.
Nothing here has run on hardware.
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
"""NCCL's own timeout, after which its watchdog ends the process. It is later than our deadline of
60 s, which names the rank. It only matters while the host waits in a launch on a full GPU queue."""

POLL_SECONDS = 2e-5


def join(rank: int, ranks: int) -> None:
    """Join the other ranks at torchrun's address, and register the ops for CUDA.

    RankError if the ranks do not meet.
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
    """Wait for all work on `stream`. RankError if another rank has ended or failed, or the group's
    deadline passes: a collective would wait for that rank for ever, and NCCL's watchdog does not
    see collectives in a CUDA graph."""
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
    """Raise RankError if a rank has ended: on GPUs no collective of ours checks that."""
    ended = group.ended()
    group.require_whole()  # first: a rank that failed has reported it before it ended
    if ended:
        raise gone(ended[0])


def all_reduce(
    x: torch.Tensor, residual: torch.Tensor | None = None, *, ranks: int
) -> torch.Tensor:
    """Return the sum of x `[rows, W]` over all ranks, plus the residual if given."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total if residual is None else total.add_(residual)


def all_gather(x: torch.Tensor, *, ranks: int, out_width: int) -> torch.Tensor:
    """The columns of x `[rows, W]` of all ranks: `[rows, out_width]`."""
    rows = x.shape[0]
    parts = x.new_empty(ranks * rows, x.shape[1])  # the rows of rank 0, then of rank 1, ...
    dist.all_gather_into_tensor(parts, x.contiguous())
    return parts.view(ranks, rows, -1).transpose(0, 1).reshape(rows, out_width)


@cache
def _register() -> torch.library.Library:
    library = torch.library.Library(OPSET_DOMAIN, "IMPL")
    library.impl("all_reduce", all_reduce, "CUDA")
    library.impl("all_gather", all_gather, "CUDA")
    return library
