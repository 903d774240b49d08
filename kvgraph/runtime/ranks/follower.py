"""A rank above 0: runs its part of every step that the leader hands it."""

from __future__ import annotations

import os

from kvgraph.contract.dims import Array
from kvgraph.errors import RankError
from kvgraph.ops.group import Group
from kvgraph.runtime.ranks.part import run_part
from kvgraph.runtime.ranks.wire import Wire, mapped
from kvgraph.runtime.sessions.base import Session


class Follower:
    """`serve` returns when the leader is done; RankError when it is gone."""

    def __init__(self, session: Session, group: Group, wire: Wire) -> None:
        self._session, self._group, self._wire = session, group, wire
        self._buffers: dict[str, Array] = {}

    def serve(self) -> None:
        self._group.enter()
        self._wire.send({"ready": self._group.rank})
        while True:
            said, arrays, file = self._wire.receive()
            if "run" in said:
                self._run(arrays)
            elif "allocate" in said:
                assert file is not None
                self._buffers[said["allocate"]] = mapped(file, said["shape"], said["dtype"])
                os.close(file)
            elif "close" in said:
                return
            else:
                raise RankError(f"rank 0: expected a step, got {sorted(said)}")

    def _run(self, given: list[Array]) -> None:
        arrays, tensors = [], iter(given)
        for symbol in self._session.signature.inputs:
            is_buffer = symbol.kind == "buffer"
            arrays.append(self._buffers[symbol.name] if is_buffer else next(tensors))
        run_part(self._session, self._group, arrays)
