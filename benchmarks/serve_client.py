"""A server in a process of its own, and a client of it that costs little: a protocol of uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.request import urlopen

import uvloop

T = TypeVar("T")

NEW = 128
"""Tokens that a request generates."""


@dataclass(slots=True)
class Answer:
    """One request, as its client saw it: seconds of `time.perf_counter`."""

    sent: float
    status: int = 0
    head: float = 0.0
    """When the answer's status came."""
    news: list[float] = field(default_factory=list)
    """When frames with text came."""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.news, self.news[1:], strict=False)]


async def together(port: int, prompts: list[list[int]], new: int) -> list[Answer]:
    return list(await asyncio.gather(*(ask(port, prompt, new) for prompt in prompts)))


async def arriving(
    port: int,
    rng: random.Random,
    rate: float,
    seconds: float,
    prompt: Callable[[random.Random], list[int]],
    wait: bool = True,
) -> list[Answer]:
    """Requests at random moments, `rate` a second on the average; afterwards those that run are
    waited for, or left."""
    asked = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        asked.append(asyncio.ensure_future(ask(port, prompt(rng), NEW)))
        await asyncio.sleep(rng.expovariate(rate))
    if not wait:
        for each in asked:
            each.cancel()
    return list(await asyncio.gather(*asked))


async def ask(port: int, prompt: list[int], new: int) -> Answer:
    """One stream; what came of it, where it is cancelled."""
    body = {
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    asked = time.perf_counter()
    connection: Connection | None = None
    with contextlib.suppress(asyncio.CancelledError):
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        connection.send(head.encode() + text)
        await connection.ended
    if connection is None:
        return Answer(asked)
    connection.transport.close()
    return connection.answer()


class Connection(asyncio.Protocol):
    """Keeps what came, and when: it is read after the end, so that the client stays cheap."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._sent = 0.0
        self._came: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> None:
        self._sent = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._came.append((time.perf_counter(), data))
        is_first = len(self._came) == 1
        if (is_first and not data.startswith(b"HTTP/1.1 200")) or b"data: [DONE]" in data:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def answer(self) -> Answer:
        answer = Answer(self._sent)
        if not self._came:
            return answer
        answer.head, first = self._came[0]
        answer.status = int(first.split(maxsplit=2)[1])
        rest = b""
        for at, data in self._came:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    read(answer, at, json.loads(line[6:]))
        return answer


def read(answer: Answer, at: float, frame: dict[str, Any]) -> None:
    if frame["choices"]:
        answer.news.append(at)
        answer.text += frame["choices"][0]["text"]
    if frame.get("usage"):
        answer.usage = frame["usage"]


def run(task: Coroutine[Any, Any, T]) -> T:
    """In the event loop that costs least."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(task)


def serving(artifact: Path, port: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvgraph", "serve", str(artifact), "--port", str(port)]
    command += ["--drain-seconds", "0", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def server(artifact: Path, *options: str) -> Iterator[tuple[int, int]]:
    """Its port, and its process."""
    process = serving(artifact, 0, *options)
    assert process.stderr is not None
    port = 0
    for line in process.stderr:
        said = json.loads(line)
        port = int(said["url"].rpartition(":")[2]) if said.get("url") else port
        if said.get("event") == "ready":
            break
    drained = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
    try:
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        drained.wait(30)


def seconds_to_ready(artifact: Path, port: int, prompts: list[list[int]]) -> float:
    """Start a server that answers `prompts` once it is ready; kill it in the middle of that.
    Seconds from its start until /ready answers 200."""
    start = time.perf_counter()
    with serving(artifact, port) as process, ThreadPoolExecutor() as threads:
        while not _is_ready(port):
            time.sleep(0.001)
        seconds = time.perf_counter() - start
        asked = threads.submit(run, together(port, prompts, NEW))
        time.sleep(0.5)
        process.kill()
        assert not any(answer.usage for answer in asked.result())
    return seconds


def _is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:  # nothing listens yet, or 503
        return False


def resident(process: int) -> float:
    """MiB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
