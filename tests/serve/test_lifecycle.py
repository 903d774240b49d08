"""A server from its start to its end, and clients that leave, stall, or are too many."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.running import (
    COMMAND,
    LIMITED,
    LONG,
    SECONDS,
    TEXTS,
    WAITING,
    Server,
    answered,
    frames,
    is_ready,
    paced,
    posted,
    refusal,
    serving,
    stream_of,
    wait_for,
)
from tests.support.command_line import run
from tests.support.ports import free_port


@contextmanager
def limited(tmp_path: Path, artifact: Path, **options: Any) -> Iterator[Server]:
    with serving(tmp_path / "log", artifact, json.dumps(options), command=LIMITED) as server:
        yield server


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT] * 2])
def test_a_signal_ends_a_server_that_loads(
    signals: list[signal.Signals], artifact: Path, tmp_path: Path
) -> None:
    """At once, with no word of Python's, whatever the loading thread waits for."""
    server = Server([*LIMITED, artifact, json.dumps({"waits": True})], tmp_path / "log")
    wait_for(lambda: is_alive(server), "no answer")
    for each in signals:
        server.process.send_signal(each)
        server.event("draining")
    begun = time.monotonic()
    server.close()
    assert time.monotonic() - begun < 10
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert [line["event"] for line in lines] == ["listening", "draining"]


def test_not_ready_until_it_is_loaded(artifact: Path, tmp_path: Path) -> None:
    command = [*LIMITED, artifact, json.dumps({"waits": True})]
    server = Server(command, tmp_path / "log")
    try:
        wait_for(lambda: is_alive(server), "no answer")
        for path in ("/ready", "/v1/models", "/metrics", "/state"):
            answer = server.client.get(path)
            assert "being loaded" in refusal(answer, 503)
            assert int(answer.headers["retry-after"]) >= 1
        refusal(server.post("/v1/completions", {"prompt": "The"}), 503)
        assert server.client.get("/version").status_code == 200
        assert server.process.stdin is not None
        server.process.stdin.write(b"\n")
        server.process.stdin.flush()
        server.event("ready")
        assert server.client.get("/ready").status_code == 200
        server.complete("The")
    finally:
        server.close()


def is_alive(server: Server) -> bool:
    return server.client.get("/health").status_code == 200


def test_a_server_that_drains_finishes_what_runs(artifact: Path, tmp_path: Path) -> None:
    with paced(tmp_path, artifact, "--threads", 1) as (server, pace):
        whole = server.complete(**{**LONG, "max_tokens": 1000})["choices"][0]["text"]
        pace.allow(1001)
        with stream_of(server, {**WAITING, "max_tokens": 1000}) as lines:
            server.terminate()
            assert "it ends" in refusal(server.client.get("/ready"), 503)
            refusal(server.post("/v1/completions", {"prompt": "The"}), 503)
            assert server.client.get("/health").status_code == 200
            pace.end()
            told = [frame["choices"][0] for frame in frames(lines)]
        assert told[-1]["finish_reason"] == "length"
        assert len(told) > 1
        assert whole.endswith("".join([choice["text"] for choice in told]))
        assert server.process.wait(SECONDS) == 0


def test_what_takes_too_long_is_cut(artifact: Path, tmp_path: Path) -> None:
    arguments = (artifact, "--threads", 1, "--drain-seconds", 0)
    with paced(tmp_path, *arguments) as (server, pace):
        pace.allow(1)
        with ThreadPoolExecutor() as pool, stream_of(server) as lines:
            whole = pool.submit(server.post, "/v1/completions", WAITING | {"stream": False})
            wait_for(lambda: server.state()["num_queued"] == 1, "the second one does not come")
            pace.allow(5)
            wait_for(lambda: server.state()["num_running"] == 2, "the second one does not run")
            server.terminate()
            last = frames(lines)[-1]
            assert last["error"]["message"] == "the engine was closed"
            assert last["error"]["code"] == "not_ready", "as of the whole answer, a 503"
            assert refusal(whole.result(), 503) == "the engine was closed"
            assert whole.result().headers["retry-after"] == "1"
        pace.end()
        assert server.process.wait(SECONDS) == 0


def test_a_log_that_nobody_reads_costs_no_answer(artifact: Path) -> None:
    command = [*COMMAND, str(artifact), "--port", "0", "--threads", "1"]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    streams: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "env": buffered}
    with ended_by_sigterm(command, **streams) as process:
        assert process.stderr is not None
        url = json.loads(process.stderr.readline())["url"]
        assert json.loads(process.stderr.readline())["event"] == "ready"
        process.stderr.close()
        body = {"prompt": "The", "max_tokens": 2}
        for path, status in (("/v1/completions", 200), ("/v1/chat/completions", 400)):
            assert httpx.post(url + path, json=body, timeout=SECONDS).status_code == status


def test_a_server_without_stderr(artifact: Path) -> None:
    port = free_port()
    command = [*COMMAND, str(artifact), "--port", str(port), "--threads", "1"]
    url = f"http://127.0.0.1:{port}/ready"
    with ended_by_sigterm(["sh", "-c", 'exec "$@" 2>&-', "sh", *command]) as process:
        wait_for(lambda: process.poll() is not None or is_ready(url), "it is not ready")


@contextmanager
def ended_by_sigterm(command: list[str], **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """A server that SIGTERM ends with 0 at the end of the scope."""
    process = subprocess.Popen(command, **streams)
    try:
        yield process
        process.terminate()
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def test_a_long_text_does_not_stop_the_others(server: Server) -> None:
    text = {"prompt": "a " * 1_000_000}
    with ThreadPoolExecutor() as pool:
        long = pool.submit(server.post, "/tokenize", text)
        answers = 0
        while not long.done():
            assert httpx.get(f"{server.url}/health", timeout=SECONDS).status_code == 200
            answers += 1
    assert long.result().status_code == 200
    assert answers >= 5


def test_a_second_signal_ends_it_at_once(artifact: Path, tmp_path: Path) -> None:
    with paced(tmp_path, artifact, "--threads", 1) as (server, pace):
        pace.allow(1)
        with stream_of(server) as lines:
            server.terminate()
            server.process.send_signal(signal.SIGTERM)
            assert "error" in frames(lines)[-1]
        pace.end()
        assert server.process.wait(SECONDS) == 0


def test_a_terminal_that_is_closed(artifact: Path, tmp_path: Path) -> None:
    """Its shell and the kernel send SIGHUP, each once: running requests go on."""
    with paced(tmp_path, artifact, "--threads", 1) as (server, pace):
        pace.allow(1)
        with stream_of(server) as lines:
            server.process.send_signal(signal.SIGHUP)
            server.event("draining")
            server.process.send_signal(signal.SIGHUP)
            pace.end()
            assert "error" not in frames(lines)[-1]
        assert server.process.wait(SECONDS) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("second", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_who_leaves_gives_back_the_pages(server: Server, stream: bool, second: bytes) -> None:
    """Another request may wait behind the one that runs."""
    before = server.state()["generated_tokens"]
    with server.connect() as connection:
        connection.sendall(posted(TEXTS, {**LONG, "n": 32, "stream": stream}) + second)
        wait_for(lambda: server.state()["num_running"] == 32, "they do not run")
    server.wait_until_idle()
    assert server.state()["generated_tokens"] - before < 32 * 2000


def test_a_slow_reader_is_cut(artifact: Path, tmp_path: Path) -> None:
    """It takes nothing; the stream's pages come back, and others are served meanwhile."""
    options = {"send_seconds": 0.2, "max_unread_tokens": 100}
    with limited(tmp_path, artifact, **options) as server:
        with server.connect(window=4096) as stalled:
            stalled.sendall(posted(TEXTS, {**WAITING, "n": 40, "logprobs": 20}))
            wait_for(lambda: server.state()["generated_tokens"] > 0, "it does not run")
            server.complete("The")
            server.wait_until_idle()
            wait_for(lambda: server.has_closed(stalled), "the connection stays")
        assert server.state()["generated_tokens"] < 40 * 2000
        assert "ASGI" not in server.log()


def half_sent(server: Server) -> socket.socket:
    """A connection of which a server has the head of a request and some of its body."""
    to = server.connect()
    to.sendall(b'POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{"prompt":')
    return to


def test_a_body_that_stops_is_refused(artifact: Path, tmp_path: Path) -> None:
    with limited(tmp_path, artifact, receive_seconds=0.2) as server:
        with half_sent(server) as to, HTTPResponse(to) as answer:
            answer.begin()
            assert answer.status == 408
            error = json.load(answer)["error"]
        assert error["message"] == "body: expected all of it, got nothing more for 0.2 seconds"


def test_a_body_that_is_on_its_way_when_the_server_ends(artifact: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", artifact, "--drain-seconds", 0.1) as server:
        with half_sent(server) as to:
            server.complete("The")  # its head has been read
            server.process.send_signal(signal.SIGTERM)
            with HTTPResponse(to) as answer:
                answer.begin()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert server.process.wait(SECONDS) == 0
        lines = [json.loads(line) for line in server.log().splitlines()]
        (told,) = [line["message"] for line in lines if line.get("event") == "error"]
        assert "graceful shutdown" in told


def test_what_never_fits_is_refused(artifact: Path, tmp_path: Path) -> None:
    arguments = ("--num-pages", 8, "--threads", 1)
    with serving(tmp_path / "log", artifact, *arguments) as server:
        longest = answered(server.client.get("/v1/models"))["data"][0]["max_model_len"]
        assert 64 < longest <= 8 * 16 + 1
        usage = server.complete([5] * 64, max_tokens=longest - 64, ignore_eos=True)["usage"]
        assert usage["total_tokens"] == longest
        body = {"prompt": [5] * 64, "max_tokens": longest - 63}
        sentence = refusal(server.post("/v1/completions", body), 400)
        assert f"at most {longest} tokens" in sentence
        assert f"64 of prompt and {longest - 63} of output" in sentence


def test_a_taken_port_is_one_sentence(server: Server, artifact: Path) -> None:
    port = server.url.rpartition(":")[2]
    outcome = run("serve", artifact, "--port", port)
    assert outcome.code == 2
    assert f"127.0.0.1:{port}: expected an address to listen at" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--metrics-prefix", "my metrics"), "--metrics-prefix: expected letters"),
        (("--allowed-origins", "https://a.b/"), "--allowed-origins: expected * or an origin such"),
        (("--allowed-origins", "a.example"), "--allowed-origins: expected * or an origin such"),
        (("--api-key-file", "{folder}/empty"), "expected an API key on a line, got none"),
        (("--api-key-file", "{folder}/none"), "--api-key-file: expected a file at"),
        (("--host", "256.0.0.1", "--port", "0"), "expected an address to listen at"),
        (("--host", "unix:/x.sock"), "give a path to --uds"),
        (("--cache-memory", "much", "--port", "0"), "cache_memory"),
    ],
)
def test_options_that_cannot_be(
    artifact: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "empty").write_text("\n\n")
    outcome = run("serve", artifact, *[one.format(folder=tmp_path) for one in arguments])
    assert outcome.code == 2
    assert sentence in outcome.err
    assert outcome.err.strip().splitlines()[-1].startswith("kvgraph: ")


def test_an_artifact_that_does_not_load(
    artifact: Path, tmp_path: Path, compiled: Callable[..., Path]
) -> None:
    outcome = run("serve", tmp_path)
    assert outcome.code == 2
    assert "manifest.json" in outcome.err
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in artifact.iterdir():
        if path.is_file():
            (damaged / path.name).write_bytes(path.read_bytes())
    (damaged / "weights.safetensors").write_bytes(b"damaged")
    outcome = run("serve", damaged, "--port", 0)
    assert outcome.code == 2
    assert "weights.safetensors" in outcome.err


def test_an_engine_that_cannot_be_made_ends_the_server(artifact: Path, tmp_path: Path) -> None:
    """It is found out while the server listens."""
    outcome = run("serve", artifact, "--port", 0, "--num-pages", 10**12)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("kvgraph: ")
    assert "Traceback" not in outcome.err


REFUSED = """
from kvgraph.cli import main
from tests.support.refused_threads import refused_threads

with refused_threads({name!r}):
    main()
"""


@pytest.mark.parametrize("name", [("kvgraph-engine", "asyncio"), "kvgraph-make", "kv-events"])
def test_a_thread_that_the_system_refuses_ends_the_server(
    artifact: Path, name: str | tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", REFUSED.format(name=name), "serve", str(artifact)]
    options = ["--port", "0", "--kv-events", f"tcp://127.0.0.1:{free_port()}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvgraph: threads: expected ")
    assert "Traceback" not in done.stderr
