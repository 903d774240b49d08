"""How ranks end: interrupts, failures that are told again, and signals."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph.errors import ArtifactError, CapacityError, RankError
from kvgraph.ops.group import Group, shared_bytes
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.ranks import leader, meeting
from kvgraph.runtime.ranks.follower import Follower
from kvgraph.runtime.ranks.launched import Launched
from kvgraph.runtime.ranks.sessions import open_leader
from kvgraph.runtime.ranks.wire import Wire
from kvgraph.runtime.sessions.base import Session
from tests.ranks.test_running import FACTS, met
from tests.support import command_line
from tests.support.ports import free_port
from tests.support.ranks import environment

PROMPT = [5, 9, 33, 120, 7]
GREEDY = kvgraph.SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def two(compiled: Callable[..., Path]) -> Path:
    return compiled("tiny-llama", tp=2)


@pytest.fixture
def engine(two: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvgraph.Engine]:
    """Two ranks, threads; what a follower raises is not printed."""
    monkeypatch.setattr(threading, "excepthook", lambda given: None)
    session: Any = kvgraph.load(two).session(collective_timeout=10)
    with kvgraph.Engine(two, session=session, num_pages=64) as made:
        made.submit(PROMPT, GREEDY)
        yield made
    session.close()


def processes(code: str, folder: Path, **given: str) -> list[subprocess.Popen[str]]:
    """Two ranks that run `code`, whose argument is `folder`."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            env=os.environ | environment(rank, 2, f"run {port} {os.getpid()}", port, **given),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def message(text: str) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode()


def interrupted(*given: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


# -- interrupts


def test_an_interrupt_behind_the_message_of_a_step_ends_the_ranks(
    engine: kvgraph.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers have the step, and rank 0 has not run it: its next step is not the same."""
    with monkeypatch.context() as patch:
        patch.setattr(leader, "run_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(RankError, match=r"rank 0: expected it to take part .* its failure"):
        engine.step()


def test_two_interrupts_of_a_step_end_the_ranks(
    engine: kvgraph.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes before the others are told of the first."""
    with monkeypatch.context() as patch:
        patch.setattr(leader, "run_part", interrupted)
        patch.setattr(Group, "abort", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(RankError, match=r"rank 0: expected it to take part .* its failure"):
        engine.step()


@pytest.mark.parametrize("refused", ["rank 1", "rank 0", "threads"])
def test_ranks_of_which_one_does_not_open_leave_no_connection(
    refused: str, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []
    artifact, pair = kvgraph.load(two), socket.socketpair

    def make(part: ArtifactFolder, threads: int | None) -> Session:
        if refused == f"rank {part.rank}":
            raise ArtifactError(refused)
        return artifact.checked_unless_rank()._make(None, part, threads)

    def socketpair() -> tuple[socket.socket, socket.socket]:
        made.extend(pair())
        return made[0], made[1]

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket, "socketpair", socketpair)
    if refused == "threads":
        monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises((ArtifactError, CapacityError), match=refused):
        open_leader(artifact, make, 1, 10.0)
    assert [one.fileno() for one in made] == [-1, -1]


def test_a_step_that_is_not_the_next_is_refused() -> None:
    memory = np.zeros(shared_bytes(2), np.uint8)
    groups = [Group(memory, rank, 2, [-1, -1], 1.0) for rank in range(2)]
    near, far = socket.socketpair()
    session: Any = None  # not reached
    with near, far:
        Wire(near, 1).send({"run": "once", "step": 2})
        with pytest.raises(RankError, match="rank 0: expected step 1, got step 2; start all"):
            Follower(session, groups[1], Wire(far, 0)).serve()
    with pytest.raises(RankError, match=r"rank 1: .* got its failure"):
        groups[0].require_whole()


# -- failures


def test_a_rank_that_is_gone_is_named_each_time(engine: kvgraph.Engine) -> None:
    """Not rank 0, which fails the step of all others."""
    session: Any = engine.session
    session._wires[0]._socket.shutdown(socket.SHUT_RDWR)
    for _ in range(3):
        with pytest.raises(RankError, match=r"rank 1: .* got the end of its process"):
            engine.step()


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, 86_401.0, 0.0, -1.0])
def test_timeouts_that_no_clock_counts(seconds: float, two: Path) -> None:
    sentence = "collective_timeout: expected more than 0 s, and 86400 s at most, got"
    with pytest.raises(RankError, match=sentence):
        kvgraph.load(two).session(collective_timeout=seconds)


@pytest.mark.parametrize("seconds", ["5", True])
def test_timeouts_that_are_no_numbers(seconds: Any, two: Path) -> None:
    with pytest.raises(RankError, match="collective_timeout: expected a number, got"):
        kvgraph.load(two).session(collective_timeout=seconds)


LEFT = """
import os, sys
import kvgraph

engine = kvgraph.Engine(sys.argv[1], num_pages=16)
few, prompt = kvgraph.SamplingParams(max_new_tokens=2), [[5, 9, 33, 120, 7]]
expected = engine.generate(prompt, few)[0].token_ids
for how in ("closed", "freed", "left to the interpreter"):
    if not (child := os.fork()):
        if how == "closed":
            engine.close()
        if how == "freed":
            del engine
        sys.exit()
    print(os.waitpid(child, 0)[1], flush=True)
print(engine.generate(prompt, few)[0].token_ids == expected)
"""


def test_a_forked_child_leaves_the_ranks_to_its_parent(two: Path) -> None:
    command = [*command_line.FORKING, "-c", LEFT, str(two)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("0\n0\n0\nTrue\n", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("keeps_time", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_of_overwritten_weights_is_refused(
    rank: int, keeps_time: bool, two: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(two, tmp_path / "two.kvg")
    with kvgraph.Engine(folder, num_pages=16) as engine:
        engine.generate([PROMPT], GREEDY)
        file = engine.artifact.folder / ("rank1/" * rank + "weights.safetensors")
        file.chmod(0o600)
        engine.generate([PROMPT], GREEDY)
        before = file.stat()
        with file.open("r+b") as opened:
            opened.seek(-4, os.SEEK_END)
            opened.write(b"\x3f" * 4)
        if keeps_time:
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(ArtifactError, match=f"^{file}: expected the file as the session"):
            engine.generate([PROMPT], GREEDY)


def test_rank_0_that_has_ended_is_not_waited_for(compiled: Callable[..., Path]) -> None:
    """A child of it holds its end of the connection."""
    code = (
        "import os, sys, time, kvgraph\n"
        "artifact = kvgraph.load(sys.argv[1])\n"
        "if os.environ['RANK'] != '0':\n"
        "    artifact.follow()\n"
        "engine = kvgraph.Engine(artifact, num_pages=16)\n"
        f"engine.generate([{PROMPT}], kvgraph.SamplingParams(max_new_tokens=2))\n"
        "child = os.fork()\n"
        "if child:\n"
        "    print(child, flush=True)\n"
        "time.sleep(120)\n"
    )
    ranks = processes(code, compiled("tiny-llama", tp=2))
    assert ranks[0].stdout is not None
    child = int(ranks[0].stdout.readline())
    try:
        ranks[0].kill()
        said = ranks[1].communicate(timeout=60)[1]
    finally:
        os.kill(child, signal.SIGKILL)
        ranks[1].kill()
        ranks[0].communicate()
    assert said.splitlines()[-1] == (
        "kvgraph.errors.RankError: rank 0: expected it to take part, got the end of its process; "
        "start all ranks again"
    )


# -- strangers


@pytest.mark.parametrize(
    "said",
    [
        None,
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        message("[]"),
        message("{"),
        message('{"arrays": []}'),
        message('{"arrays": [], "rank": "one", "facts": {}}'),
        message('{"arrays": [], "rank": 1, "facts": 1}'),
        message('{"arrays": [["float32", [9223372036854775807]]]}'),
        message('{"arrays": [["float32", [-1]]]}'),
    ],
)
def test_a_stranger_is_not_taken_for_a_rank(
    said: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this user, at the socket of the run; None: it stays, and says nothing."""
    listen = meeting._listener
    strangers = []

    def with_stranger(own: Launched) -> socket.socket:
        listener = listen(own)
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(listener.getsockname())
        strangers.append(stranger)
        if said is not None:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        return listener

    def hello_of_stranger(connection: socket.socket, seconds: float) -> Any:
        monkeypatch.setattr(meeting, "HELLO_SECONDS", 10.0)  # the rank may take its time
        monkeypatch.setattr(meeting, "_hello", hello)
        return hello(connection, seconds)

    hello = meeting._hello
    monkeypatch.setattr(meeting, "_hello", hello_of_stranger)
    monkeypatch.setattr(meeting, "HELLO_SECONDS", 0.2)
    monkeypatch.setattr(meeting, "_listener", with_stranger)
    (group, wires), (_, wire) = met(f"stranger {said!r}", [FACTS, FACTS])
    assert group.size == 2
    for end in (*wires, wire, *strangers):
        end.close()


# -- two engines in turn


@pytest.mark.parametrize("hosts", [False, True])
def test_a_rank_follows_one_engine_after_another(hosts: bool, two: Path) -> None:
    code = (
        "import os, sys, kvgraph\n"
        "artifact = kvgraph.load(sys.argv[1])\n"
        "for _ in range(2):\n"
        "    if os.environ['RANK'] != '0':\n"
        "        artifact.follow()\n"
        "        print('followed')\n"
        "        continue\n"
        "    session = artifact.session()\n"
        "    with kvgraph.Engine(artifact, session=session, num_pages=16) as engine:\n"
        f"        engine.generate([{PROMPT}], kvgraph.SamplingParams(max_new_tokens=2))\n"
        "    session.close()\n"
        "    session.close()\n"
    )
    ranks = processes(code, two, **({"LOCAL_WORLD_SIZE": "1"} if hosts else {}))
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert texts == ["", "followed\nfollowed\n"]


def test_an_engine_ends_the_ranks_that_it_started(two: Path) -> None:
    """Not those of a session that it was given."""
    with kvgraph.Engine(two, num_pages=8) as engine:
        engine.generate(["The"], kvgraph.SamplingParams(max_new_tokens=2))
        assert not ended_by(engine.session)
    assert ended_by(engine.session)
    session = kvgraph.load(two).session()
    kvgraph.Engine(two, session=session, num_pages=8).close()
    assert not ended_by(session)
    session.close()
    session.close()
    assert ended_by(session)
    with pytest.raises(RankError, match="rank 0: expected an open session, got one that was clos"):
        session.require_ranks()


def ended_by(session: kvgraph.Session) -> bool:
    assert isinstance(session, leader.LeaderSession)
    return not session._close.alive
