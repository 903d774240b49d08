"""LeaderSession: rank 0's session of a tensor-parallel artifact, which sends steps to all ranks.

Decision: the leader maps the pools of all ranks. A manager with tiers or a prefix cache then copies
and keeps pages of every shard as on one device, and a step's message holds only its few small
arrays, which all shards share. Pools on GPUs and on other machines stay with their ranks, and
support no tiers.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import TensorType
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.inputs import Buffer, KVCacheInputs, ModelInputs
from kvgraph.errors import BindingError, CapacityError, RankError
from kvgraph.ops.group import Group
from kvgraph.runtime.ranks.part import has_run, run_part
from kvgraph.runtime.ranks.wire import Wire, mapped, shared_file
from kvgraph.runtime.sessions.base import MappedFile, Session

_LEADERS: weakref.WeakSet[LeaderSession] = weakref.WeakSet()


def _leave_ranks() -> None:
    """End no rank from a forked child: they are its parent's."""
    for leader in _LEADERS:
        leader._close.detach()


os.register_at_fork(after_in_child=_leave_ranks)


class LeaderSession(Session):
    """Runs an artifact of several ranks. `own`: rank 0's session; `wires`: to the other ranks.

    After a rank has failed, every call raises RankError.
    """

    def __init__(
        self,
        own: Session,
        group: Group,
        wires: Sequence[Wire],
        ended: Callable[[], None] = lambda: None,
        *,
        maps_pools: bool = True,
    ) -> None:
        super().__init__(own.artifact)
        here = group.size if maps_pools else 1  # ranks whose files this machine has
        parts = [replace(own.artifact, rank=rank) for rank in range(1, here)]
        theirs = [MappedFile(part, name) for part in parts for name in own.mapped]
        self._watched = [*own._watched, *theirs]
        self.captures = own.captures
        self.memory = own.memory
        self.step_tokens = own.step_tokens
        self.limits = own.limits
        self._own, self._group, self._wires = own, group, list(wires)
        self.host_pools = own.host_pools and maps_pools
        self._steps = 0
        self._is_half = False  # whether other ranks have a step that rank 0 has not completed
        self._lost: str | None = None  # error of the first step that failed
        self._close = weakref.finalize(self, end_ranks, self._wires, group, ended)
        _LEADERS.add(self)
        for wire in self._wires:
            wire.receive()  # its ready message
            wire.limit(group.timeout)

    @property
    def ranks(self) -> int:
        return self._group.size

    def _address_of(self, array: Any) -> int:
        return self._own._address_of(array)

    def allocate(self, symbol: TensorType, sizes: Mapping[str, int]) -> Buffer:
        rank = symbol.device.index
        if rank == 0:
            return self._own.allocate(symbol, sizes)
        known = replace(symbol, device=symbol.device._replace(index=0))
        self._require_known(known if rank < self.ranks else symbol)
        shape = symbol.extents(sizes)
        wire, said = self._wires[rank - 1], {"allocate": symbol.name, "sizes": dict(sizes)}
        if not self.host_pools:
            wire.send(said)
            answer, _, _ = wire.receive()
            if "refused" in answer:
                raise CapacityError(f"rank {rank}: {answer['refused']}")
            return Buffer(symbol.dtype, shape, symbol.device)
        nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[symbol.dtype].numpy.itemsize
        file = shared_file(nbytes)
        try:
            array = mapped(file, shape, symbol.dtype)
            wire.send(said, file=file)
        finally:
            os.close(file)
        return Buffer(symbol.dtype, shape, symbol.device, array)

    def free_memory(self) -> int | None:
        """Free bytes of all ranks together, assuming that their devices are alike."""
        own = self._own.free_memory()
        return None if own is None else own * self.ranks

    def _arrays(self, inputs: ModelInputs, kv: KVCacheInputs) -> list[Any]:
        """Arrays of rank 0; all ranks share the small ones."""
        records = getattr(kv, "inputs", None)
        if records is None or len(records) != self.ranks:
            got = type(kv).__name__ if records is None else f"{len(records)}"
            raise BindingError(f"cache: expected records of {self.ranks} devices, got {got}")
        return super()._arrays(inputs, records[0])

    def _run(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        return self._step(arrays, capture=False)

    def _run_captured(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        return self._step(arrays, capture=True)

    def _synchronize(self) -> None:
        self._own.synchronize()

    def _step(self, arrays: Sequence[Any], *, capture: bool) -> npt.NDArray[np.float32]:
        self._require_whole()
        symbols = self.signature.inputs
        small = [a for s, a in zip(symbols, arrays, strict=True) if s.kind == "tensor"]
        before, self._is_half = self._group.calls, True
        try:
            self._group.enter()
            self._steps += 1
            said = {"run": "captured" if capture else "once", "step": self._steps}
            for wire in self._wires:
                wire.send(said, small)
            logits = run_part(self._own, self._group, arrays, capture=capture)
            self._is_half = False
            return logits
        except BaseException as error:  # also an interrupt: other ranks may have the step
            if isinstance(error, RankError):
                self._lost = str(error)
            if has_run(self._own, self._group, before):
                self._is_half = False
            else:
                self._group.abort()
            raise

    def _require_whole(self) -> None:
        """Raise RankError, always with the same message, once the ranks' steps differ."""
        if self._is_half:  # an interrupt came during the handling of another error
            self._group.abort()
        if self._lost is not None:
            raise RankError(self._lost)
        self._group.require_whole()

    def require_ranks(self) -> None:
        self._require_whole()
        try:
            for wire in self._wires:
                wire.require_open()
        except RankError as error:
            self._lost = str(error)
            self._group.abort()
            raise

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._lost = self._lost or "rank 0: expected an open session, got one that was closed"
        self._close()


def end_ranks(wires: Sequence[Wire], group: Group, ended: Callable[[], None]) -> None:
    """End the ranks at `wires`. `ended` waits for them. Idempotent."""
    with ExitStack() as ending:  # from the last one, all also if one is interrupted
        ending.callback(ended)
        for wire in wires:
            ending.callback(_end, wire)
        group.close()  # also the run's store: followers of the next engine would look there


def _end(wire: Wire) -> None:
    try:
        with suppress(RankError):
            wire.send({"close": 1})
    finally:
        wire.close()
