"""Memory of the session on torch's CUDA, where there is none: what waits, what is locked, and what
is told where it is too little. The GPU is a stand-in on the CPU.
"""

from __future__ import annotations

import gc
import itertools
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="runs the program")

from kvgraph.contract.devices import LogicalDevice  # noqa: E402
from kvgraph.contract.dims import TensorType  # noqa: E402
from kvgraph.contract.inputs import Buffer  # noqa: E402
from kvgraph.errors import CapacityError, DeviceLostError, KernelError  # noqa: E402
from kvgraph.kv.tiers.open import _host_store  # noqa: E402
from kvgraph.runtime.sessions import captured, cuda  # noqa: E402
from kvgraph.runtime.sessions.captured import CapturedSteps  # noqa: E402
from kvgraph.runtime.sessions.cuda import CudaSession  # noqa: E402
from kvgraph.runtime.sessions.cuda_pages import PAGE, PageCopies  # noqa: E402

CPU = torch.device("cpu")
LOST = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore")
POOL = TensorType("kv_blocks", "float32", (4, 8), LogicalDevice("cuda"), "buffer")


class StandIn:
    """A GPU. `refused`: what its next capture raises."""

    device = CPU

    def __init__(self) -> None:
        self.refused: Exception | None = None
        self.captures = 0

    def free_memory(self) -> int:
        return 7

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.captures += 1
        step()
        if self.refused is not None:
            raise self.refused
        return lambda: step().add_(1)  # told from one that is not replayed


class OneSession(CudaSession):
    """Over a program that adds its inputs: a row of tokens on the device, a bound on the host.
    Its last input says how many rows of logits a step has."""

    def __init__(self, ranks: int = 1) -> None:
        self.gpu = StandIn()  # type: ignore[assignment]
        self._program = lambda a, b, rows: [(a + b)[:1].expand(len(rows), 1)]  # type: ignore[assignment]
        self.artifact = types.SimpleNamespace(ranks=ranks)  # type: ignore[assignment]
        self._pages = PageCopies(CPU)
        self._on_host, self._captured, self._records = [False, True, False], CapturedSteps(), True
        self._vocab, self._captured_logits = 1, torch.empty(0)
        self._logits = itertools.cycle([cuda._Logits(CPU, ranks)])

    def _require_known(self, symbol: TensorType) -> None:
        pass


def raises(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    return refuse


# -- what waits


def test_a_pool_is_zeroed_before_pages_are_copied_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have a stream of their own: what is enqueued on the steps' stream runs later."""
    enqueued: list[Callable[[], Any]] = []

    def zeros(*given: Any, **options: Any) -> Any:
        made = torch.full(*given, 3.0, **options)
        enqueued.append(made.zero_)
        return made

    def run() -> None:
        while enqueued:
            enqueued.pop()()

    session = OneSession()
    stream = types.SimpleNamespace(synchronize=run)
    session._pages._stream = types.SimpleNamespace(synchronize=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(torch, "zeros", lambda shape, **options: zeros(shape, **options))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    buffer = session.allocate(POOL, {})
    row = np.full(32, 7, np.uint8)
    session.copy_pages_in(buffer, [2], [row])
    run()
    assert (buffer.handle[2].view(torch.uint8).numpy() == 7).all()
    assert not buffer.handle[:2].any()


# -- what is locked


class Cudart:
    """Of torch: what is locked, by address."""

    def __init__(self, refuses: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = refuses

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def copies() -> PageCopies:
    made = PageCopies(CPU)
    made._stream = types.SimpleNamespace()  # type: ignore[assignment]
    return made


def test_a_slab_is_locked_as_large_as_it_is(
    copies: PageCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own memory of this kind has a power of two of bytes. No byte is locked twice."""
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    nbytes = (4 << 20) + 5
    slab = copies.pinned(nbytes)
    assert slab.shape == (nbytes,)
    assert cudart.locked == {slab.ctypes.data: (4 << 20) + PAGE}
    assert not slab.ctypes.data % PAGE
    slab[-1] = 9
    row = slab[-16:]
    del slab
    gc.collect()
    assert cudart.locked, "a row of it is in use"
    assert row[-1] == 9
    del row
    gc.collect()
    assert not cudart.locked
    assert copies.pinned(0).shape == (0,)


def test_a_slab_that_the_system_does_not_lock(
    copies: PageCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(refuses=2))
    with pytest.raises(CapacityError, match=r"^host memory: expected 4\.0 MiB that .*got error 2"):
        copies.pinned(4 << 20)


@pytest.mark.parametrize("error", [CapacityError("no"), MemoryError(), ValueError("too large")])
def test_a_host_tier_that_is_too_large(error: Exception) -> None:
    copier = types.SimpleNamespace(pinned_host_bytes=raises(error))
    with pytest.raises(CapacityError, match=r"^host_memory: expected .* for 4 pages and .*less$"):
        _host_store({64: 4}, {64: 1}, copier)


# -- what is told


def test_a_pool_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = r"^kv_blocks: expected 128 bytes for \[4, 8\] on cpu, got 7 free ones"
    for error in (FULL, RuntimeError("Storage size calculation overflowed")):
        monkeypatch.setattr(torch, "zeros", raises(error))
        with pytest.raises(CapacityError, match=sentence):
            OneSession().allocate(POOL, {})


@pytest.mark.parametrize(("error", "kind"), [(LOST, DeviceLostError), (FULL, CapacityError)])
def test_no_error_of_torch_reaches_a_caller(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    session, buffer = OneSession(), Buffer("float32", (4, 8), LogicalDevice("cuda"), None)
    refuse = raises(error)
    for name in ("out", "into", "pinned", "settle"):
        monkeypatch.setattr(session._pages, name, refuse)
    monkeypatch.setattr(session.gpu, "free_memory", refuse)
    monkeypatch.setattr(session.gpu, "launch", refuse, raising=False)
    monkeypatch.setattr(cuda, "_page_locked", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    offsets = np.array([0, 1], np.int32)
    lengths = Buffer("int32", (1,), LogicalDevice("cuda"), torch.zeros(1, dtype=torch.int32))
    calls: Sequence[Callable[[], Any]] = (
        session.free_memory,
        lambda: session.copy_pages_out(buffer, [0], []),
        lambda: session.copy_pages_in(buffer, [0], []),
        lambda: session.pinned_host_bytes(8),
        lambda: session.uploader()(POOL, offsets, 2),
        lambda: session.increment(lengths, offsets),
    )
    for call in calls:
        with pytest.raises(kind, match=r"^cuda: CUDA "):
            call()
    if kind is DeviceLostError:
        with pytest.raises(kind, match=r"^cuda: CUDA "):
            session.allocate(POOL, {})
    monkeypatch.setattr(session.gpu, "device", torch.device("cuda"))
    with pytest.raises(kind, match=r"^cuda: CUDA "):
        session._synchronize()


# -- captures


ONE = torch.tensor([0])


def replay(session: OneSession, bound: int) -> int:
    return int(session._replay([torch.tensor([10]), torch.tensor([bound]), ONE]))


@pytest.mark.parametrize("error", [FULL, RuntimeError("CUDA error: out of memory")])
def test_a_step_that_memory_is_too_little_to_record_is_run(error: Exception) -> None:
    session = OneSession()
    gpu: Any = session.gpu
    token = torch.tensor([10])

    def step(bound: int) -> int:
        return int(session._replay([token, torch.tensor([bound]), ONE]))

    assert [step(1), step(1)] == [12, 12], "captured"
    gpu.refused = error
    with pytest.warns(
        UserWarning, match="expected memory for one more CUDA graph than 1, got cuda"
    ):
        assert step(2) == 12
    assert [step(2), step(3), step(1)] == [12, 13, 12]
    assert gpu.captures == 2


def test_another_error_of_a_capture_is_raised() -> None:
    session = OneSession()
    session.gpu.refused = RuntimeError("no such op")  # type: ignore[attr-defined]
    with pytest.raises(KernelError, match="cuda: no such op"):
        replay(session, 1)
    assert session._records


def test_ranks_run_the_same_number_of_collectives() -> None:
    session = OneSession(ranks=2)
    session.gpu.refused = FULL  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match="cuda: CUDA out of memory"):
        replay(session, 1)


def test_the_graph_that_was_replayed_last_stays_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MAX_CAPTURED", 2)
    session, token = OneSession(), torch.tensor([10])
    counts = []
    for bound in (1, 2, 1, 3, 1, 2):
        session._replay([token, torch.tensor([bound]), ONE])
        counts.append(session.gpu.captures)  # type: ignore[attr-defined]
    assert counts == [1, 2, 2, 3, 3, 4]


def test_all_graphs_write_their_logits_into_the_same_memory() -> None:
    """As much as the widest has, not as all have together. A graph that was captured before a wider
    one keeps what it writes to."""
    session, token, indices = OneSession(), torch.tensor([10]), torch.zeros(4)
    seen = []
    for bound, rows in ((1, 2), (2, 4), (3, 3), (4, 4), (1, 2)):
        logits = session._replay([token, torch.tensor([bound]), indices[:rows]])
        assert logits.tolist() == [[11 + bound]] * rows
        seen.append(logits)
    assert session.gpu.captures == 4  # type: ignore[attr-defined]
    assert [x.data_ptr() for x in seen[2:]] == [seen[1].data_ptr()] * 2 + [seen[0].data_ptr()]


class FullOnce:
    """A program that finds too little memory, once."""

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program, self.calls = program, 0
        self.lost: list[ref[Any]] = []

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        assert not any(kept() is not None for kept in self.lost), "the failed step's memory is free"
        if self.calls == 1:
            taken = torch.zeros(4)
            self.lost.append(ref(taken))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self._program(*given)


def full_beside_graphs(ranks: int) -> tuple[OneSession, FullOnce]:
    session = OneSession(ranks)
    replay(session, 1)
    program = FullOnce(session._program)
    session._program = program  # type: ignore[assignment]
    session._upload = session.uploader()
    return session, program


TOKEN = [np.array([10], np.int32), torch.tensor([1]), ONE]


def test_a_step_that_does_not_fit_beside_the_graphs_is_run_without_them() -> None:
    session, program = full_beside_graphs(ranks=1)
    session.signature = types.SimpleNamespace(inputs=[POOL] * 3)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="expected memory for a step beside 1 CUDA graphs, got "):
        assert session._run(TOKEN).tolist() == [[11]]
    assert program.calls == 2
    assert not session._captured
    assert not session._records
    assert replay(session, 1) == 11


def test_a_step_that_does_not_fit_is_raised_where_no_graph_is_or_another_rank() -> None:
    for ranks in (1, 2):
        session, program = full_beside_graphs(ranks)
        session.signature = types.SimpleNamespace(inputs=[POOL] * 3)  # type: ignore[assignment]
        if ranks == 1:
            session._captured.clear()
        with pytest.raises(CapacityError, match="cuda: CUDA out of memory"):
            session._run(TOKEN)
        assert program.calls == 1
        assert session._records


def test_graphs_go_where_what_they_read_moves() -> None:
    """On all ranks at once: what is at an old address again would be so on one rank alone."""
    session = OneSession(ranks=2)
    session.signature = types.SimpleNamespace(inputs=[POOL] * 3)  # type: ignore[assignment]
    session._upload_captured = session.uploader(session._captured.clear)
    for size, captures in ((8, 1), (cuda.LEAST_CAPACITY, 2), (cuda.LEAST_CAPACITY + 1, 3)):
        session._run_captured([np.zeros(size, np.int32), torch.tensor([1]), torch.zeros(size)])
        assert session.gpu.captures == captures  # type: ignore[attr-defined]
    assert len(session._captured) == 1, "that of the last size"
    session.allocate(POOL, {})
    assert not session._captured
