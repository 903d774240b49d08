"""Store of pages in a Valkey or Redis server, which several machines share.

A record is one string: the bytes of a page and their checksum (16 bytes), under
`kvgraph-1:<model>:<key>`. The server bounds its memory and evicts (`maxmemory`,
`maxmemory-policy allkeys-lru`); reads and TOUCH mark a page as used. Each failure is a miss, and
the server is then not asked for a while: `PAUSE_SECONDS`, twice as long after each further failure
until a page was read or written, at most `LONGEST_PAUSE_SECONDS`.

LMCache or Mooncake could be other implementations of `PageStore`.
"""

from __future__ import annotations

import logging
import re
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvgraph.contract.loading import importing
from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.errors import StoreError
from kvgraph.kv.tiers.address import require_address, said, server_of
from kvgraph.kv.tiers.checksum import DIGEST_BYTES, checksum
from kvgraph.kv.tiers.store import StoreStats
from kvgraph.signal_handlers import reraise_if_signalled

with importing("redis", "needed by the remote tier", "pip install 'kvgraph[tiers]'"):
    import redis

    from kvgraph.kv.tiers.wire import Wire

TIMEOUT_SECONDS = 1.0
"""Longest time of one exchange with the server, connecting included."""

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0

SCAN_COUNT, SCANS_AT_ONCE, COUNT_SECONDS = 1000, 10, 10.0
"""Keys of one SCAN, SCANs of one count of pages, and seconds between counts. Each process scans
1,000 keys a second, for any number of processes. A count of more keys goes on the next time."""

CLEAR_SECONDS = 60.0
"""Longest time of a `clear`; each of its exchanges removes about `SCAN_COUNT` keys."""

MOST_BESIDE_A_PAGE = 4 << 20
"""Most bytes that the answers of an exchange may have besides a page: keys and figures."""

log = logging.getLogger("kvgraph.tiers")


class RemoteStore(NotCopyable):
    """A `PageStore` (see there) at `url`: redis://, rediss:// (TLS) or unix://.

    An exchange with the server ends within `timeout` seconds. A call is one exchange, a write two,
    and a new connection one more. A count ends within two timeouts; `clear` makes one exchange per
    1,000 keys. Any failure ends the call. The system resolves names, without a bound on the time.

    StoreError for a malformed address, a name that does not resolve, a database that the server
    does not have, and credentials or a certificate that are refused. A server that does not answer,
    or gives invalid answers, is no error: the store starts dead, says why in `stats().problem`, and
    recovers.
    """

    name = "remote"

    def __init__(
        self, url: str, fingerprint: bytes, page_bytes: int, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self._server = server_of(url)
        self._fingerprint = fingerprint
        self._prefix = f"kvgraph-1:{fingerprint.hex()[:32]}:".encode()
        self._page_bytes = page_bytes
        self._timeout = timeout
        self._usable_at = self._writable_at = self._counted_at = 0.0
        self._pause = PAUSE_SECONDS
        self._to_clear = False
        self._cursor, self._own, self._others = b"0", 0, 0  # state of the count in progress
        self._stats = StoreStats()
        require_address(url)
        try:
            self._wire = Wire(url, timeout, page_bytes + MOST_BESIDE_A_PAGE)
        except (ValueError, TypeError, AttributeError, redis.RedisError) as error:
            raise StoreError(
                f"remote tier: expected an address such as redis://host:6379/0, got one for "
                f"{self._server} that is malformed: {said(error)}"
            ) from error
        try:
            self._connect()
            self._count()
        except (redis.RedisError, OSError) as error:
            reraise_if_signalled(error)
            reason = _reason(error)
            if reason:
                self._wire.close()
                raise StoreError(
                    f"remote tier {self._server}: expected a Valkey or Redis server that lets us "
                    f"in, got: {reason}"
                ) from error
            self._fail(error)

    # -- the protocol

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if keys and self._is_ready():
            with self._degrading():
                return [
                    found == 1
                    for found in self._wire.ask(*(("EXISTS", self._name(k)) for k in keys))
                ]
        return [False] * len(keys)

    def read(self, key: bytes, out: memoryview) -> bool:
        if self._is_ready():
            with self._degrading():
                (value,) = self._wire.ask(("GET", self._name(key)))
                if value is not None and self._is_page(key, value, out):
                    self._stats.read += 1
                    self._pause = PAUSE_SECONDS
                    return True
        self._stats.missed += 1
        return False

    def write(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        if self._is_ready() and time.monotonic() >= self._writable_at:
            with self._degrading():
                if self._wire.ask(("TOUCH", self._name(key))) == [1] or self._set(key, parts):
                    return True
        self._stats.dropped += 1
        return False

    def touch(self, keys: Sequence[bytes]) -> None:
        if keys and self._is_ready():
            with self._degrading():
                self._wire.ask(("TOUCH", *map(self._name, keys)))

    def flush(self) -> None:
        """Refresh the figures every COUNT_SECONDS; no page waits to be written."""
        if time.monotonic() > self._counted_at + COUNT_SECONDS and self._is_ready():
            with self._degrading():
                self._count()

    def clear(self) -> None:
        self._to_clear = True
        self._is_ready()

    def stats(self) -> StoreStats:
        """Figures; the server's may be older than `COUNT_SECONDS`, and are 0 if not available.

        `num_pages` is 0 for a server without `maxmemory`; `nbytes` is all memory that it uses.
        """
        return replace(self._stats)

    def close(self) -> None:
        if self._to_clear and self._usable_at < float("inf"):
            self._usable_at = 0.0  # the last try does not wait for the end of a pause
            self._is_ready()
            if self._to_clear:
                log.warning(
                    "remote tier %s: could not be emptied: its pages from before are still there, "
                    "and the next engine finds them; remove the keys %s*",
                    self._server,
                    self._prefix.decode(),
                )
        self._usable_at = float("inf")
        self._wire.close()

    # -- records

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key

    def _is_page(self, key: bytes, value: object, out: memoryview) -> bool:
        """Copy a record's bytes to `out`, then check them; remove a damaged record."""
        if isinstance(value, bytes):
            page, digest = memoryview(value)[:-DIGEST_BYTES], value[-DIGEST_BYTES:]
            has_size = len(page) == len(out)
            if has_size:
                out[:] = page
            if checksum(self._fingerprint, key, [out if has_size else page]) == digest:
                self._stats.foreign += not has_size
                return has_size
        elif isinstance(value, Exception) and not str(value).startswith("WRONGTYPE"):
            raise value
        self._stats.damaged += 1
        self._wire.ask(("UNLINK", self._name(key)))
        return False

    def _set(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        digest = checksum(self._fingerprint, key, parts)
        (answer,) = self._wire.ask(("SET", self._name(key), b"".join([*parts, digest])))
        if isinstance(answer, Exception):  # its memory is full, it is a replica, ...
            log.warning("remote tier %s: takes no pages: %s", self._server, said(answer))
            self._writable_at = time.monotonic() + LONGEST_PAUSE_SECONDS
            return False
        if answer != b"OK":
            raise _odd(answer)
        self._pause = PAUSE_SECONDS
        self._stats.written += 1
        self._stats.num_used_pages += 1
        return True

    # -- the server

    def _is_ready(self) -> bool:
        """Whether to ask the server; False during the pause after a failure."""
        if time.monotonic() < self._usable_at:
            return False
        if not self._wire.is_connected or self._to_clear:
            with self._degrading():
                if not self._wire.is_connected:
                    self._connect()
                if self._to_clear:
                    self._remove_all()
        return self._wire.is_connected

    def _remove_all(self) -> None:
        """Remove all pages of this model; raises redis.RedisError, also if it is not permitted."""
        deadline = time.monotonic() + CLEAR_SECONDS
        cursor = b""
        while cursor != b"0":
            cursor, names = self._scan(cursor or b"0", self._prefix + b"*")
            (answer,) = self._wire.ask(("UNLINK", *names)) if names else (0,)
            if isinstance(answer, Exception):
                raise answer
            if time.monotonic() > deadline:
                raise redis.TimeoutError("the keys come to no end")
        self._stats.num_used_pages = 0
        self._cursor, self._to_clear = b"0", False

    def _connect(self) -> None:
        self._wire.connect()
        self._stats.problem = ""

    def _count(self) -> None:
        """Read the server's memory and continue the count of pages, which is published when it has
        seen all keys."""
        self._counted_at = time.monotonic()
        (found,) = self._wire.ask(("INFO", "memory"))
        if isinstance(found, bytes):
            self._stats.num_pages = _figure(b"maxmemory", found) // self._page_bytes
            self._stats.nbytes = _figure(b"used_memory", found)
        if self._cursor == b"0":
            self._own = self._others = 0
        for _ in range(SCANS_AT_ONCE):
            try:
                self._cursor, names = self._scan(self._cursor, b"kvgraph-*")
            except redis.ResponseError:  # not allowed
                return
            mine = sum(name.startswith(self._prefix) for name in names)
            self._own, self._others = self._own + mine, self._others + len(names) - mine
            self._stats.foreign = max(self._stats.foreign, self._others)
            if self._cursor == b"0":
                self._stats.num_used_pages = self._own
                return
            if time.monotonic() > self._counted_at + self._timeout:
                return

    def _scan(self, cursor: bytes, pattern: bytes) -> tuple[bytes, list[bytes]]:
        """One SCAN: the next cursor, and names. redis.ResponseError if it is not permitted."""
        (found,) = self._wire.ask(("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT))
        if isinstance(found, Exception):
            raise found
        return _keys(found)

    @contextmanager
    def _degrading(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            reraise_if_signalled(error)
            pause = self._pause
            self._fail(error)
            log.warning("%s; pauses for %.0f s", self._stats.problem, pause)

    def _fail(self, error: Exception) -> None:
        self._wire.close()
        self._usable_at = time.monotonic() + self._pause
        why = said(error).rstrip(".") or type(error).__name__
        self._stats.problem = (
            f"remote tier {self._server}: expected the answers of a Valkey or Redis server, "
            f"got: {why}"
        )
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)


def _figure(name: bytes, info: bytes) -> int:
    """The number `name` in INFO's answer; 0 if the answer has no such name."""
    match = re.search(rb"^%s:(.*?)\r?$" % name, info, re.MULTILINE)
    if match is None:
        return 0
    if not re.fullmatch(rb"\d{1,20}", match[1]):
        raise _odd(match[0])
    return int(match[1])


def _keys(found: object) -> tuple[bytes, list[bytes]]:
    """Parse a SCAN's answer: the next cursor, and names."""
    match found:
        case [bytes(cursor), list(names)] if all(isinstance(name, bytes) for name in names):
            return cursor, names
    raise _odd(found)


def _odd(answer: object) -> redis.InvalidResponse:
    return redis.InvalidResponse(f"an answer that nothing was asked for: {answer!r}")


def _reason(error: Exception) -> str:
    """Reason why a retry cannot succeed; "" if it may."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return f"credentials refused ({said(error)})"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"a certificate that is not trusted ({cause.verify_message})"
    if isinstance(error, redis.ResponseError) and "db index" in str(error).lower():
        return f"a database that it does not have ({said(error)})"
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return "a name that does not resolve"
    return ""
