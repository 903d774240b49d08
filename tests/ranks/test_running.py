"""Ranks that run: as threads of a process, and as processes that meet."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph.contract.inputs import ModelInputs
from kvgraph.errors import BindingError, RankError, RequestError, UnsupportedError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.ranks import meeting
from kvgraph.runtime.ranks.launched import Launched, launched
from kvgraph.runtime.ranks.wire import Wire, mapped, shared_file
from tests.support.command_line import wait_until_it_writes
from tests.support.ranks import ended, environment, started

PROMPT = "The import statement"
GREEDY = kvgraph.SamplingParams(max_new_tokens=24, ignore_eos=True)
PLACES = [
    pytest.param(False, id="one-machine"),
    pytest.param(True, id="told-of-several"),
]
"""Where two processes are: they meet in shared memory, or by gloo."""


@pytest.fixture(scope="module")
def two(compiled: Callable[..., Path]) -> Path:
    return compiled("tiny-llama", tp=2)


@pytest.fixture(scope="module")
def expected(compiled: Callable[..., Path]) -> str:
    with kvgraph.Engine(compiled("tiny-llama")) as engine:
        return engine.generate([PROMPT], GREEDY)[0].text


def test_threads_of_one_process(two: Path, expected: str) -> None:
    with kvgraph.Engine(two, num_pages=64) as engine:
        assert engine.generate([PROMPT], GREEDY)[0].text == expected
        assert [b.device.index for b in engine.kv.get_device_buffer().all_buffers] == [0, 1]


def test_pages_of_every_shard_come_back_from_disk(two: Path, tmp_path: Path) -> None:
    prompt = list(range(3, 103))
    texts, cached = [], []
    for _ in range(2):
        with kvgraph.Engine(two, num_pages=64, disk=tmp_path / "disk") as engine:
            done = engine.generate([prompt], GREEDY)[0]
            texts.append(done.token_ids)
            cached.append(done.cached_tokens)
    assert texts[0] == texts[1]
    assert cached == [0, 96]


def test_an_interrupt_behind_a_step_costs_no_token(
    two: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks have run it: it runs again."""
    with kvgraph.Engine(two, num_pages=64) as engine:
        own: Any = engine.session
        own = own._own
        run, steps = own._run, []

        def interrupted(arrays: Any) -> Any:
            logits = run(arrays)
            steps.append(1)
            if len(steps) == 5:
                raise KeyboardInterrupt
            return logits

        monkeypatch.setattr(own, "_run", interrupted)
        engine.submit(PROMPT, GREEDY)
        text, interrupts = "", 0
        while engine.busy:
            try:
                text += "".join(token.text for token in engine.step())
            except KeyboardInterrupt:
                interrupts += 1
        assert (text, interrupts) == (expected, 1)


def test_an_interrupt_before_a_step_ends_the_ranks(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have it: they would sum this step's parts with the next one's."""
    with kvgraph.Engine(two, num_pages=64) as engine:
        engine.submit(PROMPT, GREEDY)
        own: Any = engine.session

        def interrupted(arrays: Any, **options: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(own._own, "run_arrays", interrupted)
        monkeypatch.setattr(threading, "excepthook", lambda given: None)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(RankError, match=r"rank 0: expected it to take part .* its failure"):
            engine.step()


def test_records_of_other_devices_are_refused(two: Path) -> None:
    artifact = kvgraph.load(two)
    session = artifact.session()
    manager = PagedKVCacheManager(artifact.params(), session, 4, max_batch_size=1)
    row = TextContext("a", [3, 4, 5])
    with manager.reserve([[row]]):
        kv = manager.runtime_inputs([[row]])
        inputs = ModelInputs(row.active_tokens, np.array([0, 3], "i4"), np.array([2], "i4"))
        with pytest.raises(BindingError, match="expected records of 2 devices, got 1"):
            session.run(inputs, kv.inputs[0])
        assert session.run(inputs, kv).shape == (1, 2048)


# -- processes


@pytest.mark.parametrize("hosts", PLACES)
def test_rank_0_writes_the_text(hosts: bool, two: Path, expected: str) -> None:
    options = ("--max-new-tokens", 24, "--ignore-eos", "--num-pages", 64)
    with started("generate", two, PROMPT, *options, hosts=hosts) as ranks:
        leader, follower = (ended(process) for process in ranks)
    assert leader[:2] == (0, expected + "\n")
    assert "generated: 24 tokens" in leader[2]
    assert follower == (0, "", "")


@pytest.mark.parametrize("hosts", PLACES)
def test_a_server_of_two_ranks_drains(hosts: bool, two: Path, expected: str) -> None:
    command = ("serve", two, "--port", 0, "--num-pages", 64)
    with started(*command, hosts=hosts) as (leader, follower):
        assert leader.stderr is not None
        url = json.loads(leader.stderr.readline())["url"]
        while json.loads(leader.stderr.readline())["event"] != "ready":
            pass
        body = {"model": "tiny-llama-onnx", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        asked = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=180) as answer:
            said = json.load(answer)
        assert expected.startswith(said["choices"][0]["text"])
        leader.send_signal(signal.SIGTERM)
        assert ended(leader)[0] == 0
        assert ended(follower) == (0, "", "")


@pytest.mark.parametrize("hosts", PLACES)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_other(victim: int, hosts: bool, two: Path) -> None:
    command = ("generate", two, PROMPT, "--max-new-tokens", 2000, "--ignore-eos")
    with started(*command, hosts=hosts) as ranks:
        wait_until_it_writes(ranks[0])
        ranks[victim].kill()
        start = time.monotonic()
        code, _, said = ended(ranks[1 - victim])
    assert time.monotonic() - start < 30, "it waited for as long as for one that lags"
    assert code == 2
    assert said.splitlines()[-1] == (
        f"kvgraph: rank {victim}: expected it to take part in the step of 2 ranks, got the end of "
        "its process; start all ranks again"
    ) or said.splitlines()[-1] == (
        f"kvgraph: rank {victim}: expected it to take part, got the end of its process; start all "
        "ranks again"
    )


@pytest.mark.parametrize("hosts", PLACES)
def test_a_rank_that_lags_is_named(hosts: bool, two: Path) -> None:
    """Threads that wait for it are ended too."""
    options = ("--max-new-tokens", 2000, "--ignore-eos", "--collective-timeout", 15)
    with started("generate", two, PROMPT, *options, hosts=hosts) as ranks:
        wait_until_it_writes(ranks[0])
        os.kill(ranks[1].pid, signal.SIGSTOP)
        code, _, said = ended(ranks[0])
    assert code == 2
    assert (
        "rank 1: expected it to take part in the step of 2 ranks, got nothing from it in 15 s"
    ) in said


@pytest.mark.parametrize("hosts", PLACES)
def test_a_rank_that_does_not_come(hosts: bool, two: Path) -> None:
    seconds = 5 if hosts else 0.5  # of which rank 0 needs some to make a store
    options = ("--collective-timeout", seconds)
    with started("generate", two, PROMPT, *options, only=(0,), hosts=hosts) as (leader,):
        code, out, said = ended(leader)
    assert (code, out) == (2, "")
    assert f"kvgraph: ranks: expected 2 to join within {seconds} s, ranks [1] are missing" in said
    with started("generate", two, PROMPT, *options, only=(1,), hosts=hosts) as (follower,):
        code, out, said = ended(follower)
    assert (code, out) == (2, "")
    parts = ("it to join within ",) if not hosts else ("the run's store at ", ", got no answer in ")
    assert said.startswith(f"kvgraph: rank 0: expected {parts[0]}")
    assert f"{parts[-1]}{seconds} s" in said


def test_another_number_of_processes(two: Path, compiled: Callable[..., Path]) -> None:
    for folder, wanted in ((two, 2), (compiled("tiny-llama"), 1)):
        with started("generate", folder, PROMPT, size=3) as ranks:
            outcomes = [ended(process) for process in ranks]
        for code, out, said in outcomes:
            assert (code, out) == (2, "")
            assert f"expected {wanted} processes, one for each of its ranks, got 3" in said
            assert f"use --nproc-per-node {wanted}" in said


def test_an_engine_above_rank_0(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(1, 2, "x").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=r"rank 1: expected .*follow"):
        kvgraph.Engine(two)


def test_following_outside_of_a_run(two: Path) -> None:
    with pytest.raises(RequestError, match="follow: expected a rank above 0 of torchrun, got none"):
        kvgraph.load(two).follow()


# -- the meeting

FACTS = {"artifact": "a", "ABI version": 1}


def own_name(run: str) -> str:
    """Runs of all processes of a user meet at names of one space."""
    return f"{run} {os.getpid()}"


def met(run: str, facts: Any, *, size: int = 2, timeout: float = 10.0) -> list[Any]:
    """What each rank of a thread gets or raises; rank i has `facts[i]`."""
    found: list[Any] = [None] * len(facts)

    def meet(rank: int) -> None:
        own = Launched(rank, size, own_name(run))
        call = meeting.follow if rank else meeting.lead
        try:
            found[rank] = call(own, facts[rank], timeout)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_meet() -> None:
    (group, wires), *others = met("meet", [FACTS] * 3, size=3)
    ends = [*wires, *(wire for _, wire in others)]
    assert (group.rank, group.size, [wire.peer for wire in wires]) == (0, 3, [1, 2])
    assert [(group.rank, wire.peer) for group, wire in others] == [(1, 0), (2, 0)]
    wires[1].send({"hello": 1}, [np.arange(6, dtype=np.int32).reshape(2, 3)])
    header, (array,), file = others[1][1].receive()
    assert (header, array.tolist(), file) == ({"hello": 1}, [[0, 1, 2], [3, 4, 5]], None)
    for end in ends:
        end.close()


def test_ranks_that_differ_are_refused_on_both_sides() -> None:
    for name, value in (("artifact", "b"), ("ABI version", 2)):
        found = met(f"differ {name}", [FACTS, FACTS | {name: value}])
        for error in found:
            assert isinstance(error, RankError)
            assert f"rank 1: {name}: expected {FACTS[name]} as on rank 0, got {value}" in str(error)


def test_a_rank_that_is_there_twice() -> None:
    def again(rank: int, run: str) -> Any:
        try:
            return meeting.follow(Launched(1, 3, run), FACTS, 10.0)
        except RankError as error:
            return error

    run = own_name("twice")
    threads = [threading.Thread(target=again, args=(1, run)) for _ in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(RankError, match="expected each of 1 to 2 once, got another rank 1"):
        meeting.lead(Launched(0, 3, run), FACTS, 10.0)
    for thread in threads:
        thread.join()


def test_two_runs_of_one_name() -> None:
    own = Launched(0, 2, own_name("same"))
    listener = meeting._listener(own)
    with listener, pytest.raises(RankError, match="expected to be the only one of its run"):
        meeting.lead(own, FACTS, 0.1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected 0 to 1 of WORLD_SIZE 2, got 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: expected 1 or more from torchrun, got 0"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: expected a number from torchrun, got 'x'"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "5"},
            "LOCAL_WORLD_SIZE: expected 1 to 4 of WORLD_SIZE 4, got 5",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "MASTER_ADDR: expected torchrun to set it for ranks on several machines, got none",
        ),
    ],
)
def test_environments_that_contradict_themselves(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(RankError, match=sentence):
        launched(given)


def test_environments_of_one_process() -> None:
    assert launched({}) is None
    assert launched({"RANK": "0", "WORLD_SIZE": "1"}) is None
    own = launched(environment(1, 2, "run"))
    assert own == Launched(1, 2, "run/127.0.0.1/29500/")
    assert own.is_on_one_machine
    own = launched(environment(1, 2, "run", LOCAL_WORLD_SIZE="1"))
    assert own == Launched(1, 2, "run/127.0.0.1/29500/", 1, "127.0.0.1", 29500)
    assert not own.is_on_one_machine


# -- messages


@pytest.fixture
def pair() -> Iterator[tuple[Wire, Wire]]:
    near, far = socket.socketpair()
    with near, far:
        yield Wire(near, 0), Wire(far, 1)


def test_memory_that_both_sides_map(pair: tuple[Wire, Wire]) -> None:
    near, far = pair
    file = shared_file(24)
    near.send({"allocate": "kv"}, file=file)
    mine = mapped(file, (2, 3), "float32")
    os.close(file)
    _, _, got = far.receive()
    assert got is not None
    theirs = mapped(got, (2, 3), "float32")
    os.close(got)
    mine[1, 2] = 7
    assert theirs[1, 2] == 7
    assert not theirs[0].any()


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(sys, "platform", "darwin")
    calls: list[Callable[[], object]] = [
        lambda: shared_file(1),
        lambda: meeting.lead(Launched(0, 2, "x"), FACTS, 1.0),
        lambda: meeting.follow(Launched(1, 2, "x"), FACTS, 1.0),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match=r"ranks: expected Linux.* got darwin"):
            call()


def test_a_connection_that_ends(pair: tuple[Wire, Wire]) -> None:
    near, far = pair
    far.close()
    for call in (near.receive, lambda: near.send({}, [np.zeros(1 << 20, "f4")])):
        with pytest.raises(RankError, match=r"rank 0: .* got the end of its process"):
            call()


def test_bytes_that_are_no_message() -> None:
    near, far = socket.socketpair()
    near.sendall(b"\xff\xff\xff\xff")
    with (
        near,
        far,
        pytest.raises(RankError, match="rank 0: expected a message of kvgraph, got other"),
    ):
        Wire(far, 0).receive()


def test_json_of_the_completion_stays_on_stdout(two: Path) -> None:
    with started("generate", two, PROMPT, "--json", "--max-new-tokens", 4) as ranks:
        (code, out, _), _ = (ended(process) for process in ranks)
    assert code == 0
    assert len(json.loads(out)["token_ids"]) == 4
