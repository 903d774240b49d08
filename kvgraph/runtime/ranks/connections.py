"""Connections between ranks of several machines: addresses, direction, and detection of lost peers.

A rank connects to all lower ranks. A connection begins with the secret of the run, so that other
clients of the port are rejected.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence

from kvgraph.errors import RankError
from kvgraph.ops.group import gone
from kvgraph.runtime.ranks.launched import Launched
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

HELLO = struct.Struct("32s i 4s")
"""The run's secret, the rank, and the purpose of the connection (LIFE or STEP)."""
LIFE, STEP = b"life", b"step"

STORE_HINT = (
    "set MASTER_ADDR to an address of rank 0's machine, and MASTER_PORT to a port that nothing "
    "else has"
)

HELLO_SECONDS = 5.0
RETRY_SECONDS = 0.05

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP keepalive: a machine that stopped responding is detected after 25 s."""

SIOCGIFADDR = 0x8915

Connections = dict[int, socket.socket]
"""Connection by the rank at the other end."""
Address = tuple[str, int]


def own_host(own: Launched) -> str:
    """Address at which other machines reach this one: of the interface GLOO_SOCKET_IFNAME, else of
    the route to rank 0."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        if interface:
            return _host_of(interface)
        found = socket.getaddrinfo(own.address, own.port, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        reraise_if_signalled(error)
        name = f"interface {interface!r}" if interface else f"a way to {own.address!r}"
        raise RankError(f"rank {own.rank}: expected {name}, got {error}") from error


def _host_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])


def listen_for_store(port: int) -> socket.socket:
    """Listen at the run's port, on all networks of this machine."""
    if socket.has_dualstack_ipv6():
        with ignoring(OSError):  # IPv6 may be off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def wait_for_port(own: Launched, timeout: float) -> None:
    """Wait until the run's store accepts connections; RankError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((own.address, own.port), timeout=_left(end)).close()
            return
        except OSError as error:
            reraise_if_signalled(error)
            if time.monotonic() > end:
                raise RankError(
                    f"rank 0: expected the run's store at {own.address}:{own.port}, got no answer "
                    f"in {timeout:g} s ({error}); {STORE_HINT}"
                ) from error
            time.sleep(RETRY_SECONDS)


def listen(host: str, size: int) -> socket.socket:
    """Listen at a free port, with a backlog for all connections of `size` ranks."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(2 * size)
    return listener


def connect(
    own: Launched,
    listener: socket.socket,
    addresses: Sequence[Address],
    secret: str,
    timeout: float,
) -> tuple[Connections, Connections]:
    """A lifeline to each other rank, and step connections between rank 0 and each other rank.

    RankError names a rank that does not connect, or refuses a connection.
    """
    end = time.monotonic() + timeout
    kinds: dict[bytes, Connections] = {LIFE: {}, STEP: {}}
    try:
        for rank in range(own.rank):
            for kind in kinds if rank == 0 else (LIFE,):
                hello = HELLO.pack(secret.encode(), own.rank, kind)
                kinds[kind][rank] = _call(rank, addresses[rank], hello, end)
        above = range(own.rank + 1, own.size)
        wanted = {(kind, rank) for rank in above for kind in (kinds if own.rank == 0 else (LIFE,))}
        while wanted:
            kind, rank, connection = _accept(listener, wanted, secret.encode(), end, timeout)
            kinds[kind][rank] = connection
            wanted.discard((kind, rank))
    except BaseException:
        for connections in kinds.values():
            close_all(connections)
        raise
    return kinds[LIFE], kinds[STEP]


def close_all(connections: Connections) -> None:
    for connection in connections.values():
        connection.close()


def require_all(lifelines: Connections) -> None:
    """Raise RankError if the process at the other end of a lifeline has ended."""
    for rank, lifeline in lifelines.items():
        try:
            ended = not lifeline.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        except OSError as error:
            reraise_if_signalled(error)
            ended = True
        if ended:
            raise gone(rank)


def _call(rank: int, address: Address, hello: bytes, end: float) -> socket.socket:
    try:
        connection = socket.create_connection(address, timeout=_left(end))
        connection.sendall(hello)
    except OSError as error:
        reraise_if_signalled(error)
        raise RankError(
            f"rank {rank}: expected it to take a connection at {address[0]}, got {error}"
        ) from error
    return _kept_alive(connection)


def _accept(
    listener: socket.socket,
    wanted: set[tuple[bytes, int]],
    secret: bytes,
    end: float,
    timeout: float,
) -> tuple[bytes, int, socket.socket]:
    """Accept the next `wanted` connection; close all others."""
    while True:
        listener.settimeout(_left(end))
        try:
            connection, _ = listener.accept()
        except OSError as error:
            reraise_if_signalled(error)
            missing = min(rank for _, rank in wanted)
            raise RankError(
                f"rank {missing}: expected a connection from it in {timeout:g} s, got none"
            ) from error
        said = _hello(connection, end)
        if said is not None and said[0] == secret and (said[2], said[1]) in wanted:
            return said[2], said[1], _kept_alive(connection)
        connection.close()


def _hello(connection: socket.socket, end: float) -> tuple[bytes, int, bytes] | None:
    connection.settimeout(min(_left(end), HELLO_SECONDS))
    data = b""
    with ignoring(OSError):
        while len(data) < HELLO.size and (more := connection.recv(HELLO.size - len(data))):
            data += more
    return HELLO.unpack(data) if len(data) == HELLO.size else None


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
