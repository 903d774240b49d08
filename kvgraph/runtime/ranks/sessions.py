"""Opens sessions of a tensor-parallel artifact: this process's rank, or all ranks as threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace

from kvgraph.contract.devices import Target
from kvgraph.contract.host_memory import host_zeros
from kvgraph.contract.plain import to_json, to_plain
from kvgraph.contract.threads import start_all
from kvgraph.contract.values import require_number
from kvgraph.errors import RankError, RequestError, UnsupportedError
from kvgraph.ops.group import Group, shared_bytes
from kvgraph.ops.specs import ABI_VERSION
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.machine import default_threads
from kvgraph.runtime.ranks import hosts, meeting
from kvgraph.runtime.ranks.follower import Follower
from kvgraph.runtime.ranks.launched import Launched, launched
from kvgraph.runtime.ranks.leader import LeaderSession, end_ranks
from kvgraph.runtime.ranks.wire import Wire
from kvgraph.runtime.sessions.base import Session

COLLECTIVE_TIMEOUT = 60.0
"""Default time for which a rank waits for another one."""

MOST_TIMEOUT = 86_400.0

OPENING_SECONDS = 600.0
"""Time in which a rank must hash its files and open its part of the weights."""

Make = Callable[[ArtifactFolder, int], Session]
"""`make(artifact, num_threads)` opens the session of one rank."""


def open_leader(
    artifact: ArtifactFolder, make: Make, num_threads: int | None, timeout: float | None
) -> Session:
    """Open the session of all ranks: processes under torchrun, else threads of this process."""
    own = launched()
    seconds = _seconds(timeout)
    if own is None and Target.parse(artifact.manifest.target).kind != "cpu":
        raise RankError(
            f"{artifact.folder}: expected {artifact.ranks} processes, a GPU for each, got one; "
            f"start it with torchrun --standalone --nproc-per-node {artifact.ranks}"
        )
    if own is None:
        return _in_threads(artifact, make, num_threads, seconds)
    _require_size(artifact, own)
    if own.rank:
        raise RequestError(
            f"rank {own.rank}: expected kvgraph worker, or kvgraph.load(...).follow(), on ranks "
            "above 0, got an engine"
        )
    _require_one_machine_of_gpus(artifact, own)
    where = meeting if own.is_on_one_machine else hosts
    group, wires = where.lead(own, _facts(artifact), seconds)
    for wire in wires:
        wire.limit(OPENING_SECONDS)
    try:
        session = make(artifact, _threads(artifact, num_threads, own.here))
        return LeaderSession(session, group, wires, maps_pools=own.is_on_one_machine)
    except BaseException:  # the others learn of it by the end of their connections
        group.close()
        for wire in wires:
            wire.close()
        raise


def follow(
    artifact: ArtifactFolder,
    make: Make,
    num_threads: int | None,
    timeout: float | None,
    joined: Callable[[Launched], None] = lambda own: None,
) -> None:
    """Run this process's rank until the leader is done; RankError if the leader is lost.

    `joined`: called once this rank has met the others and opened its session.
    """
    own = launched()
    if own is None or own.rank == 0:
        raise RequestError(
            "follow: expected a rank above 0 of torchrun, got "
            f"{'none' if own is None else 'rank 0, which runs an engine'}"
        )
    _require_size(artifact, own)
    seconds = _seconds(timeout)
    _require_one_machine_of_gpus(artifact, own)
    where = meeting if own.is_on_one_machine else hosts
    group, wire = where.follow(own, _facts(artifact), seconds)
    try:
        part = replace(artifact, rank=own.rank)
        session = make(part, _threads(artifact, num_threads, own.here))
        joined(own)
    except BaseException:
        group.close()
        wire.close()
        raise
    Follower(session, group, wire).serve()


def _seconds(timeout: float | None) -> float:
    """`timeout`, or COLLECTIVE_TIMEOUT if None; RankError if it is out of range."""
    if timeout is None:
        return COLLECTIVE_TIMEOUT
    seconds = require_number("collective_timeout", timeout, RankError)
    if not 0 < seconds <= MOST_TIMEOUT:
        raise RankError(
            f"collective_timeout: expected more than 0 s, and {MOST_TIMEOUT:g} s at most, got "
            f"{seconds:g}"
        )
    return seconds


def _in_threads(
    artifact: ArtifactFolder, make: Make, num_threads: int | None, timeout: float
) -> LeaderSession:
    size, threads = artifact.ranks, _threads(artifact, num_threads)
    memory = host_zeros("collectives", (shared_bytes(size),), "uint8")
    groups = [Group(memory, rank, size, [-1] * size, timeout) for rank in range(size)]
    wires: list[Wire] = []
    ends: list[socket.socket] = []
    serving: list[threading.Thread] = []

    def ended() -> None:
        for thread in serving:
            if thread.ident is not None:
                thread.join(timeout)

    try:
        for rank in range(1, size):
            near, far = socket.socketpair()
            wires.append(Wire(near, rank))
            ends.append(far)
            session = make(replace(artifact, rank=rank), threads)
            follower = Follower(session, groups[rank], Wire(far, 0))
            serving.append(threading.Thread(target=_serve, args=(follower, far), daemon=True))
        session = make(artifact, threads)
        start_all(serving)
        return LeaderSession(session, groups[0], wires, ended)
    except BaseException:
        running = [thread for thread in serving if thread.ident is not None]
        for far in ends[len(running) :]:  # the others are closed by their threads
            far.close()
        end_ranks(wires, groups[0], ended)
        raise


def _serve(follower: Follower, connection: socket.socket) -> None:
    """Run a follower in a thread. Its error goes to stderr, and to the leader by the group."""
    with connection:
        follower.serve()


def _threads(artifact: ArtifactFolder, num_threads: int | None, here: int | None = None) -> int:
    """Threads of a rank: its share of this machine's cores. `here`: ranks here; None: all."""
    return num_threads or max(1, default_threads() // (here or artifact.ranks))


def _require_one_machine_of_gpus(artifact: ArtifactFolder, own: Launched) -> None:
    if own.here is not None and Target.parse(artifact.manifest.target).kind != "cpu":
        raise UnsupportedError(
            f"{artifact.folder}: expected all {own.size} ranks of a CUDA artifact on one machine, "
            f"got {own.here} on this one"
        )


def _require_size(artifact: ArtifactFolder, own: Launched) -> None:
    if own.size != artifact.ranks:
        raise RankError(
            f"{artifact.folder}: expected {artifact.ranks} ranks, which it was compiled for, got "
            f"{own.size} from torchrun; use --nproc-per-node {artifact.ranks}"
        )


def _facts(artifact: ArtifactFolder) -> meeting.Facts:
    """Values that decide the bits of a step's results; they must be equal on all ranks."""
    from hashlib import sha256

    from kvgraph.ops import native

    manifest = sha256(to_json(to_plain(artifact.manifest))).hexdigest()
    return {
        "artifact": manifest[:16],
        "ABI version": ABI_VERSION,
        "instruction set": native.isa(),
    }
