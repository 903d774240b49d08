"""Connects ranks of several machines through torch.distributed's store, at torchrun's address.

Each rank publishes there its address, the facts of its artifact, and a secret of the run. Every
pair of ranks then opens a lifeline: a connection without messages, which closes only if a rank
ends. The leader has a second connection to each follower, for the messages of steps.

The store, these connections and gloo trust their network.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from kvgraph.contract.host_memory import host_zeros
from kvgraph.contract.loading import require_package
from kvgraph.contract.threads import threads_needed
from kvgraph.errors import RankError
from kvgraph.ops.group import Gather, Group, shared_bytes
from kvgraph.runtime.native_calls import native_call
from kvgraph.runtime.ranks.connections import (
    RETRY_SECONDS,
    STORE_HINT,
    Connections,
    close_all,
    connect,
    listen,
    listen_for_store,
    own_host,
    require_all,
    wait_for_port,
)
from kvgraph.runtime.ranks.launched import Launched
from kvgraph.runtime.ranks.meeting import Facts, require_equal
from kvgraph.runtime.ranks.wire import Wire, require_linux
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Made = TypeVar("Made")

MEETING = "kvgraph-meeting"
"""Name of the threads of `_in_thread`."""

PARTING_SECONDS = 2.0
"""Time that rank 0 stays after a refusal, so that others can read it: it may host the store."""


@dataclass(frozen=True)
class _Present:
    """The data that a rank publishes in the store."""

    host: str
    port: int
    facts: Facts
    secret: str


def lead(own: Launched, facts: Facts, timeout: float) -> tuple[Group, list[Wire]]:
    """Meet all other ranks. Return the group, and a connection to each, in the order of the ranks.

    RankError if a rank does not come in `timeout` seconds, or differs in `facts`.
    MissingDependencyError without torch.
    """
    return _meet(own, facts, timeout)


def follow(own: Launched, facts: Facts, timeout: float) -> tuple[Group, Wire]:
    """Meet all other ranks. Return the group and the connection to rank 0. Errors as in `lead`."""
    group, (wire,) = _meet(own, facts, timeout)
    wire.limit(None)
    return group, wire


def _meet(own: Launched, facts: Facts, timeout: float) -> tuple[Group, list[Wire]]:
    require_linux()
    require_package(
        "torch.distributed.distributed_c10d",
        "needed for ranks on several machines, whose collectives are gloo's",
        "pip install 'kvgraph[torch]'",
    )
    from torch.distributed.distributed_c10d import PrefixStore

    store = _store(own, timeout)
    host = own_host(own)
    with listen(host, own.size) as listener:
        port = listener.getsockname()[1]
        mine = _Present(host, port, facts, secrets.token_hex(16))
        present = _introduce(own, mine, PrefixStore("kvgraph", store), timeout)
        addresses = [(each.host, each.port) for each in present]
        lifelines, steps = connect(own, listener, addresses, present[0].secret, timeout)
    try:
        gather = _joined(own, PrefixStore("kvgraph-gloo", store), host, lifelines, timeout)
    except RankError:
        close_all(lifelines)
        close_all(steps)
        raise
    memory = host_zeros("collectives", (shared_bytes(own.size),), "uint8")
    exits = [lifelines[rank].detach() if rank in lifelines else -1 for rank in range(own.size)]
    wires = [Wire(steps[rank], rank) for rank in sorted(steps)]
    for wire in wires:
        wire.limit(timeout)
    return Group(memory, own.rank, own.size, exits, timeout, gather), wires


def _joined(
    own: Launched, store: Store, host: str, lifelines: Connections, timeout: float
) -> Gather:
    """Join gloo in a thread, and watch lifelines: gloo would wait for a rank that has ended."""
    from kvgraph.runtime.ranks.gloo import Gloo

    return _in_thread(
        lambda: Gloo(store, own.rank, own.size, host, timeout), lambda: require_all(lifelines)
    )


def _in_thread(make: Callable[[], Made], look: Callable[[], None]) -> Made:
    """Return the result of `make`, which may never return. `look` raises to give up."""
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    with threads_needed():
        threading.Thread(target=run, name=MEETING, daemon=True).start()
    while not wait([made], RETRY_SECONDS).done:
        look()
    return made.result()


def is_meeting() -> bool:
    """Whether a thread of `_in_thread` runs, even if its caller has given up.

    If it returned from C++ while the interpreter exits, the process would be aborted."""
    return any(thread.name == MEETING for thread in threading.enumerate())


# -- the store


def _store(own: Launched, timeout: float) -> Store:
    """The store of torchrun's agent, or of rank 0, with a prefix of this meeting of the run."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, its docs say
    from torch.distributed.distributed_c10d import PrefixStore

    serves = own.rank == 0 and not own.is_store_there
    where, end = f"{own.address}:{own.port}", time.monotonic() + timeout
    listener: socket.socket | None = None
    if serves:
        try:
            listener = listen_for_store(own.port)
        except OSError as error:
            reraise_if_signalled(error)
            raise RankError(
                f"rank 0: expected a free port for the run's store at {where}, got {error}"
            ) from error
    try:
        wait_for_port(own, timeout)  # torch's own deadline can be seconds late
    except BaseException:
        if listener is not None:
            listener.close()
        raise

    @native_call("ranks")
    def make() -> Store:
        whole = TCPStore(
            own.address,
            own.port,
            own.size,
            is_master=serves,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        store = PrefixStore(own.run, whole)
        return PrefixStore(str(store.add(f"meetings of rank {own.rank}", 1)), store)

    def look() -> None:
        if time.monotonic() > end:
            raise RankError(
                f"rank 0: expected the run's store at {where}, got no answer in {timeout:g} s; "
                f"{STORE_HINT}"
            )

    try:
        return _in_thread(make, look)
    except RankError:
        raise
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise RankError(f"rank 0: expected the run's store at {where}, got {why}") from error


def _introduce(own: Launched, mine: _Present, store: Store, timeout: float) -> list[_Present]:
    """The data of all ranks; RankError if a rank publishes none, or differs."""
    try:
        store.set(f"rank {own.rank}", json.dumps(vars(mine)))
        _wait_for_all(own, store, timeout)
        said = [json.loads(store.get(f"rank {rank}")) for rank in range(own.size)]
        present = [_Present(**each) for each in said]
        try:
            _require_alike(present)
        finally:
            store.add("read", 1)
            if own.rank == 0:
                _linger(store, own.size)
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            "rank 0: expected the run's store at its address, got "
            f"{str(error).splitlines()[0]}; start all ranks again"
        ) from error
    return present


def _wait_for_all(own: Launched, store: Store, timeout: float) -> None:
    end = time.monotonic() + timeout
    missing = list(range(own.size))
    while missing := [rank for rank in missing if not store.check([f"rank {rank}"])]:
        if time.monotonic() > end:
            raise own.missing(missing, timeout)
        time.sleep(RETRY_SECONDS)


def _require_alike(present: Sequence[_Present]) -> None:
    loopback = [ipaddress.ip_address(each.host).is_loopback for each in present]
    for rank, each in enumerate(present):
        if loopback[rank] and not all(loopback):
            raise RankError(
                f"rank {rank}: expected an address that other machines reach, got {each.host}; "
                "set GLOO_SOCKET_IFNAME to its network interface"
            )
        require_equal(rank, present[0].facts, each.facts)


def _linger(store: Store, size: int) -> None:
    end = time.monotonic() + PARTING_SECONDS
    with suppress(RuntimeError):
        while store.add("read", 0) < size and time.monotonic() < end:
            time.sleep(RETRY_SECONDS)
