"""Where a server listens: addresses of IPv6, and Unix sockets."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from kvgraph.serve.server import BACKLOG, listen, url_of
from kvgraph.serve.unix_socket import answers_at, listen_at
from tests.serve.running import SECONDS, serving
from tests.support.command_line import run

both_kinds = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")


def test_addresses_of_ipv6_have_brackets() -> None:
    assert url_of("::1", 8000) == "http://[::1]:8000"
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"


@both_kinds
@pytest.mark.parametrize("host", ["::", "[::]"])
def test_all_addresses_are_those_of_ipv4_too(host: str) -> None:
    with listen(host, 0) as listening:
        port = listening.getsockname()[1]
        for client in ("127.0.0.1", "::1"):
            socket.create_connection((client, port), timeout=SECONDS).close()


def test_a_unix_socket(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.touch()
    outcome = run("serve", artifact, "--uds", path)
    assert outcome.code == 2
    assert f"{path}: expected a path for a Unix socket, got another file there" in outcome.err
    path.unlink()
    with serving(tmp_path / "log", artifact, "--threads", 1, "--uds", path) as server:
        assert server.url == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://x", timeout=SECONDS) as client:
            body = {"prompt": "The", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
        outcome = run("serve", artifact, "--uds", path)
        assert outcome.code == 2
        assert "got one where another process answers" in outcome.err
    assert not path.exists()
    assert '"path":"/v1/completions","status":200' in server.log()


def test_a_later_socket_at_the_path_stays(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serving(tmp_path / "log", artifact, "--threads", 1, "--uds", path):
        path.unlink()
        later = listen_at(path, BACKLOG)
    with later:
        assert answers_at(path)


def test_a_unix_socket_that_was_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listen_at(path, BACKLOG).close()
    assert path.is_socket()
    assert not answers_at(path)
    with listen_at(path, BACKLOG):
        assert answers_at(path)
        with pytest.raises(OSError, match="where another process answers"):
            listen_at(path, BACKLOG)


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="expected a path for a Unix socket, got AF_UNIX path too"):
        listen_at(tmp_path / ("a" * 200), BACKLOG)


def test_replicas_have_no_unix_socket(artifact: Path) -> None:
    done = run("serve", artifact, "--replicas", 2, "--uds", "socket")
    assert "--uds: expected one engine, got --replicas" in done.err
    assert done.code == 2
