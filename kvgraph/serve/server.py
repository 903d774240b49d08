"""Listens, loads meanwhile, and ends as it is told: SIGTERM drains, a second one cuts.

Tiers have a few seconds for the pages that wait for them; after the second signal none.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvgraph.runtime.engine import Engine
from kvgraph.serve.app import make_app
from kvgraph.serve.latency import is_making, share_python
from kvgraph.serve.log import write_line
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.service import EngineService, Service

CLOSING_SECONDS = 5
"""For connections that are open when the last request has ended."""


def serve(
    name: str,
    make: Callable[[], Engine],
    options: ServeOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> None:
    """Serve the engine that `make` gives until SIGTERM or SIGINT; port 0 takes a free one.

    OSError for an address that cannot be had. What `make` raises ends the server, and is raised
    here. Where the signal comes before `make` is done, the process ends here, with exit code 0.
    """
    listening = listen(host, port)
    share_python()
    service = EngineService(name, make, options)
    config = uvicorn.Config(
        make_app(service),
        http=_Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=CLOSING_SECONDS,
        server_header=False,
    )
    write_line({"event": "listening", "url": url_of(*listening.getsockname()[:2])})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Server(config, service).main(listening))
    if is_making():  # it may hold locks that Python's own end would wait for
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise OSError(
            f"{host}:{port}: expected an address to listen at, got {error}; "
            "choose another with --host and --port"
        ) from error


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Protocol(HttpToolsProtocol):
    """Answers in HTTP/1.1 whatever else a client offers, as RFC 9110, 7.8 allows.

    Java's client offers `Upgrade: h2c` with every request; httptools then takes the body for
    HTTP/2, so that it is lost. The header's name is changed before httptools reads it, wherever the
    network cuts it. httptools gets heads and bodies apart, as only heads are changed.
    """

    _is_body = False
    _left = 0
    """Bytes of a body that are to come, where the head says how many there are."""
    _held = b""
    """What may be the beginning of that header, or of the end of a head or of chunks."""

    def data_received(self, data: bytes) -> None:
        data, self._held = self._held + data, b""
        at = 0
        while at < len(data) and not self.transport.is_closing():
            end = self._end_of_part(data, at)
            if end == at:
                self._held = data[at:]
                return
            part, at = data[at:end], end
            if self._is_body:
                self._left = max(0, self._left - len(part))
            else:
                part = _UPGRADE.sub(rb"\r\nx-offer", part)
            super().data_received(part)

    def _end_of_part(self, data: bytes, at: int) -> int:
        """Where a head ends that begins at `at`, or a body; `at` where that is not known yet.

        Chunks end with an empty line, as heads do: what follows one is looked at on its own.
        """
        if self._left:
            return at + min(self._left, len(data) - at)
        if (found := data.find(b"\r\n\r\n", at)) >= 0:
            return found + 4
        begun = _BEGUN.search(data, at)
        return begun.start() if begun else len(data)

    def on_headers_complete(self) -> None:
        self._is_body = True
        self._left = int(dict(self.headers).get(b"content-length", 0))
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_body, self._left = False, 0
        super().on_message_complete()


_UPGRADE = re.compile(rb"\r\nupgrade(?=:)", re.IGNORECASE)
_BEGUN = re.compile(rb"\r[\r\n]{0,3}(?:u(?:p(?:g(?:r(?:a(?:d(?:e)?)?)?)?)?)?)?$", re.IGNORECASE)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._service.after_failure = self._fail
        self._failure: BaseException | None = None

    async def main(self, listening: socket.socket) -> None:
        """Load and answer at once."""
        loading = asyncio.ensure_future(self._load())
        try:
            await self.serve([listening])
        finally:
            loading.cancel()
            await self._service.close()
        if self._failure is not None:
            raise self._failure

    async def _load(self) -> None:
        try:
            await self._service.load()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)
            return
        pages = self._service.require_loaded().facts.num_pages
        write_line({"event": "ready", "model": self._service.name, "pages": pages})

    def _fail(self, error: BaseException) -> None:
        """The server ends, and raises it."""
        self._failure = error
        self._service.is_draining = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's, called in the event loop's thread at a signal."""
        if self._service.is_draining:
            self.should_exit = True
            asyncio.get_running_loop().call_soon(self._service.hurry)
            return
        self._service.is_draining = True
        asyncio.get_running_loop().create_task(self._drain())
        write_line({"event": "draining", "signal": signal.Signals(sig).name})

    async def _drain(self) -> None:
        """Running requests go on for `drain_seconds`; then they end with an error."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._service.options.drain_seconds
        while self._service.num_open and loop.time() < end and not self.should_exit:
            await asyncio.sleep(0.01)
        await self._service.close()
        self.should_exit = True
