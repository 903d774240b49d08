"""Connects the processes of one machine through rank 0, and compares what they run.

They meet at an address in Linux's abstract namespace, which is no file. Any local user can connect
there, so both sides get the peer's user from the kernel.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256

from kvgraph.errors import RankError
from kvgraph.ops.group import Group, is_readable, shared_bytes
from kvgraph.runtime.ranks.connections import RETRY_SECONDS
from kvgraph.runtime.ranks.launched import Launched
from kvgraph.runtime.ranks.wire import Wire, mapped, require_linux, shared_file
from kvgraph.signal_handlers import reraise_if_signalled

HELLO_SECONDS = 2.0
"""Time in which a connected process must send its rank."""
PARTING_SECONDS = 2.0
"""Time in which a process that has failed ends."""
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Facts = Mapping[str, object]
"""Values that must be equal on all ranks, by name; JSON."""


def lead(own: Launched, facts: Facts, timeout: float) -> tuple[Group, list[Wire]]:
    """Wait for all other ranks. Return the group, and a connection to each, in rank order.

    RankError if a rank does not come in `timeout` seconds, or differs in `facts`; all connected
    ranks receive the error.
    """
    require_linux()
    wires: list[Wire] = []
    try:
        pids = _welcome(own, facts, timeout, wires)
        wires.sort(key=lambda wire: wire.peer)
        file = shared_file(shared_bytes(own.size))
        try:
            for wire in wires:
                wire.send({"pids": pids}, file=file)
            return _group(file, own, pids, timeout), wires
        finally:
            os.close(file)
    except BaseException as error:
        for wire in wires:
            with suppress(RankError):  # a rank that has ended needs no answer
                wire.send({"refused": str(error)})
            wire.close()
        raise


def _welcome(own: Launched, facts: Facts, timeout: float, wires: list[Wire]) -> list[int]:
    """Accept all other ranks and append their connections to `wires`. Return pids in rank order."""
    deadline = time.monotonic() + timeout
    pids = {own.rank: os.getpid()}
    with _listener(own) as listener:
        while len(pids) < own.size:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                reraise_if_signalled(error)
                missing = [rank for rank in range(own.size) if rank not in pids]
                raise own.missing(missing, timeout) from error
            pid, uid = _credentials(connection)
            left = max(deadline - time.monotonic(), 0.001)
            hello = _hello(connection, min(left, HELLO_SECONDS)) if uid == os.getuid() else None
            if hello is None:
                connection.close()
                continue
            rank, theirs = hello
            wires.append(Wire(connection, rank))
            wires[-1].limit(timeout)
            if rank in pids or not 1 <= rank < own.size:
                raise RankError(
                    f"ranks: expected each of 1 to {own.size - 1} once, got another rank {rank}"
                )
            require_equal(rank, facts, theirs)
            pids[rank] = pid
    return [pids[rank] for rank in range(own.size)]


def _hello(connection: socket.socket, seconds: float) -> tuple[int, Facts] | None:
    """Rank and facts of the peer; None if it is not a rank: any process may connect."""
    wire = Wire(connection, -1)
    wire.limit(seconds)
    try:
        said, _, file = wire.receive()
    except RankError:
        return None
    if file is not None:
        os.close(file)
    rank, facts = said.get("rank"), said.get("facts")
    return (rank, facts) if isinstance(rank, int) and isinstance(facts, dict) else None


def follow(own: Launched, facts: Facts, timeout: float) -> tuple[Group, Wire]:
    """Meet rank 0. Return the group, and the connection to rank 0. RankError as in `lead`."""
    require_linux()
    connection = _connected(own, timeout)
    wire = Wire(connection, 0)
    try:
        wire.limit(timeout)
        try:
            wire.send({"rank": own.rank, "facts": dict(facts)})
            said, _, file = wire.receive()
        except RankError as error:
            if is_readable(connection.fileno()) and _runs_on(_credentials(connection)[0]):
                raise RankError(
                    f"rank {own.rank}: expected to be the only one of its run, got a run that has "
                    f"all ranks; end this process or the other one with RANK={own.rank}, and "
                    "start each rank once"
                ) from error
            raise
        if "refused" in said:
            raise RankError(said["refused"])
        assert file is not None
        wire.limit(None)
        try:
            group = _group(file, own, said["pids"], timeout)
        finally:
            os.close(file)
        wire.watch(group.exit(0))
        return group, wire
    except BaseException:
        wire.close()
        raise


def _runs_on(pid: int) -> bool:
    """Whether a process goes on for PARTING_SECONDS: it does not end because it has failed."""
    try:
        exit = os.pidfd_open(pid)
    except OSError as error:
        reraise_if_signalled(error)
        return False
    ready = select.poll()
    ready.register(exit, select.POLLIN)
    try:
        return not ready.poll(PARTING_SECONDS * 1000)
    finally:
        os.close(exit)


def _group(file: int, own: Launched, pids: Sequence[int], timeout: float) -> Group:
    memory = mapped(file, (shared_bytes(own.size),), "uint8")
    exits = [-1 if pid == os.getpid() else os.pidfd_open(pid) for pid in pids]
    return Group(memory, own.rank, own.size, exits, timeout)


def require_equal(rank: int, facts: Facts, theirs: Facts) -> None:
    """Raise RankError if `theirs`, of `rank`, differ from `facts`, of rank 0."""
    for name, mine in facts.items():
        if theirs.get(name) != mine:
            raise RankError(
                f"rank {rank}: {name}: expected {mine} as on rank 0, got {theirs.get(name)}"
            )


def _address(own: Launched) -> str:
    name = sha256(f"{os.getuid()}/{own.run}".encode()).hexdigest()[:32]
    return f"\0kvgraph-{name}"


def _listener(own: Launched) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(own))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise RankError(
                "rank 0: expected to be the only one of its run, got another one that waits: two "
                "runs have one rendezvous id and port; start them with torchrun --standalone"
            ) from error
        raise
    listener.listen(own.size)
    return listener


def _connected(own: Launched, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(_address(own))
            break
        except OSError as error:
            connection.close()
            reraise_if_signalled(error)
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank 0: expected it to join within {timeout:g} s, got no answer"
                ) from error
            time.sleep(RETRY_SECONDS)
    if _credentials(connection)[1] != os.getuid():
        connection.close()
        raise RankError("rank 0: expected a process of this user, got another user's")
    return connection


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the peer, from the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(data)
    return pid, uid
