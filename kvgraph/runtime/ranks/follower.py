"""Follower: a rank above 0, which runs its part of every step that the leader sends."""

from __future__ import annotations

import os
from typing import Any

from kvgraph.contract.dims import Array
from kvgraph.errors import KVGraphError, RankError
from kvgraph.ops.group import Group
from kvgraph.runtime.ranks.part import run_part
from kvgraph.runtime.ranks.wire import Wire, mapped
from kvgraph.runtime.sessions.base import Session


class Follower:
    """Runs the leader's steps. `serve` returns when the leader is done; RankError if it is lost."""

    def __init__(self, session: Session, group: Group, wire: Wire) -> None:
        self._session, self._group, self._wire = session, group, wire
        self._buffers: dict[str, Any] = {}
        self._steps = 0

    def serve(self) -> None:
        try:
            self._serve()
        finally:
            self._group.close()

    def _serve(self) -> None:
        self._group.enter()
        self._wire.send({"ready": self._group.rank})
        while True:
            said, arrays, file = self._wire.receive()
            if "run" in said:
                self._require_next(said["step"])
                self._run(arrays, said["run"] == "captured")
            elif "allocate" in said:
                self._allocate(said["allocate"], said["sizes"], file)
            elif "close" in said:
                return
            else:
                raise RankError(f"rank 0: expected a step, got {sorted(said)}")

    def _require_next(self, step: int) -> None:
        """Abort all ranks unless `step` is next: else parts of different steps would be summed."""
        self._steps += 1
        if step != self._steps:
            self._group.abort()
            raise RankError(
                f"rank 0: expected step {self._steps}, got step {step}; start all ranks again"
            )

    def _allocate(self, name: str, sizes: dict[str, int], file: int | None) -> None:
        """Allocate a pool: memory that the leader maps too, or on this rank's device. The old pool
        is freed first: a device may not have room for two."""
        self._buffers.pop(name, None)
        symbol = next(s for s in self._session.signature.inputs if s.name == name)
        if file is not None:
            self._buffers[name] = mapped(file, symbol.extents(sizes), symbol.dtype)
            os.close(file)
            return
        try:
            self._buffers[name] = self._session.allocate(symbol, sizes).handle
        except KVGraphError as error:
            self._wire.send({"refused": str(error)})
            raise
        self._wire.send({"allocated": name})

    def _run(self, given: list[Array], capture: bool) -> None:
        arrays, tensors = [], iter(given)
        for symbol in self._session.signature.inputs:
            is_buffer = symbol.kind == "buffer"
            arrays.append(self._buffers[symbol.name] if is_buffer else next(tensors))
        run_part(self._session, self._group, arrays, capture=capture)
