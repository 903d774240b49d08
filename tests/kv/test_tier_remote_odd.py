"""The remote tier: servers that answer what no server answers."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvgraph.errors import StoreError
from kvgraph.kv.tiers import remote
from kvgraph.kv.tiers.remote import RemoteStore
from tests.kv.remote_pages import KEYS, MODEL, SIZE, got, page, put, recover
from tests.support.redis_server import RedisServer, answering


@contextmanager
def listening(answer: bytes, pace: float = 0.0) -> Iterator[tuple[str, list[int]]]:
    """A server that answers whatever it is sent, a byte each `pace` seconds; counts bytes sent."""
    sent = [0]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        for i in range(len(answer)):
                            connection.sendall(answer[i : i + 1])
                            sent[0] += 1
                            time.sleep(pace)
                except OSError:
                    if listener.fileno() < 0:
                        return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}", sent
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_server_that_trickles_is_given_up() -> None:
    with listening(b"$1000000\r\n" + bytes(3000), pace=0.02) as (url, sent):
        store = RemoteStore(url, MODEL, SIZE, timeout=1.0)
        assert got(store, 0) is None
        assert 0 < sent[0] < 1000, "every byte came in time, all of them would not have"
        store.close()


ODD_ANSWERS = {
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "nothing": b"",
    "half an answer": b"+PO",
    "noise": bytes(range(256)) * 16,
    "a number that is none": b":one\r\n",
    "a text of no length": b"$x\r\n",
    "a text of negative length": b"$-7\r\nabc\r\n" * 9,
    "a huge text": b"$99999999999999999999\r\n" + bytes(9_000_000),
    "a line without end": b"+" + bytes(9_000_000),
    "a list without end": b"*99999999\r\n" + b":1\r\n" * 2_000_000,
    "lists in lists": b"*1\r\n" * 100_000,
    "numbers": b":7\r\n" * 99,
    "no text": b"+\xff\xfe\r\n" * 99,
    "errors": b"-ERR \xff no\r\n" * 99,
    "empty lists": b"*0\r\n" * 99,
    "names that are numbers": b"+OK\r\n" * 9 + b"*2\r\n+0\r\n*1\r\n:1\r\n" * 9,
    "figures that are none": b"+PONG\r\n" * 9 + b"$16\r\nmaxmemory:lots\r\n\r\n",
}


UNDERSTOOD = {
    b"PING": b"+PONG\r\n",
    b"INFO": b"$12\r\nmaxmemory:99\r\n",
    b"SCAN": b"*2\r\n$1\r\n0\r\n*0\r\n",
    b"EXISTS": b":1\r\n",
    b"TOUCH": b":0\r\n",
    b"GET": b"$-1\r\n",
}


@contextmanager
def understanding(count: int, answer: bytes, **others: bytes) -> Iterator[str]:
    """A server that answers `count` commands as one does, and `answer` to all after them."""
    known = UNDERSTOOD | {name.encode(): other for name, other in others.items()}

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            left = count
            with suppress(OSError, ValueError):
                while line := self.rfile.readline():
                    given = [self.text() for _ in range(int(line[1:]))]
                    left -= 1
                    self.wfile.write(known.get(given[0], b"+OK\r\n") if left >= 0 else answer)

        def text(self) -> bytes:
            return self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2]

    with answering(Handler) as url:
        yield url


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
def test_a_server_that_answers_oddly_is_no_tier(answer: bytes) -> None:
    """Whatever is asked first, and after that."""
    for count in range(9):
        with understanding(count, answer) as url:
            store = RemoteStore(url, MODEL, SIZE, timeout=0.1)
            assert bool(store.stats().problem) or count > 2, "told of at the start"
            assert got(store, 0) is None
            recover(store)
            assert put(store, 0) in ([True], [False])
            recover(store)
            assert len(store.contains(KEYS[:2])) == 2
            recover(store)
            store.touch(KEYS[:2])
            store.close()


def test_memory_for_a_huge_answer_is_bounded() -> None:
    answer = b"$999999999\r\n" + bytes(80_000_000)
    with understanding(1 << 30, b"", GET=answer) as url:
        store = RemoteStore(url, MODEL, SIZE, timeout=30)
        tracemalloc.start()
        try:
            assert got(store, 0) is None
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert "more bytes than any answer has" in store.stats().problem
        assert peak < 32 << 20
        store.close()


def test_what_an_odd_server_said_is_passed_on() -> None:
    with understanding(0, ODD_ANSWERS["another protocol"]) as url:
        store = RemoteStore(url, MODEL, SIZE)
        expected = (
            "remote tier 127.0.0.1:{}: expected the answers of a Valkey or Redis server, got: "
        )
        problem = store.stats().problem
        assert problem.startswith(expected.format(url.rpartition(":")[2]))
        assert "HTTP/1.1 400 Bad Request" in problem
        store.close()


def test_a_refusal_is_logged_in_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    refusal = b"-OOM \x1b[31mred\x07" + b"x" * 5000 + b"\r\n"
    with understanding(1 << 30, b"", SET=refusal) as url:
        store = RemoteStore(url, MODEL, SIZE)
        assert put(store, 0) == [False]
        (line,) = caplog.messages
        assert "takes no pages: \\x1b[31mred\\x07xxx" in line
        assert len(line) < 300
        store.close()


def test_a_server_whose_keys_come_to_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CLEAR_SECONDS", 0.2)
    with understanding(1 << 30, b"", SCAN=b"*2\r\n$1\r\n7\r\n*0\r\n") as url:
        store = RemoteStore(url, MODEL, SIZE, timeout=30)
        store.clear()
        assert "the keys come to no end" in store.stats().problem
        recover(store)
        assert store.contains(KEYS[:1]) == [False], "it is not used before it is empty"
        store.close()


def test_a_server_that_answers_everything_but_pages_is_asked_ever_less() -> None:
    with understanding(1 << 30, b"", GET=b"$9\r\nabc") as url:
        store = RemoteStore(url, MODEL, SIZE, timeout=0.2)
        pauses = []
        for _ in range(8):
            assert got(store, 0) is None
            assert store.stats().problem
            pauses.append(store._pause)
            recover(store)
        assert pauses == sorted(pauses)
        assert pauses[-1] == remote.LONGEST_PAUSE_SECONDS
        store.close()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("ssl_ca_certs=/no/such.pem", "No such file or directory"),
        ("ssl_ca_certs=/etc/passwd", "ssl_ options"),
        ("ssl_certfile=/etc/passwd", "ssl_ options"),
        ("ssl_min_version=7", "version"),
        ("ssl_ciphers=none", "cipher"),
    ],
)
def test_options_of_tls_that_reach_no_server(option: str, said: str) -> None:
    """At start, whether a server is there or not."""
    with pytest.raises(StoreError, match=rf"127.0.0.1:1 that is malformed: .*{said}"):
        RemoteStore(f"rediss://127.0.0.1:1/0?{option}", MODEL, SIZE)
    RemoteStore("rediss://127.0.0.1:1/0", MODEL, SIZE).close()


def test_a_database_that_the_server_does_not_have(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        with pytest.raises(StoreError, match="a database that it does not have"):
            RemoteStore(f"{server.url()}?db=99", MODEL, SIZE)
    finally:
        server.kill()


def test_pages_are_written_while_python_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on, the thread of a deadline cannot start then."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    server = RedisServer(tmp_path)
    server.start()
    try:
        store = RemoteStore(server.url(), MODEL, SIZE)
        monkeypatch.setattr(threading.Thread, "start", start)
        assert put(store, 0) == [True]
        assert got(store, 0) == page(0)
        store.close()
    finally:
        server.kill()
