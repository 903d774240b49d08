"""Reserves an address until Ray's proxy listens there."""

from __future__ import annotations

import socket

from kvgraph.serve.server import listen


def hold(host: str, port: int) -> socket.socket:
    """A bound socket that reserves the address until it is closed; it takes no connections.

    OSError for an address in use. Sockets of the same user with SO_REUSEPORT can still listen
    there, as Ray's proxy does. `listen` and `hold` of other processes fail.
    """
    with listen(host, port) as first:  # while it is open, no other process can bind the address
        held = socket.socket(first.family)
        for one in (first, held):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if first.family == socket.AF_INET6:
            is_alone = first.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, is_alone)
        # SO_REUSEADDR ignores recently closed connections; off again, it keeps others out.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(first.getsockname())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return held
