"""A client's HTTP/1.1 connection, with limits that uvicorn lacks."""

from __future__ import annotations

import re
import uuid
from asyncio import BaseTransport, Transport
from asyncio.events import TimerHandle
from typing import TYPE_CHECKING, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvgraph.contract.values import brief
from kvgraph.serve.errors import error_body
from kvgraph.serve.log import REQUEST_ID, is_request_id, log_answer
from kvgraph.serve.open_files import LimitOfClients
from kvgraph.serve.options import ServeOptions

if TYPE_CHECKING:
    from uvicorn._types import (
        ASGIReceiveCallable,
        ASGISendCallable,
        ASGISendEvent,
        Scope,
    )

MOST_BYTES = 64 << 10
"""Most bytes of a request's head. If more bytes than that wait after a request, reading pauses."""


def connection_type(options: ServeOptions) -> type[Connection]:
    """A Connection class with `options`; uvicorn makes an instance for each client."""

    class Limited(Connection):
        _options = options
        _clients = LimitOfClients()

    return Limited


class Connection(HttpToolsProtocol):
    """Answers in HTTP/1.1 whatever protocol a client offers, as RFC 9110, 7.8 allows.

    Java's client sends `Upgrade: h2c` with every request; httptools then takes the body for HTTP/2,
    and it is lost. So this header is renamed before httptools reads it, even if it is split between
    packets. Heads and bodies are passed to httptools separately, as only heads are changed.

    A request is passed on after the previous one is answered: uvicorn reports a disconnect only to
    the newest request.
    """

    _options: ServeOptions
    _clients: LimitOfClients
    _is_body = False
    _named: tuple[tuple[bytes, bytes], ...] = ()
    """Header with the id of the request whose head came last."""
    _left = 0
    """Remaining bytes of a body, if its head gives the length."""
    _held = b""
    """Bytes that wait for an answer, or may be a part of that header or of a head's end."""
    _kept = 0
    """Bytes that httptools may buffer: of a head, or after the last piece of a chunked body."""
    _unread_coding = ""
    """The Transfer-Encoding for which a body is refused."""
    _receiving: TimerHandle | None = None
    """Timer until a head is complete."""
    _sending: TimerHandle | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(cast(Transport, transport))
        self._limit_head()
        self._clients.note(transport.get_extra_info("socket").fileno())

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receiving, self._sending):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # -- receiving

    def data_received(self, data: bytes) -> None:
        data, self._held = self._held + data, b""
        at = 0
        while at < len(data) and not self.transport.is_closing():
            end = at if self._has_request else self._end_of_part(data, at)
            if end == at:
                self._held = data[at:]
                break
            part, at = data[at:end], end
            self._read(part)
        if len(self._held) > MOST_BYTES:
            self.flow.pause_reading()

    @property
    def _has_request(self) -> bool:
        """Whether a request is complete, and its answer is not."""
        return not self._is_body and self.cycle is not None and not self.cycle.response_complete

    @property
    def is_answering(self) -> bool:
        """Whether a request that has come is not answered, or some of an answer is not sent."""
        return self._has_request or self.transport.get_write_buffer_size() > 0

    def _end_of_part(self, data: bytes, at: int) -> int:
        """End of the head or body that begins at `at`; `at` if it is not known yet.

        Chunks end with an empty line, as heads do, so bytes after one form another part.
        """
        if self._left:
            return at + min(self._left, len(data) - at)
        if (found := data.find(b"\r\n\r\n", at)) >= 0:
            return found + 4
        begun = _BEGUN.search(data, at)
        return begun.start() if begun else len(data)

    def _read(self, part: bytes) -> None:
        self._kept += len(part)
        if self._is_body:
            self._left = max(0, self._left - len(part))
            super().data_received(part)
            if self._kept > MOST_BYTES:  # trailer fields, or a chunk's size line
                self.transport.close()
        elif self._kept > MOST_BYTES:
            self._refuse(431, f"head: expected at most {MOST_BYTES} bytes, got more")
        else:
            self._limit_head()
            super().data_received(_UPGRADE.sub(rb"\r\nx-offer", part))
        if self._is_body and self.cycle is not None and self.cycle.response_complete:
            self._limit_head()  # the data that came has cancelled uvicorn's own timer

    def on_headers_complete(self) -> None:
        self._is_body, self._kept = True, 0
        given = dict(self.headers)
        self._left = int(given.get(b"content-length", 0))
        name = given.get(_REQUEST_ID, b"").strip()
        if not is_request_id(name.decode("latin-1")):
            name = uuid.uuid4().hex.encode()
        self._named = ((_REQUEST_ID, name),)
        others = [field for field in self.headers if field[0] != _REQUEST_ID]
        self.headers[:] = [*others, *self._named]
        self._stop_receiving()
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        coding = b", ".join(codings).decode("latin-1")
        if coding.lower() not in ("", "chunked"):
            self._unread_coding = coding
            raise ValueError  # httptools ends with it, and uvicorn sends the answer
        if self.parser.get_http_version() < "1.1":
            self.app = self._answer_without_chunks
        super().on_headers_complete()
        self.cycle.default_headers = [*self.server_state.default_headers, *self._named]
        self._limit_sending()

    def on_body(self, body: bytes) -> None:
        self._kept = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_body, self._left, self._kept = False, 0, 0
        super().on_message_complete()
        if self.cycle.response_complete:  # the connection is idle, as behind other answers
            self._stop_receiving()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _limit_head(self) -> None:
        if self._receiving is None:
            seconds = self._options.receive_seconds
            self._receiving = self.loop.call_later(seconds, self._refuse_late_head)

    def _refuse_late_head(self) -> None:
        if self._is_body or not self._kept:  # a client that asked for nothing expects no answer
            self.transport.close()
        elif not self.transport.is_closing():
            seconds = self._options.receive_seconds
            self._refuse(408, f"head: expected all of it in {seconds:g} seconds, got a part")

    def send_400_response(self, msg: str) -> None:
        if self._unread_coding:
            got = brief(self._unread_coding)
            self._refuse(501, f"transfer-encoding: expected chunked, got {got}")
        else:
            self._refuse(400, "request: expected one in HTTP/1.1, got what is none")

    def _refuse(self, status: int, sentence: str) -> None:
        """Answer a request with an invalid head or rest, log it, and close the connection."""
        if self.cycle is not None:
            self.cycle.scope["state"]["is_refused"] = True
        body = error_body(status, sentence)
        named = self._named if self._is_body else ()
        fields = [
            *self.server_state.default_headers,
            *named,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        head = b"".join([name + b": " + value + b"\r\n" for name, value in fields])
        self.transport.write(STATUS_LINE[status] + head + b"\r\n" + body)
        self.transport.close()
        log_answer(None, status, named[0][1].decode() if named else "")

    # -- sending

    async def _answer_without_chunks(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Answer without chunks, which HTTP/1.0 lacks: closing the connection ends the body."""
        cycle = self.cycle
        cycle.keep_alive = False

        async def send_plain(message: ASGISendEvent) -> None:
            cycle.chunked_encoding = False
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await self.config.loaded_app(scope, receive, send_plain)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_sending()
        if self._held:
            self.data_received(b"")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit_sending()

    def _limit_sending(self) -> None:
        """Abort if the client takes none of the waiting bytes in `send_seconds`."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.flow.write_paused or self.cycle.response_complete):
            seconds = self._options.send_seconds
            self._sending = self.loop.call_later(seconds, self._require_taken, unsent)

    def _require_taken(self, unsent: int) -> None:
        if self.transport.get_write_buffer_size() < unsent:
            self._limit_sending()
        else:
            self.transport.abort()


_REQUEST_ID = REQUEST_ID.encode()
_UPGRADE = re.compile(rb"\r\nupgrade(?=:)", re.IGNORECASE)
_BEGUN = re.compile(rb"\r[\r\n]{0,3}(?:u(?:p(?:g(?:r(?:a(?:d(?:e)?)?)?)?)?)?)?$", re.IGNORECASE)
