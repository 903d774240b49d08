"""Connections of clients that send too much, too slowly or too early, or that take nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from http.client import HTTPResponse
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from kvgraph.serve.app import Endpoints
from kvgraph.serve.errors import ServeError
from kvgraph.serve.options import ServeOptions
from tests.serve.running import LIMITED, Server, posted, serving, wait_for

MOST = 65_536
"""Bytes of a head."""
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: "


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
def test_a_head_that_is_too_large(server: Server, end: bytes) -> None:
    with server.connect() as to, HTTPResponse(to) as answer:
        to.sendall(HEAD.ljust(MOST + 1 - len(end), b"a") + end)
        answer.begin()
        assert answer.status == 431
        assert answer.will_close
        error = json.load(answer)["error"]
    assert error["message"] == "head: expected at most 65536 bytes, got more"
    assert (error["type"], error["code"]) == ("invalid_request_error", "head_too_large")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/9\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # of TLS
        b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
    ],
)
def test_what_is_no_request(server: Server, sent: bytes) -> None:
    """One line of the log tells of it, in JSON as all."""
    before = len(server.log())
    with server.connect() as to, HTTPResponse(to) as answer:
        to.sendall(sent)
        answer.begin()
        assert (answer.status, answer.will_close) == (400, True)
        assert answer.headers["content-type"] == "application/json"
        message = json.load(answer)["error"]["message"]
    assert message == "request: expected one in HTTP/1.1, got what is none"
    wait_for(lambda: '"path":null' in server.log()[before:], "no line")
    lines = [json.loads(line) for line in server.log()[before:].splitlines()]
    assert [line["status"] for line in lines] == [400]


def test_heads_of_the_largest_size(server: Server) -> None:
    with server.connect() as to:
        for _ in range(2):  # of one connection
            to.sendall(HEAD.ljust(MOST - 4, b"a") + b"\r\n\r\n")
            with HTTPResponse(to) as answer:
                answer.begin()
                assert (answer.status, answer.read()) == (200, b"{}")


def test_fields_behind_chunks_that_are_too_large(server: Server) -> None:
    with server.connect() as to:
        to.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        to.sendall(b"4\r\nbody\r\n0\r\nX-Long: ")
        with pytest.raises(ConnectionError):
            to.sendall(b"a" * (MOST * 1000))


def test_a_head_that_stops_is_refused(artifact: Path, tmp_path: Path) -> None:
    options = json.dumps({"receive_seconds": 0.2})
    with serving(tmp_path / "log", artifact, options, command=LIMITED) as server:
        with server.connect() as to, HTTPResponse(to) as answer:
            to.sendall(HEAD)
            answer.begin()
            assert (answer.status, answer.will_close) == (408, True)
            message = json.load(answer)["error"]["message"]
        assert message == "head: expected all of it in 0.2 seconds, got a part"
        with server.connect() as to:  # that says nothing is told nothing
            assert to.recv(1) == b""


@pytest.mark.parametrize(
    ("pauses", "is_taken"), [([0.6] * 3, True), ([1.1], False), ([0.6, 1.1], False)]
)
def test_a_body_has_its_time_from_piece_to_piece(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], is_taken: bool
) -> None:
    """Of at most a second, on a clock that the pieces move."""
    service: Any = SimpleNamespace(options=ServeOptions(receive_seconds=1))

    async def body() -> bytes:
        now = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)

        async def stream() -> AsyncIterator[bytes]:
            nonlocal now
            for pause in pauses:
                now += pause
                for _ in range(2):  # a time that is over ends here
                    await asyncio.sleep(0)
                yield b"a"

        request: Any = SimpleNamespace(headers=Headers(), stream=stream)
        return await Endpoints(service)._body(request)

    if is_taken:
        assert asyncio.run(body()) == b"aaa"
    else:
        with pytest.raises(ServeError, match="got nothing more for 1 seconds"):
            asyncio.run(body())


def test_a_body_that_comes_behind_its_answer(artifact: Path, tmp_path: Path) -> None:
    """The connection ends as an idle one does, whether the body is whole or not."""
    options = json.dumps({"receive_seconds": 0.2, "keep_alive_seconds": 0.2})
    head = b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with serving(tmp_path / "log", artifact, options, command=LIMITED) as server:
        for size in (1, 100):
            with server.connect() as to, HTTPResponse(to) as answer:
                to.sendall(head)
                answer.begin()
                assert (answer.status, answer.will_close) == (404, False)
                answer.read()
                to.sendall(b"a" * size)
                assert to.recv(1) == b""


def test_an_idle_connection_has_its_own_time(artifact: Path, tmp_path: Path) -> None:
    """Longer than proxies keep one, and longer than a request may take to come."""
    assert ServeOptions().keep_alive_seconds > 60
    head = b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n"
    options = json.dumps({"receive_seconds": 0.2})
    with (
        serving(tmp_path / "log", artifact, options, command=LIMITED) as server,
        server.connect() as to,
    ):
        for late in (b"", b"a"):
            to.sendall(head if late else posted("/nothing", {}))
            with HTTPResponse(to) as answer:
                answer.begin()
                assert answer.status == 404
                answer.read()
            to.sendall(late)
            time.sleep(0.5)
        to.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with HTTPResponse(to) as answer:
            answer.begin()
            assert answer.status == 200


def test_a_transfer_coding_that_is_not_read(server: Server) -> None:
    before = len(server.log())
    chunk = b"2\r\n{}\r\n0\r\n\r\n"
    for codings in (("gzip, chunked",), ("gzip", "chunked"), ("Gzip,chunked",)):
        fields = "".join([f"Transfer-Encoding: {coding}\r\n" for coding in codings])
        with server.connect() as to, HTTPResponse(to) as answer:
            to.sendall(f"POST /tokenize HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode() + chunk)
            answer.begin()
            assert (answer.status, answer.will_close) == (501, True)
            message = json.load(answer)["error"]["message"]
            told = ", ".join(codings)
            assert message == f"transfer-encoding: expected chunked, got {told!r}"
            assert to.recv(1) == b""
    lines = [json.loads(line) for line in server.log()[before:].splitlines()]
    assert [line["status"] for line in lines] == [501] * 3
    with server.connect() as to, HTTPResponse(to) as answer:
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n"
        to.sendall(head.encode() + chunk)
        answer.begin()
        assert answer.status == 400
        assert "expected one of prompt" in json.load(answer)["error"]["message"]


def test_a_ping(server: Server) -> None:
    """RFC 9110, 9.3.7: of the server, not of a path."""
    with server.connect() as to, HTTPResponse(to, method="OPTIONS") as answer:
        to.sendall(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
        answer.begin()
        assert (answer.status, answer.read()) == (204, b"")


def test_requests_that_come_before_the_answers(server: Server) -> None:
    """They wait in the network where they are many."""
    body = {"prompt": 5, "model": "a" * 300_000}
    requests = posted("/tokenize", body) * 7 + posted("/tokenize", body, "1.0")  # which closes
    with server.connect() as to, to.makefile("rb") as answers:
        sending = Thread(target=to.sendall, args=(requests,))
        sending.start()
        told = answers.read()
        sending.join()
    assert told.count(b"HTTP/1.1 400") == told.count(b"got `int`") == 8


def test_an_answer_that_nobody_takes(artifact: Path, tmp_path: Path) -> None:
    options = json.dumps({"send_seconds": 0.2})
    with serving(tmp_path / "log", artifact, options, command=LIMITED) as server:
        with server.connect(window=4096) as stalled:
            stalled.sendall(posted("/detokenize", {"tokens": [0] * 1_300_000}))
            wait_for(lambda: server.has_closed(stalled), "the connection stays")
            with HTTPResponse(stalled) as answer:
                answer.begin()
                assert answer.status == 200
                assert len(answer.read1(answer.length)) < int(answer.headers["content-length"])
        assert "ASGI" not in server.log()


def test_a_request_has_an_id(server: Server) -> None:
    """The client's own, which the answer's id ends with, or one that is made: of errors, too."""
    body = {"prompt": "a", "max_tokens": 1}
    given = server.post("/v1/completions", body, **{"X-Request-Id": "mine.1"})
    assert given.headers["x-request-id"] == "mine.1"
    assert given.json()["id"] == "cmpl-mine.1"
    assert '"request":"cmpl-mine.1"' in server.log()
    twice = [("X-Request-Id", "one"), ("X-Request-Id", "two")]
    last = server.client.post("/v1/completions", json=body, headers=twice)
    assert (last.headers["x-request-id"], last.json()["id"]) == ("two", "cmpl-two")
    server.post("/v1/completions", {"prompt": 5}, **{"X-Request-Id": "refused.1"})
    assert '"request":"refused.1","path":"/v1/completions","status":400' in server.log()
    broken = b"Transfer-Encoding: chunked\r\nX-Request-Id: mine.2\r\n\r\nno number\r\n"
    with server.connect() as to, HTTPResponse(to) as answer:
        to.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + broken)
        answer.begin()
        assert (answer.status, answer.headers["x-request-id"]) == (400, "mine.2")
    for unusable in ("", "a b", "x" * 129):
        made = server.post("/v1/completions", body, **{"X-Request-Id": unusable})
        assert len(made.headers["x-request-id"]) == 32
        assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"
    refused = [server.client.get("/nope").headers["x-request-id"] for _ in range(2)]
    assert refused[0] != refused[1]
