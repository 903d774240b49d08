"""A server at the limit of open files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.running import COMMAND, SECONDS, Server, is_ready, wait_for

FEW = 64


def at_most(files: str) -> list[str]:
    """A command that runs another one with a limit of open files."""
    return ["sh", "-c", f'ulimit {files}; exec "$@"', "sh"]


@pytest.mark.parametrize("files", [12, 13, 14])
def test_too_few_to_start_are_one_sentence(files: int, artifact: Path) -> None:
    command = [*at_most(f"-n {files}"), *COMMAND, str(artifact), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(
        "got 'Too many open files'; raise the limit of open files (`ulimit -n`)\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_limit_is_raised_as_far_as_it_may_be(artifact: Path, tmp_path: Path) -> None:
    server = Server([*at_most(f"-S -n {FEW}"), *COMMAND, artifact, "--port", 0], tmp_path / "log")
    try:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text(encoding="utf-8")
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        soft, hard = line.split()[3:5]
        assert int(soft) > FEW
        assert int(soft) == min(int(hard), 1 << 16)
        server.event("ready")
    finally:
        server.close()


def test_clients_that_are_too_many_are_told_of_in_the_log(artifact: Path, tmp_path: Path) -> None:
    server = Server([*at_most(f"-n {FEW}"), *COMMAND, artifact, "--port", 0], tmp_path / "log")
    try:
        server.event("ready")
        assert "open files" not in server.log()
        clients = [server.connect() for _ in range(2 * FEW)]
        assert f"the limit of {FEW} open files" in server.event("warning")["message"]
        for client in clients:
            client.close()
        wait_for(lambda: is_ready(f"{server.url}/ready"), "no answer")
        assert server.log().count("open files") == 1
    finally:
        server.close()
