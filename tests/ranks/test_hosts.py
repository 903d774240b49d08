"""Ranks of several machines: how they meet, and what they tell each other."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph.errors import MissingDependencyError, RankError, UnsupportedError
from kvgraph.runtime.ranks import connections, hosts
from kvgraph.runtime.ranks.launched import Launched, launched
from kvgraph.runtime.ranks.sessions import open_leader
from kvgraph.runtime.ranks.wire import Wire
from tests.ranks.test_collectives import together
from tests.ranks.test_gathered import reduced
from tests.support.ports import free_port
from tests.support.ranks import ended, environment, started

FACTS = {"artifact": "a", "ABI version": 1}
PROMPT = "The import statement"
HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def two(compiled: Callable[..., Path]) -> Path:
    return compiled("tiny-llama", tp=2)


# -- the meeting


def met(
    facts: Sequence[Any], *, timeout: float = 20.0, size: int | None = None, store: int = 0
) -> list[Any]:
    """What each rank of a thread gets or raises; rank i has `facts[i]`, None does not come.

    `store`: the port of torchrun's agent, which has the store.
    """
    count, port = size or len(facts), store or free_port()
    found: list[Any] = [None] * len(facts)

    def meet(rank: int) -> None:
        own = Launched(rank, count, f"run {port}", 1, HERE, port, bool(store))
        try:
            found[rank] = (hosts.follow if rank else hosts.lead)(own, facts[rank], timeout)
        except Exception as error:
            found[rank] = error

    ranks = [rank for rank, own in enumerate(facts) if own is not None]
    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_meet() -> None:
    (group, wires), *others = met([FACTS] * 3)
    assert (group.rank, group.size, [wire.peer for wire in wires]) == (0, 3, [1, 2])
    assert [(own.rank, wire.peer) for own, wire in others] == [(1, 0), (2, 0)]
    wires[1].send({"hello": 1}, [np.arange(6, dtype=np.int32).reshape(2, 3)])
    header, (array,), file = others[1][1].receive()
    assert (header, array.tolist(), file) == ({"hello": 1}, [[0, 1, 2], [3, 4, 5]], None)
    own = [group, *(each for each, _ in others)]
    assert [each.tolist() for each in together(own, lambda rank: reduced(rank, 3))] == [
        [[3] * 4]
    ] * 3
    for each in own:
        each.close()
    for end in (*wires, *(wire for _, wire in others)):
        end.close()


def test_ranks_meet_again() -> None:
    """The store of torchrun's agent still says where they were before."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, its docs say

    agent = TCPStore(HERE, 0, is_master=True)
    for _ in range(2):
        (group, (near,)), (other, far) = met([FACTS, FACTS], store=agent.port)
        near.send({"hello": 1})
        assert far.receive()[0] == {"hello": 1}
        for end in (near, far, group, other):
            end.close()


def test_ranks_that_differ_are_refused_on_all_sides() -> None:
    for name, value in (("artifact", "b"), ("ABI version", 2)):
        for error in met([FACTS, FACTS, FACTS | {name: value}]):
            assert isinstance(error, RankError)
            assert f"rank 2: {name}: expected {FACTS[name]} as on rank 0, got {value}" in str(error)


def test_ranks_that_do_not_come_are_named() -> None:
    found = met([FACTS, None, FACTS], size=4, timeout=5.0)
    for error in (found[0], found[2]):
        assert isinstance(error, RankError)
    assert "ranks: expected 4 to join within 5 s, ranks [1, 3] are missing" in str(found[0])


def test_others_at_the_port_are_not_taken_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, one of another run; the ranks meet all the same."""
    listener = hosts.listen
    strangers = []

    def with_strangers(host: str, size: int) -> socket.socket:
        made = listener(host, size)
        silent, wrong = (socket.create_connection(made.getsockname()) for _ in range(2))
        silent.shutdown(socket.SHUT_WR)
        wrong.sendall(connections.HELLO.pack(b"0" * 32, 1, connections.LIFE))
        strangers.extend((silent, wrong))
        return made

    monkeypatch.setattr(hosts, "listen", with_strangers)
    for group, ends in met([FACTS, FACTS]):
        group.close()
        for end in ends if isinstance(ends, list) else [ends]:
            end.close()
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_ends_while_the_others_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo would wait for it until its own deadline."""
    join = hosts._joined

    def join_or_end(own: Launched, store: Any, host: str, lifelines: Any, timeout: float) -> Any:
        if own.rank == 1:
            raise RankError("it ends")
        return join(own, store, host, lifelines, timeout)

    monkeypatch.setattr(hosts, "_joined", join_or_end)
    start = time.monotonic()
    error, _ = met([FACTS, FACTS], timeout=60.0)
    assert time.monotonic() - start < 30
    assert str(error).startswith("rank 1: expected it to take part, got the end of its process")


def test_a_rank_that_does_not_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    call = connections._call

    def say_nothing(rank: int, address: Any, hello: bytes, end: float) -> Any:
        return call(rank, address, b"", end)

    monkeypatch.setattr(connections, "_call", say_nothing)
    error, _ = met([FACTS, FACTS], timeout=5.0)
    assert str(error) == "rank 1: expected a connection from it in 5 s, got none"
    own = Launched(1, 2, "run", 1, HERE, 1)
    monkeypatch.undo()
    with socket.socket() as listener, pytest.raises(RankError, match="rank 0: expected it to take"):
        connections.connect(own, listener, [(HERE, free_port())] * 2, "", 1.0)


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        port = taken.getsockname()[1]
        own = Launched(0, 2, "run", 1, HERE, port)
        with pytest.raises(RankError, match="rank 0: expected a free port for the run's store at"):
            hosts.lead(own, FACTS, 1.0)


def test_an_address_of_another_machine() -> None:
    """No thread is left that waits in C++: it would abort the process at its end."""
    before = set(threading.enumerate())
    own = Launched(0, 2, "run", 1, "192.0.2.1", free_port())
    with pytest.raises(RankError, match=r"got no answer in 0.5 s .*; set MASTER_ADDR to an"):
        hosts.lead(own, FACTS, 0.5)
    assert set(threading.enumerate()) <= before


def test_a_command_does_not_wait_for_a_meeting_that_was_given_up() -> None:
    """At the interpreter's end its thread could return from C++, which aborts the process."""
    code = (
        "import atexit, sys, threading, types\n"
        "import kvgraph\n"
        "from kvgraph import __main__\n"
        "from kvgraph.runtime.ranks import hosts\n"
        "def main():\n"
        "    atexit.register(print, 'the interpreter ends')\n"
        "    try:\n"
        "        hosts._in_thread(threading.Event().wait, lambda: 1 / 0)\n"
        "    except ZeroDivisionError:\n"
        "        print('given up')\n"
        "        sys.exit(2)\n"
        "kvgraph.cli = sys.modules['kvgraph.cli'] = types.SimpleNamespace(main=main)\n"
        "__main__.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "given up\n", "")


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_ports_that_are_none(port: str) -> None:
    given = environment(0, 2, "x", LOCAL_WORLD_SIZE="1") | {"MASTER_PORT": port}
    with pytest.raises(RankError, match=f"MASTER_PORT: expected 1 to 65535 .* got {port}"):
        launched(given)


def test_where_a_rank_is() -> None:
    """torchrun numbers ranks from those of rank 0's machine on."""
    given = environment(1, 4, "x", LOCAL_WORLD_SIZE="2")
    for local, is_beside in ((None, False), ("0", False), ("1", True)):
        own = launched(given if local is None else given | {"LOCAL_RANK": local})
        assert own is not None
        assert own.is_beside_rank_0 == is_beside


@pytest.mark.parametrize("rank", [0, 1])
def test_a_service_that_says_nothing_at_the_port(rank: int) -> None:
    with socket.socket() as silent:
        silent.bind((HERE, 0))
        silent.listen()
        own = Launched(rank, 2, "run", 1, HERE, silent.getsockname()[1], rank == 0)
        sentence = "rank 0: expected the run's store at .* got no answer in 0.5 s; set MASTER_ADDR"
        with pytest.raises(RankError, match=sentence):
            (hosts.follow if rank else hosts.lead)(own, FACTS, 0.5)


def test_addresses_that_others_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    present = [hosts._Present(host, 1, FACTS, "") for host in ("127.0.1.1", "10.0.0.2")]
    sentence = "rank 0: expected an address that other machines reach, got 127.0.1.1; set GLOO_S"
    with pytest.raises(RankError, match=sentence):
        hosts._require_alike(present)
    own = Launched(1, 2, "run", 1, HERE, 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert connections.own_host(own) == HERE
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RankError, match="rank 1: expected interface 'none0', got"):
        connections.own_host(own)


def test_torch_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", None)
    own = Launched(0, 2, "run", 1, HERE, 1)
    sentence = "needed for ranks on several machines, whose collectives are gloo's, not installed; "
    with pytest.raises(MissingDependencyError, match=sentence):
        hosts.lead(own, FACTS, 1.0)


def test_a_machine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends by the system's deadline, which is no deadline of a message."""

    def silent(*_: Any) -> Any:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(socket, "recv_fds", silent)
    near, far = socket.socketpair()
    with near, far, pytest.raises(RankError, match=r"rank 3: .*got the end of its process"):
        Wire(near, 3).receive()


# -- artifacts


def test_gpus_of_several_machines_are_refused(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(0, 2, "x", LOCAL_WORLD_SIZE="1").items():
        monkeypatch.setenv(name, value)
    artifact = kvgraph.load(two)
    cuda = replace(artifact, manifest=replace(artifact.manifest, target="cuda:sm_90"))
    sentence = "all 2 ranks of a CUDA artifact on one machine, got 1 on this one"
    with pytest.raises(UnsupportedError, match=sentence):
        open_leader(cuda, lambda artifact, threads: pytest.fail("opened"), None, 1.0)


def test_tiers_are_refused(two: Path, tmp_path: Path) -> None:
    """Rank 0 does not reach the pools of other machines. The prefix cache needs none of that."""
    with started("generate", two, PROMPT, "--disk", tmp_path / "d", hosts=True) as ranks:
        (code, out, said), (_, _, other) = (ended(process) for process in ranks)
    assert (code, out) == (2, "")
    assert said.splitlines()[-1] == (
        "kvgraph: tiers: expected none for 2 ranks on GPUs or several machines, where rank 0 does "
        "not reach all pools, got some"
    )
    assert "Traceback" not in other


@pytest.mark.slow
@pytest.mark.parametrize(("model", "backend"), [("tiny-llama", "torch"), ("gpt_oss", "onnx")])
def test_other_artifacts(model: str, backend: str, compiled: Callable[..., Path]) -> None:
    """Collectives that torch's dispatcher calls; experts by expert, and two pools."""
    folder, prompt = compiled(model, backend, tp=2), [5, 9, 33, 120, 7]
    greedy = kvgraph.SamplingParams(max_new_tokens=24, ignore_eos=True)
    with kvgraph.Engine(folder, num_pages=16) as engine:
        expected = engine.generate([prompt], greedy)[0].token_ids
    code = (
        "import os, sys, kvgraph\n"
        "artifact = kvgraph.load(sys.argv[1])\n"
        "if os.environ['RANK'] != '0':\n"
        "    artifact.follow()\n"
        "    sys.exit()\n"
        "greedy = kvgraph.SamplingParams(max_new_tokens=24, ignore_eos=True)\n"
        "with kvgraph.Engine(artifact, num_pages=16) as engine:\n"
        f"    print(engine.generate([{prompt}], greedy)[0].token_ids)\n"
    )
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            env=os.environ | environment(rank, 2, "other", port, LOCAL_WORLD_SIZE="1"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert texts == [f"{expected}\n", ""]


@pytest.mark.slow
def test_four_ranks_on_two_machines(compiled: Callable[..., Path]) -> None:
    """As torchrun starts them: an agent on each, which has the store."""
    torchrun = Path(sys.executable).with_name("torchrun")
    folder, port = compiled("tiny-llama", tp=4), free_port()
    command = [torchrun, "--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{HERE}:{port}", "--rdzv-id", port, "-m", "kvgraph"]
    command += ["generate", folder, PROMPT, "--max-new-tokens", 8, "--num-pages", 64]
    agents = [
        subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    texts = {agent.communicate(timeout=300)[0] for agent in agents}
    assert [agent.returncode for agent in agents] == [0, 0]
    with kvgraph.Engine(folder, num_pages=64) as engine:
        greedy = kvgraph.SamplingParams(max_new_tokens=8)
        assert texts == {"", engine.generate([PROMPT], greedy)[0].text + "\n"}


# -- namespaces: two machines, as far as their networks go


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    names = [f"kvgraph-{os.getpid()}-{i}" for i in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    if not shutil.which("ip") or os.getuid():
        pytest.skip("makes network namespaces: needs ip, and root")
    try:
        for name in names:
            ip("netns", "add", name)
        links = [f"kv{os.getpid() % 100000}{end}" for end in "ab"]
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(f"makes network namespaces: {error.stderr.decode().strip()}")
    yield names
    _remove(names)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_ranks_in_two_network_namespaces(two: Path, namespaces: list[str]) -> None:
    options = ["--max-new-tokens", "8", "--num-pages", "64"]
    command = [sys.executable, "-m", "kvgraph", "generate", str(two), PROMPT, *options]
    given = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command],
            env=os.environ | environment(rank, 2, "namespaces", **given),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(namespaces)
    ]
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    with kvgraph.Engine(two, num_pages=64) as engine:
        greedy = kvgraph.SamplingParams(max_new_tokens=8)
        assert texts == [engine.generate([PROMPT], greedy)[0].text + "\n", ""]
