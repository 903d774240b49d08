"""One connection to a server of the Redis protocol, on which every exchange has a deadline."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


class Wire:
    """Calls raise redis.RedisError or OSError; ValueError or TypeError for a malformed `url`."""

    def __init__(self, url: str, timeout: float) -> None:
        self._timeout = timeout
        pool = redis.ConnectionPool.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
        )
        self._connection: Any = pool.make_connection()
        self.is_connected = False

    def connect(self) -> None:
        """Also asks for a sign of life, which a server refuses to those whom it does not know."""
        with self._deadline():
            self._connection.connect()
            self._connection.send_command("PING")
            self._connection.read_response()
        self.is_connected = True

    def ask(self, *commands: tuple[object, ...]) -> list[object]:
        """Their answers, in one exchange; what the server refuses is a redis.ResponseError there.

        NoPermissionError aside, errors about the connection's standing are raised.
        """
        with self._deadline():
            self._connection.send_packed_command(self._connection.pack_commands(commands))
            return [self._answer() for _ in commands]

    def _answer(self) -> object:
        try:
            return self._connection.read_response()
        except redis.ResponseError as error:
            return error

    def close(self) -> None:
        self.is_connected = False
        with suppress(redis.RedisError, OSError):
            self._connection.disconnect()

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        """A socket's time-out starts again with every byte; this one does not."""
        timer = threading.Timer(self._timeout, self._cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        sock = self._connection._sock  # no public name reaches it
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
