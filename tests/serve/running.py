"""Servers in processes of their own, as users start them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

COMMAND = (sys.executable, "-m", "kvgraph", "serve")
LIMITED = (sys.executable, "-m", "tests.serve.limited")
PACED = (sys.executable, "-m", "tests.serve.paced")
SECONDS = 180.0
"""A wait that is longer has failed."""
TEXTS = "/v1/completions"
LONG = {"prompt": "The import", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
WAITING = {**LONG, "stream": True}
ESTABLISHED = "01"  # in Linux's /proc/net/tcp


class Server:
    """A process that serves, and a client of it."""

    def __init__(self, command: list[Any], log: Path) -> None:
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.PIPE, stderr=stderr
            )
        try:
            self.url = self.event("listening")["url"]
        except BaseException:
            self._end()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=SECONDS)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The answer of /v1/completions, greedy unless told."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 8} | fields
        return answered(self.post("/v1/completions", body))

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 8} | fields
        return answered(self.post("/v1/chat/completions", body))

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """All frames of a stream, which ends as it must."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return frames(answer.iter_lines())

    def connect(self, window: int | None = None) -> socket.socket:
        """A connection of its own; `window`: bytes that the client's side takes unread."""
        url = httpx.URL(self.url)
        assert url.port is not None
        to = socket.socket()
        to.settimeout(SECONDS)
        if window is not None:
            to.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        to.connect((url.host, url.port))
        return to

    def has_closed(self, connection: socket.socket) -> bool:
        """Its end of the connection, whose rest may still be unread."""
        (_, port), (_, server) = connection.getsockname(), connection.getpeername()
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ends = [(int(one[1][-4:], 16), int(one[2][-4:], 16), one[3]) for one in lines]
        return (server, port, ESTABLISHED) not in ends

    def state(self) -> dict[str, Any]:
        return answered(self.client.get("/state"))

    def wait_until_idle(self) -> None:
        """Every request is gone, and every page is back."""
        wait_for(lambda: self._is_idle(), f"requests are left: {self.state()}")

    def _is_idle(self) -> bool:
        now = self.state()
        rows = now["num_running"] + now["num_waiting"] + now["num_queued"]
        return rows == 0 and now["num_free_pages"] == now["num_pages"]

    def log(self) -> str:
        return self._log.read_text()

    def event(self, name: str) -> dict[str, Any]:
        """The line of the log that tells of it, once it is there."""
        wait_for(lambda: self._event(name) or self.process.poll() is not None, f"no {name!r}")
        found = self._event(name)
        assert found is not None, self.log()
        return found

    def _event(self, name: str) -> dict[str, Any] | None:
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return next((line for line in lines if line.get("event") == name), None)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.event("draining")

    def close(self) -> None:
        """Ends as a server must, whatever it was asked."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(SECONDS) == 0, self.log()
            assert "Traceback" not in self.log(), self.log()
        finally:
            self._end()

    def _end(self) -> None:
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


@contextmanager
def serving(log: Path, *arguments: Any, command: tuple[str, ...] = COMMAND) -> Iterator[Server]:
    """A server that is ready: `kvgraph serve ARGUMENTS` at a free port."""
    server = Server([*command, *arguments, *(("--port", 0) if command is COMMAND else ())], log)
    try:
        server.event("ready")
        yield server
    finally:
        server.close()


class Pace:
    """Of a server that generates no more tokens than it may; its steps do nothing then."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def allow(self, tokens: int) -> None:
        """So many since the server began, requests of all clients together."""
        self._file.write_text(str(tokens))

    def end(self) -> None:
        """No limit from here on."""
        self._file.unlink(missing_ok=True)


@contextmanager
def paced(folder: Path, *arguments: Any) -> Iterator[tuple[Server, Pace]]:
    """As `serving`, with a log in `folder`; there is no limit to begin with."""
    pace = Pace(folder / "tokens")
    command = (*PACED, str(folder / "tokens"), "serve")
    with serving(folder / "log", *arguments, "--port", 0, command=command) as server:
        try:
            yield server, pace
        finally:
            pace.end()


@contextmanager
def stream_of(server: Server, body: dict[str, Any] = WAITING) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun; leaving it closes the connection."""
    with (
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
        client.stream("POST", TEXTS, json=body) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def posted(path: str, body: Any, version: str = "1.1") -> bytes:
    """A request as a connection carries it."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


def answered(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def refusal(answer: httpx.Response, status: int) -> str:
    """The sentence of an error in OpenAI's form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    message: str = error["message"]
    assert message
    assert "\n" not in message
    return message


def frames(lines: Iterator[str]) -> list[dict[str, Any]]:
    """The events of a stream up to its [DONE], which is there."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def wait_for(condition: Any, otherwise: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=SECONDS).status_code == 200
    except httpx.TransportError:
        return False
