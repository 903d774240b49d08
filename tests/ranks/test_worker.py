"""`kvgraph worker`: ranks above 0 that say so."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import run, wait_until_it_writes
from tests.support.ranks import ended, started

OPTIONS = ("--max-new-tokens", 8, "--num-pages", 64)


@pytest.fixture(scope="module")
def two(compiled: Callable[..., Path]) -> Path:
    return compiled("tiny-llama", tp=2)


@pytest.mark.parametrize("hosts", [False, True])
def test_a_worker_follows_a_server(hosts: bool, two: Path) -> None:
    command = ("serve", two, "--port", 0, "--num-pages", 64)
    follow = ("worker", two, "--threads", 1)
    with started(*command, hosts=hosts, followers=follow) as (leader, worker):
        assert leader.stderr is not None
        url = json.loads(leader.stderr.readline())["url"]
        while json.loads(leader.stderr.readline())["event"] != "ready":
            pass
        body = {"model": two.name, "prompt": "The import", "max_tokens": 4, "temperature": 0}
        asked = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=180) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        # As torchrun does, on the leader's machine: the leader ends the worker.
        for process in (leader,) if hosts else (worker, leader):
            process.send_signal(signal.SIGTERM)
        assert ended(leader)[0] == 0
        assert ended(worker) == (0, "", "")


def test_a_worker_follows_generate(two: Path) -> None:
    with started("generate", two, "The", *OPTIONS, followers=("worker", two)) as ranks:
        (code, out, _), worker = (ended(process) for process in ranks)
    assert (code, worker) == (0, (0, "", ""))
    assert out


@pytest.mark.parametrize("followers", [None, "worker"])
def test_ranks_follow_prefill(two: Path, tmp_path: Path, followers: str | None) -> None:
    text, out = tmp_path / "system.txt", tmp_path / "system.kvp"
    text.write_text("The import statement " * 9)
    given = (two, "--prompt-file", text, "-o", out)
    with started("prefill", *given, followers=(followers, two) if followers else ()) as ranks:
        (code, said, _), other = (ended(process) for process in ranks)
    assert (code, other) == (0, (0, "", ""))
    assert said.startswith(f"{out}: ")
    assert out.is_file()


def test_rank_0_is_no_worker(two: Path) -> None:
    with started("worker", two, only=(0,)) as (leader,):
        code, out, said = ended(leader)
    assert (code, out, said) == (
        2,
        "",
        "kvgraph: worker: expected a rank above 0 of torchrun, got rank 0; rank 0 runs another "
        "command\n",
    )


def test_a_worker_without_torchrun(two: Path) -> None:
    code, out, said = run("worker", two)
    assert (code, out) == (2, "")
    assert "worker: expected a rank above 0 of torchrun, got no torchrun" in said.replace("\n", " ")


def test_a_worker_of_an_artifact_of_one_rank(compiled: Callable[..., Path]) -> None:
    with started("worker", compiled("tiny-llama"), only=(1,)) as (worker,):
        code, _, said = ended(worker)
    assert code == 2
    assert "expected 1 processes, one for each of its ranks, got 2 from torchrun" in said


def test_a_worker_whose_leader_does_not_come(two: Path) -> None:
    with started("worker", two, "--collective-timeout", 0.5, only=(1,)) as (worker,):
        code, _, said = ended(worker)
    assert code == 2
    assert "kvgraph: rank 0: expected it to join within 0.5 s, got no answer" in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("hosts", [False, True])
def test_a_signal_ends_a_worker_that_waits_for_its_leader(
    hosts: bool, number: int, code: int, two: Path
) -> None:
    with started("worker", two, only=(1,), hosts=hosts) as (worker,):
        _wait_until_caught(worker.pid, signal.SIGTERM)
        worker.send_signal(number)
        # A Ctrl-C that meets a dataclass being made ends Python by the signal itself.
        assert ended(worker, 120)[0] in (code, -signal.SIGINT if number == signal.SIGINT else code)


def test_a_signal_ends_a_worker_on_another_machine(two: Path) -> None:
    """Its torchrun does not reach the leader, which names it."""
    options = ("--max-new-tokens", 2000, "--ignore-eos")
    with started("generate", two, "The", *options, hosts=True, followers=("worker", two)) as ranks:
        leader, worker = ranks
        wait_until_it_writes(leader)
        worker.send_signal(signal.SIGTERM)
        assert ended(worker, 120)[0] == 143
        code, _, said = ended(leader)
    assert code == 2
    assert "kvgraph: rank 1: expected it to take part" in said


def _wait_until_caught(process: int, number: int) -> None:
    """Until the process has a handler for the signal, which it has when it looks for rank 0."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        status = Path(f"/proc/{process}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (number - 1) & 1:
            return
        time.sleep(0.05)
    pytest.fail(f"no handler of signal {number}")
