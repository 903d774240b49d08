"""A server whose remote tier is far away ends all the same."""

from __future__ import annotations

import asyncio
import inspect
import signal
import socketserver
import time
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn

from kvgraph import Engine, SamplingParams
from kvgraph.cli.serve import serve as command
from kvgraph.kv.tiers import workers
from kvgraph.runtime.ranks import gloo
from kvgraph.serve.app import make_app
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.server import CLOSING_SECONDS, _Server, listen
from kvgraph.serve.service import EngineService
from tests.serve.running import SECONDS, serving
from tests.support.redis_server import answering

DELAY_SECONDS = 0.1


class Far(socketserver.StreamRequestHandler):
    """A Redis server that holds nothing, and takes each page a while after it was asked to."""

    def handle(self) -> None:
        with suppress(OSError, ValueError):
            while line := self.rfile.readline():
                command, *_ = [self.text() for _ in range(int(line[1:]))]
                time.sleep(DELAY_SECONDS if command in (b"SET", b"TOUCH") else 0.0)
                self.wfile.write(ANSWERS.get(command, b":0\r\n"))

    def text(self) -> bytes:
        return self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2]


ANSWERS = {
    b"PING": b"+PONG\r\n",
    b"INFO": b"$12\r\nmaxmemory:99\r\n",
    b"SCAN": b"*2\r\n$1\r\n0\r\n*0\r\n",
    b"GET": b"$-1\r\n",
    b"SET": b"+OK\r\n",
}


def test_a_signal_ends_a_server_whose_tier_is_slow(artifact: Path, tmp_path: Path) -> None:
    """Pages wait for minutes; a few seconds are theirs."""
    with answering(Far) as url, serving(tmp_path / "log", artifact, "--remote", url) as server:
        for first in range(5, 9):
            server.complete([first + i % 900 for i in range(1600)], max_tokens=1)
        server.terminate()
        assert server.process.wait(SECONDS) == 0
        assert "copies of pages are dropped unwritten" in server.log()


def test_a_server_ends_within_the_grace_period_of_torchrun_and_kubernetes() -> None:
    longest = max(CLOSING_SECONDS, workers.CLOSE_SECONDS + gloo.CLOSING_SECONDS)
    assert ServeOptions().drain_seconds + longest < 30
    given = inspect.signature(command).parameters["drain_seconds"].default
    assert given == ServeOptions().drain_seconds


def test_a_second_signal_waits_for_no_tier(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CLOSE_SECONDS", 600.0)

    async def task(url: str) -> None:
        service = EngineService(
            "m", lambda: Engine(artifact, num_threads=1, remote=url), ServeOptions(drain_seconds=0)
        )
        await service.load()
        runner = service.require_loaded().runner
        once = SamplingParams(max_new_tokens=1)
        async for _ in await runner.submit([5 + i % 900 for i in range(1600)], once):
            pass
        server = _Server(uvicorn.Config(make_app(service), lifespan="off"), service)
        listening = listen("127.0.0.1", 0)
        address = listening.getsockname()
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(1.0)
        assert not serving.done(), "it waits for the tier"
        with pytest.raises(ConnectionRefusedError):  # clients have their 5 seconds meanwhile
            await asyncio.open_connection(*address)
        server.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(60):
            await serving

    with answering(Far) as url:
        asyncio.run(task(url))
