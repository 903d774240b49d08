"""Transfer of pages by NIXL: the sender writes into the receiver's pools without extra copies."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvgraph.contract.inputs import Buffer
from kvgraph.contract.loading import require_package
from kvgraph.contract.plain import JsonObject
from kvgraph.errors import DeviceError, TransferError
from kvgraph.kv.tiers.exchange import LeafPages

TIMEOUT_SECONDS = 60.0
"""Longest time of one transfer."""

Extent = tuple[int, int, int]
"""Address, bytes and device: a NIXL descriptor."""


class NixlPools:
    """One NIXL agent over a replica's pools, which stay registered as long as it exists.

    DeviceError for pools that are not host memory; MissingDependencyError without NIXL.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if not isinstance(buffer.handle, np.ndarray):
                raise DeviceError(
                    f"nixl: expected pools in host memory, got one of {buffer.device}"
                )
        install = "pip install 'kvgraph[nixl]'"
        nixl = require_package("nixl._api", "needed for this transfer", install)
        config = nixl.nixl_agent_config(backends=["UCX"])
        self._agent = nixl.nixl_agent(f"kvgraph-{uuid.uuid4().hex}", config)
        pools = [(b.handle.ctypes.data, b.handle.nbytes, 0, "") for b in buffers]
        self._registered = self._agent.register_memory(pools, "DRAM")

    def describe(self, leaves: Sequence[LeafPages]) -> JsonObject:
        """Metadata of this agent and addresses of the pages of `leaves`, for the peer's `write`."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"agent": metadata, "extents": extents(leaves)}

    def write(self, leaves: Sequence[LeafPages], other: JsonObject) -> None:
        """Copy the pages of `leaves` to the peer. `other`: result of the peer's `describe`."""
        mine, theirs = extents(leaves), [tuple(extent) for extent in other["extents"]]
        if [size for _, size, _ in mine] != [extent[1] for extent in theirs]:
            raise TransferError(
                f"nixl: expected {len(mine)} pieces of the same sizes, got {len(theirs)}"
            )
        if not mine:
            return
        agent = self._agent
        peer = agent.add_remote_agent(base64.b64decode(other["agent"]))
        try:
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(mine, "DRAM"),
                agent.get_xfer_descs(theirs, "DRAM"),
                peer,
            )
            try:
                self._finish(handle)
            finally:
                agent.release_xfer_handle(handle)
        finally:
            agent.remove_remote_agent(peer)

    def _finish(self, handle: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(0.0001)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"nixl: expected a transfer that ends, got state {state}")


def extents(leaves: Sequence[LeafPages]) -> list[Extent]:
    """Extents of the pages of `leaves`: page after page, and buffer after buffer in each page."""
    return [
        (buffer.handle.ctypes.data + page * size, size, 0)
        for leaf in leaves
        for page in leaf.pages
        for buffer, size in zip(leaf.pools.buffers, leaf.pools.sizes, strict=True)
    ]
