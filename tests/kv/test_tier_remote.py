"""The remote tier: a server that machines share, and that is full, dead or slow."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvgraph.errors import StoreError
from kvgraph.kv.tiers import remote
from kvgraph.kv.tiers.remote import RemoteStore
from tests.kv.remote_pages import KEYS, MODEL, OTHER, SIZE, got, name, page, put, recover
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """An empty one."""
    redis.Redis.from_url(shared.url()).flushall()
    return shared


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers late is not taken for one that hangs."""
    monkeypatch.setitem(RemoteStore.__init__.__kwdefaults__, "timeout", 30.0)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """One to freeze and to kill, not started yet."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url()) as client:
        yield client


def test_machines_share_pages(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (RemoteStore(server.url(), MODEL, SIZE) for _ in range(2))
    content = memoryview(page(0))
    assert one.write(KEYS[0], [content[:100], content[100:]])
    assert two.contains(KEYS[:2]) == [True, False]
    assert (got(two, 0), got(two, 1)) == (page(0), None)
    two.touch(KEYS[:2])
    assert put(two, 0, 1) == [True, True]
    assert two.stats().written == 1, "what another machine wrote is not written again"
    stats = two.stats()
    assert (stats.read, stats.missed, stats.dropped) == (1, 1, 0)
    monkeypatch.setattr(two, "_counted_at", 0.0)
    two.flush()
    assert two.stats().num_used_pages == 2
    one.clear()
    assert two.contains(KEYS[:2]) == [False, False]
    for store in (one, two):
        store.close()
        store.close()
        assert got(store, 0) is None


def test_another_model_is_ignored_counted_and_never_mixed(
    server: RedisServer, client: redis.Redis
) -> None:
    other = RemoteStore(server.url(), OTHER, SIZE)
    put(other, 0, 1)
    client.set("somebody's", "else")
    store = RemoteStore(server.url(), MODEL, SIZE)
    assert (store.stats().foreign, store.stats().num_used_pages) == (2, 0)
    assert got(store, 0) is None
    put(store, 5)
    stolen = client.get(f"kvgraph-1:{OTHER.hex()[:32]}:".encode() + KEYS[0])
    client.set(name(0), stolen)
    assert got(store, 0) is None
    assert store.stats().damaged == 1
    store.clear()
    assert other.contains(KEYS[:2]) == [True, True]
    assert client.get("somebody's") == b"else"
    store.close()
    other.close()


def test_keys_of_others_are_counted_a_few_at_a_time(
    server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are; what a count found is told once it has come to its end."""
    monkeypatch.setattr(remote, "SCAN_COUNT", 10)
    client.mset({f"somebody's {i}": b"x" for i in range(500)})
    one = RemoteStore(server.url(), MODEL, SIZE)
    put(one, 0, 1, 2)
    client.config_resetstat()
    two = RemoteStore(server.url(), MODEL, SIZE)
    flushes = 1
    while two.stats().num_used_pages != 3:
        scans = client.info("commandstats")["cmdstat_scan"]["calls"]
        assert scans <= remote.SCANS_AT_ONCE * flushes
        assert two.stats().num_used_pages == 0
        monkeypatch.setattr(two, "_counted_at", 0.0)
        two.flush()
        flushes += 1
    assert flushes > 3
    client.config_resetstat()
    client.client_kill_filter(skipme=True)
    assert got(two, 0) is None
    recover(two)
    assert got(two, 0) == page(0)
    assert "cmdstat_scan" not in client.info("commandstats"), "none as it connects again"
    one.close()
    two.close()


@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "longer", "key", "type"])
def test_a_damaged_record_is_a_miss_and_is_removed(
    kind: str, server: RedisServer, client: redis.Redis
) -> None:
    store = RemoteStore(server.url(), MODEL, SIZE)
    put(store, 0, 1)
    value = client.get(name(0))
    flipped = bytearray(value)
    flipped[777] ^= 1
    if kind == "type":
        client.delete(name(0))
        client.lpush(name(0), value)
    else:
        kinds = {
            "flip": bytes(flipped),
            "cut": value[:-1],
            "empty": b"",
            "longer": value + b"\0",
            "key": client.get(name(1)),
        }
        client.set(name(0), kinds[kind])
    assert got(store, 0) is None
    assert store.stats().damaged == 1
    assert not client.exists(name(0))
    assert put(store, 0) == [True]
    assert (got(store, 0), got(store, 1)) == (page(0), page(1))
    store.close()


def test_a_record_of_another_size_is_left(server: RedisServer) -> None:
    store = RemoteStore(server.url(), MODEL, SIZE)
    put(store, 0)
    assert got(store, 0, SIZE + 16) is None
    assert store.stats().foreign == 1
    assert got(store, 0) == page(0)
    store.close()


def test_a_server_that_is_full_drops(own: RedisServer) -> None:
    own.start()
    with redis.Redis.from_url(own.url()) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 30 * SIZE)
        store = RemoteStore(own.url(), MODEL, SIZE)
        assert store.stats().num_pages > 0
        wrote = put(store, *range(60))
        assert 0 < wrote.count(True) < 60
        assert wrote == sorted(wrote, reverse=True)
        assert store.stats().dropped == wrote.count(False)
        assert got(store, 0) == page(0), "what it holds is still served"
        client.config_set("maxmemory-policy", "allkeys-lru")
        recover(store)
        assert all(put(store, *range(60)))
        assert got(store, 59) == page(59)
        store.close()


def test_a_server_that_is_dead_at_first(own: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 60.0)
    store = RemoteStore(own.url(), MODEL, SIZE)
    assert put(store, 0) == [False]
    assert got(store, 0) is None
    assert store.contains(KEYS[:1]) == [False]
    own.start()
    assert put(store, 0) == [False], "it is left alone for a while"
    recover(store)
    assert put(store, 0) == [True]
    assert got(store, 0) == page(0)
    assert (store.stats().dropped, store.stats().missed) == (2, 1)
    store.close()


def test_a_restart_in_the_middle(own: RedisServer) -> None:
    own.start()
    store = RemoteStore(own.url(), MODEL, SIZE)
    put(store, 0, 1)
    own.kill()
    assert got(store, 0) is None
    assert put(store, 2) == [False]
    store.touch(KEYS[:1])
    store.flush()
    store.clear()
    own.start()
    recover(store)
    assert store.contains(KEYS[:3]) == [False] * 3
    assert store.stats().num_used_pages == 0
    assert put(store, 2) == [True]
    assert got(store, 2) == page(2)
    store.close()


def test_pauses_grow_and_end(own: RedisServer) -> None:
    store = RemoteStore(own.url(), MODEL, SIZE)
    pauses = []
    for _ in range(8):
        pauses.append(store._pause)
        recover(store)
        got(store, 0)
    assert pauses == [2, 4, 8, 16, 30, 30, 30, 30]
    own.start()
    recover(store)
    put(store, 0)
    assert store._pause == remote.PAUSE_SECONDS
    store.close()


def freeze(server: RedisServer, store: RemoteStore) -> None:
    """And let the store wait for it for a moment only, and pause for long."""
    server.freeze()
    store._wire._timeout, store._pause = 0.1, 60.0


def thaw(server: RedisServer, store: RemoteStore) -> None:
    server.thaw()
    store._wire._timeout = 30.0


@pytest.mark.parametrize("call", ["contains", "read", "write", "touch"])
def test_a_server_that_hangs_is_given_up(call: str, own: RedisServer) -> None:
    own.start()
    store = RemoteStore(own.url(), MODEL, SIZE)
    put(store, 0)
    freeze(own, store)
    calls = {
        "contains": lambda: store.contains(KEYS[:1]) == [False],
        "read": lambda: got(store, 0) is None,
        "write": lambda: put(store, 1) == [False],
        "touch": lambda: store.touch(KEYS[:1]) is None,
    }
    assert calls[call]()
    assert store._usable_at > time.monotonic(), "left alone for a while"
    thaw(own, store)
    recover(store)
    assert got(store, 0) == page(0), "not the answer to an earlier question"
    store.close()


def with_a_clear_that_failed(own: RedisServer) -> RemoteStore:
    """A store of two pages, of a server that did not answer then and does now."""
    own.start()
    store = RemoteStore(own.url(), MODEL, SIZE)
    put(store, 0, 1)
    freeze(own, store)
    store.clear()
    thaw(own, store)
    return store


def test_a_clear_that_fails_is_done_before_the_store_answers_again(own: RedisServer) -> None:
    store = with_a_clear_that_failed(own)
    assert got(store, 0) is None, "it pauses"
    recover(store)
    assert store.contains(KEYS[:2]) == [False, False]
    assert put(store, 1) == [True]
    assert got(store, 1) == page(1)
    store.close()


def test_a_clear_that_failed_is_tried_again_as_the_store_closes(own: RedisServer) -> None:
    store = with_a_clear_that_failed(own)
    store.close()
    again = RemoteStore(own.url(), MODEL, SIZE)
    assert again.contains(KEYS[:2]) == [False, False]
    again.close()


@pytest.mark.parametrize("command", ["scan", "unlink"])
def test_a_store_that_may_not_clear_answers_no_more(
    command: str, own: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    own.start()
    with redis.Redis.from_url(own.url()) as client:
        client.acl_setuser(
            "weak", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", f"-{command}"]
        )
    store = RemoteStore(own.url("weak:pw@"), MODEL, SIZE)
    put(store, 0)
    assert got(store, 0) == page(0)
    store.clear()
    recover(store)
    assert got(store, 0) is None
    assert put(store, 1) == [False]
    store.close()
    store.close()
    told = [one for one in caplog.messages if "could not be emptied" in one]
    assert len(told) == 1
    assert told[0].endswith(f"remove the keys kvgraph-1:{MODEL.hex()[:32]}:*")


@pytest.mark.parametrize("credentials", ["", "someone:", ":wrong-secret@", "someone:wrong-secret@"])
def test_wrong_credentials(
    credentials: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path, "--requirepass", "right-secret")
    server.start()
    try:
        with pytest.raises(StoreError, match="lets us in, got: credentials refused") as caught:
            RemoteStore(server.url(credentials and credentials.rstrip("@") + "@"), MODEL, SIZE)
        assert "secret" not in str(caught.value) + caplog.text
        store = RemoteStore(server.url(":right-secret@"), MODEL, SIZE)
        assert put(store, 0) == [True]
        with redis.Redis.from_url(server.url(":right-secret@")) as client:
            client.config_set("requirepass", "another-secret")
            client.client_kill_filter(skipme=True)
        assert got(store, 0) is None, "refused later: misses"
        recover(store)
        assert got(store, 0) is None
        store.close()
    finally:
        server.kill()


@pytest.mark.parametrize(
    "url",
    [
        "http://host:6379",
        "host:6379",
        "redis://host:port",
        "redis://user:secret@host:99999",
        "redis://user:secret@host/0?colour=red",
        "redis://user:secret@host/0?socket_timeout=soon",
        "redis://host?protocol=9",
        "redis://host?cache=x",
        "redis://host?credential_provider=x&password=secret",
        "redis://host?maint_notifications_config=x",
        "rediss://host?ssl_cert_reqs=bogus",
    ],
)
def test_a_malformed_address(url: str) -> None:
    with pytest.raises(StoreError, match="expected an address such as redis://host") as caught:
        RemoteStore(url, MODEL, SIZE)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(StoreError, match=r"remote tier nohost:7000: .* name that does not resolve"):
        RemoteStore("redis://user:secret@nohost:7000/0", MODEL, SIZE)


def test_a_port_that_nobody_listens_to_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = RemoteStore(f"redis://127.0.0.1:{port}", MODEL, SIZE)
    assert put(store, 0) == [False]
    store.close()


@pytest.mark.parametrize(("module", "package"), [("remote", "redis"), ("disk.store", "xxhash")])
def test_a_package_that_is_not_installed(module: str, package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import kvgraph.kv.tiers.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"MissingDependencyError: {package}: needed by the" in done.stderr
    assert "not installed; pip install 'kvgraph[tiers]'" in done.stderr


@pytest.mark.parametrize(("module", "package"), [("remote", "redis"), ("disk.store", "xxhash")])
def test_a_package_that_is_broken(module: str, package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("import absent_one")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvgraph.kv.tiers.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"MissingDependencyError: {package}: needed by the" in done.stderr
    assert "installed, and it cannot be imported" in done.stderr
