"""An address that is kept for Ray's proxy, which listens there later."""

from __future__ import annotations

import socket

from kvgraph.serve.server import listen


def hold(host: str, port: int) -> socket.socket:
    """Bound until it is closed; it takes no connections. OSError for an address of another one.

    Sockets with SO_REUSEPORT, of the same user, may listen there meanwhile, as Ray's proxy does.
    `listen` and `hold` of other processes are refused.
    """
    with listen(host, port) as first:  # as long as it is open, no other is let in
        held = socket.socket(first.family)
        for one in (first, held):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if first.family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Connections that have just ended do not refuse it; once bound, it refuses others.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(first.getsockname())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return held
