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

from kvgraph.contract.threads import EndingError, threads_needed
from kvgraph.signal_handlers import ignoring, reraise_if_signalled


class Bounded:
    """A socket that receives at most `left` more bytes; it passes on all other calls."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.left = 0

    def recv(self, count: int) -> bytes:
        data: bytes = self._sock.recv(count)
        self._spend(len(data))
        return data

    def recv_into(self, buffer: memoryview) -> int:
        count: int = self._sock.recv_into(buffer)
        self._spend(count)
        return count

    def _spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise redis.InvalidResponse("more bytes than any answer has")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Wire:
    """A connection to the server at `url`.

    Calls raise redis.RedisError or OSError; the constructor raises ValueError or TypeError for a
    malformed `url`. More than `limit` bytes of answers in an exchange are an error.
    """

    def __init__(self, url: str, timeout: float, limit: int) -> None:
        self._timeout, self._limit = timeout, limit
        pool = redis.ConnectionPool.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
        )
        pool.connection_class = _bounded(pool.connection_class, limit)
        self._connection: Any = pool.make_connection()
        self._require_tls()
        self.is_connected = False

    def _require_tls(self) -> None:
        """Raise ValueError for invalid TLS options, which are tried on a socket that is not
        connected and so makes no handshake."""
        wrap = getattr(self._connection, "_wrap_socket_with_ssl", None)
        if wrap is None:
            return
        with socket.socket() as unconnected:
            try:
                wrap(unconnected).close()
            except (OSError, TypeError, ValueError) as error:
                reraise_if_signalled(error)
                raise ValueError(f"its ssl_ options: {error}") from error

    def connect(self) -> None:
        """Connect and send PING, which a server refuses without valid credentials."""
        with self._exchange():
            self._connection.connect()
            self._connection.send_command("PING")
            self._connection.read_response()
        self.is_connected = True

    def ask(self, *commands: tuple[object, ...]) -> list[object]:
        """Send commands in one exchange and return their answers.

        The answer to a command that the server refuses is a redis.ResponseError. Errors about the
        connection are raised, except NoPermissionError.
        """
        with self._exchange():
            if self._connection._sock is not None:
                self._connection._sock.left = self._limit
            self._connection.send_packed_command(self._connection.pack_commands(commands))
            return [self._answer() for _ in commands]

    def _answer(self) -> object:
        try:
            return self._connection.read_response()
        except redis.ResponseError as error:
            return error

    def close(self) -> None:
        self.is_connected = False
        with ignoring(redis.RedisError, OSError):
            self._connection.disconnect()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Run an exchange within the deadline; a parser's failure becomes an InvalidResponse. An
        error closes the connection, on which answers may still come."""
        try:
            with self._deadline():
                yield
        except BaseException as error:
            self.close()
            reraise_if_signalled(error)
            if isinstance(error, redis.RedisError | OSError) or not isinstance(error, Exception):
                raise
            raise redis.InvalidResponse(f"an answer that cannot be read: {error!r}") from error

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        """Cut the connection after `timeout` seconds in all; a socket's own time-out restarts with
        every byte. Once Python ends and starts no thread, only that time-out is left."""
        timer = threading.Timer(self._timeout, self._cut)
        timer.daemon = True
        with suppress(EndingError), threads_needed():
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        sock = self._connection._sock  # there is no public name for it
        if sock is not None:
            with ignoring(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _bounded(kind: Any, limit: int) -> Any:
    """The connection class `kind` over a bounded socket."""

    def connect(self: Any) -> Bounded:
        sock = Bounded(kind._connect(self))
        sock.left = limit
        return sock

    return type(kind.__name__, (kind,), {"_connect": connect})
