"""Runs the server: listens, loads meanwhile, and ends on signals.

SIGTERM, SIGINT, or SIGHUP of a closed terminal drains the server; a second signal cuts requests.
Pages that are queued for tiers get a few seconds to be written; after a second signal none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
import uvloop

from kvgraph.runtime.engine import Engine
from kvgraph.serve.app import make_app
from kvgraph.serve.connection import Connection, connection_type
from kvgraph.serve.latency import free_heap, is_making, share_python
from kvgraph.serve.log import LinesOfOthers, write_line
from kvgraph.serve.open_files import raise_limit
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.service import EngineService, Service
from kvgraph.serve.stderr import written_behind
from kvgraph.serve.unix_socket import listen_at, place_of
from kvgraph.signal_handlers import is_heard

CLOSING_SECONDS = 5
"""Time for connections that are open after the last request has ended."""

BACKLOG = 2048


def serve(
    name: str,
    make: Callable[[], Engine],
    options: ServeOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: Path | None = None,
) -> None:
    """Serve the engine that `make` creates until SIGTERM, SIGINT or SIGHUP; port 0 takes a free
    one.

    `uds`: a Unix socket to listen at instead. OSError if the address is not available. An error of
    `make` ends the server, and is raised here. If the signal comes before `make` is done, the
    process exits here, with code 0.
    """
    listening = listen(host, port) if uds is None else listen_at(uds, BACKLOG)
    raise_limit()
    share_python()
    service = EngineService(name, make, options)
    config = uvicorn.Config(
        make_app(service),
        http=connection_type(options),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="error",  # invalid requests have their own line in the log
        timeout_keep_alive=options.keep_alive_seconds,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        server_header=False,
    )
    url = url_of(*listening.getsockname()[:2]) if uds is None else f"unix:{uds}"
    with written_behind(), _others_in_lines():
        write_line({"event": "listening", "url": url})
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_Server(config, service, uds).main(listening))
    free_heap()
    if is_making():  # its thread may hold locks that interpreter exit would wait for
        with suppress(OSError):
            sys.stdout.flush()  # not stderr, which may have no reader
        os._exit(0)


def _new_loop() -> asyncio.AbstractEventLoop:
    """The event loop. OSError if there are too few open files: a loop that lacks them when it
    starts to run cannot be closed, and its error hides the first one."""
    loop = uvloop.new_event_loop()
    try:
        ends = socket.socketpair()  # as the loop needs them for signals
    except OSError:
        loop.close()
        raise
    for end in ends:
        end.close()
    return loop


@contextmanager
def _others_in_lines() -> Iterator[None]:
    lines = LinesOfOthers()
    logging.getLogger().addHandler(lines)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(lines)


def listen(host: str, port: int) -> socket.socket:
    """An address of IPv6 may have brackets; `::` is every address, of IPv4 too."""
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        family = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(
            (name, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except (OSError, OverflowError) as error:
        hint = "give a path to --uds" if "/" in host else "choose another with --host and --port"
        raise OSError(
            f"{host}:{port}: expected an address to listen at, got {error}; {hint}"
        ) from error


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, uds: Path | None = None) -> None:
        super().__init__(config)
        self._uds = uds
        self._place = None if uds is None else place_of(uds)
        self._service = service
        self._service.after_failure = self._fail
        self._failure: BaseException | None = None

    async def main(self, listening: socket.socket) -> None:
        """Serve at once, and load meanwhile."""
        loading = asyncio.ensure_future(self._load())
        if is_heard(signal.SIGHUP):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self.handle_exit, signal.SIGHUP, None)
        try:
            await self.serve([listening])
        finally:
            loading.cancel()
            await self._service.close()
        if self._failure is not None:
            raise self._failure

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which closes what listens: from then on the path may be another process's.

        Meanwhile requests end with an error, which clients can take while tiers and ranks end."""
        if self._uds is not None and place_of(self._uds) == self._place:
            with suppress(OSError):
                self._uds.unlink()
        await asyncio.gather(super().shutdown(sockets), self._service.close())

    async def _load(self) -> None:
        try:
            await self._service.load()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not self._service.is_draining:  # a signal ends other ranks too, maybe first
                self._fail(error)
            return
        if self._service.is_draining:
            return
        served = self._service.require_loaded()
        line = {"event": "ready", "model": self._service.name, "pages": served.facts.num_pages}
        write_line(line | ({"sampling": served.sampling} if served.sampling else {}))

    def _fail(self, error: BaseException) -> None:
        """End the server, and make `main` raise `error`."""
        self._failure = error
        self._service.is_draining = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; uvicorn calls this in the event loop's thread."""
        if self._service.is_draining:
            if sig == signal.SIGHUP:  # shell and kernel may each send a SIGHUP
                return
            self.should_exit = True
            asyncio.get_running_loop().call_soon(self._service.hurry)
            return
        self._service.is_draining = True
        asyncio.get_running_loop().create_task(self._drain())
        write_line({"event": "draining", "signal": signal.Signals(sig).name})

    async def _drain(self) -> None:
        """Let running requests and undelivered answers continue for `drain_seconds`; then end them
        with an error."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._service.options.drain_seconds
        while self._is_busy() and loop.time() < end and not self.should_exit:
            await asyncio.sleep(0.01)
        self.should_exit = True

    def _is_busy(self) -> bool:
        """Whether the engine has requests, or a client has not got all of its answer."""
        connections = cast("set[Connection]", self.server_state.connections)
        return bool(self._service.num_open) or any(one.is_answering for one in connections)
