"""A server from its first moment on: it listens while files are hashed, and signals end it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.serve.running import SECONDS, Server, refusal

WAITING = """
import select, sys
from kvgraph import __main__, cli
from kvgraph.runtime import artifact
call = artifact.{name}
def wait(*given, **others):
    print("waits", flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass  # a signal just before a read that never ends would not be seen
    sys.stdin.readline()
    return call(*given, **others)
artifact.{name} = wait
__main__.main()
"""
"""`kvgraph`, which waits for a line on stdin before it calls a function."""

OTHER_COMMAND = """
import select, sys, types
import kvgraph
from kvgraph import __main__
def main():
    print("waits", flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass  # a signal just before a read that never ends would not be seen
    sys.stdin.readline()
kvgraph.cli = sys.modules["kvgraph.cli"] = types.SimpleNamespace(main=main)
__main__.main()
"""
"""`kvgraph` with a command that does nothing."""

UNSHARE = ["unshare", "-pf", "--kill-child", "--mount-proc"]


def hashing(artifact: Path, *arguments: object) -> list[object]:
    """A server that hashes its artifact once a line comes on stdin."""
    code = WAITING.format(name="require_intact")
    return [sys.executable, "-c", code, "serve", artifact, *arguments]


def test_it_listens_while_it_hashes(artifact: Path, tmp_path: Path) -> None:
    server = Server([*hashing(artifact), "--port", 0], tmp_path / "log")
    try:
        assert server.client.get("/health").status_code == 200
        assert "being loaded" in refusal(server.client.get("/ready"), 503)
        assert server.process.stdin is not None
        server.process.stdin.write(b"\n")
        server.process.stdin.flush()
        server.event("ready")
        server.complete("The")
    finally:
        server.close()


def test_a_log_of_an_artifact_that_takes_long(artifact: Path, tmp_path: Path) -> None:
    code = "from kvgraph.serve import log; log.PROGRESS_SECONDS = 0; " + WAITING.format(name="read")
    command = [sys.executable, "-c", code, "serve", artifact, "--verify", "--port", 0]
    with running(command) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write("\n")
        process.stdin.flush()
        lines = []
        while not lines or lines[-1].get("event") != "ready":
            lines.append(json.loads(process.stderr.readline()))
        process.terminate()
        assert process.wait(SECONDS) == 0
    first, *told, last = lines
    assert (first["event"], last["event"]) == ("listening", "ready")
    assert {(line["event"], line["task"]) for line in told} == {("loading", "hashing")}
    shares = [line["share"] for line in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    assert told[-1]["seconds_left"] >= 0


def test_a_signal_ends_it_while_it_hashes(artifact: Path, tmp_path: Path) -> None:
    server = Server([*hashing(artifact), "--port", 0], tmp_path / "log")
    server.close()
    assert "draining" in server.log()


def test_a_damaged_artifact_ends_it(artifact: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(artifact, tmp_path / "model.kvg"))
    with (folder / "weights.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    server = Server([*hashing(folder), "--port", 0], tmp_path / "log")
    try:
        server.process.communicate(b"\n", SECONDS)
        assert server.process.returncode == 2
        last = server.log().splitlines()[-1]
        assert last.startswith(f"kvgraph: {folder}/weights.safetensors: chunk 0: expected SHA-256")
    finally:
        server._end()


def test_a_port_in_use_is_told_before_it_hashes(artifact: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = hashing(artifact, "--port", taken.getsockname()[1])
        with running(command) as process:
            _, said = process.communicate(timeout=SECONDS)  # stdin ends only here
    assert process.returncode == 2
    assert "expected an address to listen at" in said
    assert "waits" not in said


@contextmanager
def running(command: list[object], is_first: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process; `is_first`: a child of it is process 1, as in a container."""
    process = subprocess.Popen(
        [*(UNSHARE if is_first else []), *map(str, command)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.__exit__(None, None, None)


def own_id(process: subprocess.Popen[str], is_first: bool) -> int:
    """Id of the Python process, which `unshare` has started."""
    if not is_first:
        return process.pid
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return int(children.split()[0])


def require_namespaces(is_first: bool) -> None:
    if is_first and (
        not shutil.which("unshare")
        or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode
    ):
        pytest.skip("makes a namespace of processes: needs unshare, and root")


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_it_listens(is_first: bool, number: int, artifact: Path) -> None:
    require_namespaces(is_first)
    code = WAITING.format(name="read")
    command = [sys.executable, "-c", code, "serve", artifact, "--port", 0]
    with running(command, is_first) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        os.kill(own_id(process, is_first), number)
        assert process.wait(SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_process_1(number: int) -> None:
    """In a container any command may be process 1; the kernel would drop the signal."""
    require_namespaces(True)
    with running([sys.executable, "-c", OTHER_COMMAND], True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        os.kill(own_id(process, True), number)
        assert process.wait(SECONDS) == 128 + number


def test_a_program_that_imports_kvgraph_keeps_its_handlers() -> None:
    code = (
        "import signal, kvgraph; kvgraph.load; "
        "print([signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGHUP)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True]\n"
