"""An address that is kept for Ray's proxy."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("uvicorn", reason="pip install 'kvgraph[serve]'")

from kvgraph.serve.replicas.address import hold
from kvgraph.serve.server import listen

IN_USE = "expected an address to listen at"


def as_ray_does(address: tuple[str, int]) -> socket.socket:
    """`set_socket_reuse_port` of Ray Serve, then what its proxy does."""
    proxy = socket.socket()
    proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    proxy.bind(address)
    proxy.listen()
    return proxy


def connect(address: tuple[str, int], server: socket.socket) -> None:
    """The server closes first: its end of the connection stays for a minute."""
    server.settimeout(60)
    with socket.create_connection(address, timeout=60):
        server.accept()[0].close()


def test_others_are_refused_and_the_proxy_is_not() -> None:
    with hold("127.0.0.1", 0) as held:
        address = held.getsockname()
        for take in (hold, listen):
            with pytest.raises(OSError, match=IN_USE):
                take(*address)
        for _ in range(2):  # Serve starts a proxy again that has died
            with as_ray_does(address) as proxy:
                for _ in range(20):
                    connect(address, proxy)
                for take in (hold, listen):
                    with pytest.raises(OSError, match=IN_USE):
                        take(*address)
    hold(*address).close()


def test_connections_that_have_ended_do_not_refuse_it() -> None:
    with listen("127.0.0.1", 0) as earlier:
        address = earlier.getsockname()
        connect(address, earlier)
    with hold(*address) as held, as_ray_does(held.getsockname()) as proxy:
        connect(address, proxy)


def test_an_address_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match=IN_USE):
        hold(*taken.getsockname())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_of_ipv6() -> None:
    with hold("::1", 0) as held:
        host, port = held.getsockname()[:2]
        with pytest.raises(OSError, match=IN_USE):
            hold(host, port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_all_addresses_are_those_of_ipv4_too() -> None:
    """As Ray's proxy has them."""
    with hold("[::]", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match=IN_USE):
            hold("127.0.0.1", port)
