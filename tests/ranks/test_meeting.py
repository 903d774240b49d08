"""What ranks do before their first step: they meet, hash their files, and open them."""

from __future__ import annotations

import errno
import os
import select
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.errors import ArtifactError, RankError
from kvgraph.runtime import artifact as artifacts
from kvgraph.runtime.ranks import meeting, sessions
from kvgraph.runtime.ranks.launched import Launched
from kvgraph.runtime.ranks.wire import shared_file
from tests.support.ranks import ended, environment, started

FACTS = {"artifact": "a"}


@pytest.fixture
def two(compiled: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled("tiny-llama", tp=2), tmp_path / "model.kvg"))


def be_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(rank, 2, "meeting").items():
        monkeypatch.setenv(name, value)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_rank_that_is_started_again_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has all its ranks, and runs on."""
    monkeypatch.setattr(meeting, "PARTING_SECONDS", 0.1)
    run = f"again {os.getpid()}"
    with meeting._listener(Launched(0, 2, run)) as listener, ThreadPoolExecutor() as pool:
        surplus = pool.submit(meeting.follow, Launched(1, 2, run), FACTS, 60.0)
        select.select([listener], [], [])
        listener.close()
        with pytest.raises(RankError, match="rank 1: expected to be the only one of its run, got"):
            surplus.result()


def test_memory_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    sentence = "rank 0: expected 24 bytes of memory to share with other ranks, got 'File too large'"
    with pytest.raises(RankError, match=sentence):
        shared_file(24)


def memory_files() -> set[str]:
    """Descriptors of shared memory that this process has open."""
    names = os.listdir("/proc/self/fd")
    return {n for n in names if "memfd:kvgraph" in os.path.realpath(f"/proc/self/fd/{n}")}


@pytest.mark.parametrize("name", ["Wire.send", "mapped"])
def test_ranks_that_fail_to_meet_leave_no_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = meeting.Wire.send

    def fail(*given: Any, **more: Any) -> Any:
        if name == "mapped" or "file" in more:
            raise RankError("memory: expected it, got none")
        return send(*given, **more)

    monkeypatch.setattr(f"kvgraph.runtime.ranks.meeting.{name}", fail)
    run, before = f"memory {os.getpid()}", memory_files()
    with ThreadPoolExecutor() as pool:
        ranks = [
            pool.submit(meet, Launched(rank, 2, run), FACTS, 60.0)
            for rank, meet in enumerate((meeting.lead, meeting.follow))
        ]
        for rank in ranks:
            assert isinstance(rank.exception(), RankError)
    assert memory_files() == before


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_hash_after_they_have_met(
    rank: int, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that hashes for long is not missing."""
    be_rank(rank, monkeypatch)
    happened: list[str] = []

    class Group:
        def close(self) -> None:
            happened.append("closed")

    class Wire:
        def limit(self, seconds: float) -> None:
            pass

        def close(self) -> None:
            pass

    def meet(*_: Any) -> Any:
        happened.append("met")
        return Group(), Wire() if rank else [Wire()]

    def hash_files(*_: Any, **given: Any) -> None:
        happened.append(f"hashed files of rank {given['rank']}")
        raise ArtifactError("damaged")

    monkeypatch.setattr(meeting, "follow" if rank else "lead", meet)
    monkeypatch.setattr(artifacts, "require_intact", hash_files)
    artifact = kvgraph.load(two)
    with pytest.raises(ArtifactError, match="damaged"):
        artifact.follow() if rank else artifact.session()
    assert happened == ["met", f"hashed files of rank {rank}", "closed"]


def test_a_rank_ignores_signals_once_it_has_opened_its_part(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, rank 0 would wait for it and it would not end."""
    be_rank(1, monkeypatch)
    happened: list[str] = []

    class Follower:
        def __init__(self, *_: Any) -> None:
            pass

        def serve(self) -> None:
            happened.append("serves")

    monkeypatch.setattr(sessions, "Follower", Follower)
    monkeypatch.setattr(meeting, "follow", lambda *_: (None, None))
    sessions.follow(
        kvgraph.load(two),
        lambda artifact, threads: happened.append("opened"),  # type: ignore[arg-type, return-value]
        None,
        None,
        lambda own: happened.append("joined"),
    )
    assert happened == ["opened", "joined", "serves"]


@pytest.mark.parametrize(
    ("name", "who"),
    [("weights.safetensors", 0), ("rank1/weights.safetensors", 1), ("model.onnx", None)],
)
def test_a_rank_hashes_its_own_files_and_shared_ones(
    name: str, who: int | None, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(two / name)
    for rank in range(2):
        be_rank(rank, monkeypatch)
        artifact = kvgraph.load(two)
        if who in (rank, None):
            with pytest.raises(ArtifactError, match=f"{name}: .* the file was changed"):
                artifact.checked()
        else:
            artifact.checked()


def test_threads_hash_the_files_of_all_ranks(two: Path) -> None:
    damage(two / "rank1" / "weights.safetensors")
    with pytest.raises(ArtifactError, match=r"rank1/weights.safetensors: .* the file was changed"):
        kvgraph.load(two)


@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("damaged", [0, 1])
def test_ranks_of_a_damaged_artifact(damaged: int, hosts: bool, two: Path) -> None:
    name = "rank1/weights.safetensors" if damaged else "weights.safetensors"
    damage(two / name)
    with started("serve", two, "--port", 0, hosts=hosts) as ranks:
        found = [ended(rank) for rank in ranks]
    assert [code for code, _, _ in found] == [2, 2]
    assert f"{name}: chunk 0: expected SHA-256" in found[damaged][2]
    assert (
        f"kvgraph: rank {damaged}: expected it to take part, got the end" in found[1 - damaged][2]
    )
