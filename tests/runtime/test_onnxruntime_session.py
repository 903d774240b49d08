"""The ONNX Runtime session between steps: what stays bound, what is bound again, what is reused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph.contract.inputs import KVCacheInputs, ModelInputs
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.ops import native
from kvgraph.runtime.machine import default_threads, require_threads
from tests.runtime.drive import inputs_of, run_step
from tests.support import command_line

Compiled = Callable[..., Path]
Step = tuple[ModelInputs, KVCacheInputs]


class Rows:
    """Requests of a few tokens over a pool of their own."""

    def __init__(self, session: Any, lengths: list[int], first: int) -> None:
        self.session = session
        params = session.artifact.params()
        self.kv = PagedKVCacheManager(params, session, 32, max_batch_size=len(lengths))
        self.contexts = [
            TextContext(f"r{i}", list(range(first, first + n))) for i, n in enumerate(lengths)
        ]
        for context in self.contexts:
            self.kv.claim(context.request_id)

    def inputs(self) -> Step:
        self.kv.alloc_batch([self.contexts])
        return inputs_of(self.contexts), self.kv.runtime_inputs([self.contexts])

    def step(self) -> np.ndarray[Any, Any]:
        """Logits `[rows, vocab]`, and each row goes on with its likeliest token."""
        logits: np.ndarray[Any, Any] = self.session.run(*self.inputs())
        for context, token in zip(self.contexts, logits.argmax(-1), strict=True):
            context.update(int(token))
        self.kv.step([self.contexts])
        return logits


class CountingBinding:
    """An IOBinding that counts what is bound."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self.bound: list[str] = []

    def bind_input(self, name: str, *place: Any) -> None:
        self.bound.append(name)
        self.binding.bind_input(name, *place)

    def bind_output(self, name: str, *place: Any) -> None:
        self.bound.append(name)
        self.binding.bind_output(name, *place)


@pytest.fixture
def session(compiled: Compiled) -> Any:
    return kvgraph.load(compiled("tiny-llama")).session()


def test_logits_outlive_the_next_step_and_are_then_reused(session: Any) -> None:
    rows = Rows(session, [5, 3], 7)
    first = rows.step()
    copy = first.copy()
    second = rows.step()
    np.testing.assert_array_equal(first, copy)
    assert not np.shares_memory(first, second)
    assert np.shares_memory(first, rows.step())


def test_a_decode_step_binds_nothing(session: Any) -> None:
    rows = Rows(session, [5, 3], 7)
    names = {symbol.name for symbol in session.signature.inputs}
    counting = [CountingBinding(each.binding) for each in session._bindings]
    rebind(session, counting)
    for _ in range(2):
        rows.step()
    assert all(set(each.bound) == {*names, "logits", "kv_blocks_out"} for each in counting)
    for _ in range(2):
        rows.step()
    for each in counting:
        each.bound.clear()
    for _ in range(4):
        rows.step()
    assert [each.bound for each in counting] == [[], []]


def test_a_pool_is_free_once_another_one_is_used(session: Any) -> None:
    """Neither the checks nor a binding that waits for its turn keep it."""
    rows = Rows(session, [5, 3], 7)
    for _ in range(3):
        rows.step()
    pool = weakref.ref(rows.kv.get_device_buffer(0).all_buffers[0].handle)
    other = Rows(session, [5, 3], 7)
    other.step()
    assert pool() is not None
    del rows
    gc.collect()
    assert pool() is None


def test_pools_and_shapes_that_change_between_steps(compiled: Compiled) -> None:
    """Two pools and batches of two sizes take turns on one session, as each alone."""
    artifact = kvgraph.load(compiled("tiny-llama"))
    shared = artifact.session()
    settings: list[tuple[list[int], int]] = [([5, 3], 7), ([9, 1, 4], 30)]
    mixed = [Rows(shared, *each) for each in settings]
    alone = [Rows(artifact.session(), *each) for each in settings]
    for _ in range(4):
        for rows, single in zip(mixed, alone, strict=True):
            np.testing.assert_array_equal(rows.step(), single.step())


def test_values_that_stop_fitting_are_refused_each_time(session: Any) -> None:
    rows = Rows(session, [5], 7)
    rows.step()
    inputs, kv = rows.inputs()
    session.run(inputs, kv)
    wide = ModelInputs(
        inputs.tokens.astype(np.int64),  # type: ignore[arg-type]
        inputs.input_row_offsets,
        inputs.logits_indices,
    )
    longer = ModelInputs(inputs.tokens, np.array([0, 1, 1], np.int32), inputs.logits_indices)
    for _ in range(2):
        with pytest.raises(kvgraph.BindingError, match="tokens: expected dtype int32, got int64"):
            session.run(wide, kv)
        with pytest.raises(kvgraph.BindingError, match=r"cache_lengths: .* expected 2, got 1"):
            session.run(longer, kv)
        session.run(inputs, kv)


def test_a_chunk_may_ask_for_no_logits(session: Any) -> None:
    """Its keys and values are in the cache as if it had."""
    asking, quiet = (Rows(session, [5], 7) for _ in range(2))
    asking.step()
    inputs, kv = quiet.inputs()
    chunk = ModelInputs(inputs.tokens, inputs.input_row_offsets, np.zeros(0, np.int32))
    assert session.run(chunk, kv).shape == (0, session.signature.outputs[0].shape[1])
    pools = [step[1].flatten()[0].handle for step in ((inputs, kv), asking.inputs())]
    assert pools[0].any()
    np.testing.assert_array_equal(*pools)


def test_values_that_are_no_arrays_are_named(session: Any) -> None:
    inputs, kv = Rows(session, [5], 7).inputs()
    for value in ([3, 4], None, "text"):
        given = ModelInputs(value, inputs.input_row_offsets, inputs.logits_indices)  # type: ignore[arg-type]
        message = (
            rf"^tokens: expected an array of int32 \['total_seq_len'\], got {type(value).__name__}$"
        )
        with pytest.raises(kvgraph.BindingError, match=message):
            session.run(given, kv)
    flat = ModelInputs(inputs.tokens[None], inputs.input_row_offsets, inputs.logits_indices)
    with pytest.raises(
        kvgraph.BindingError, match=r"tokens: expected rank 1 .* got shape \[1, 5\]"
    ):
        session.run(flat, kv)
    with pytest.raises(kvgraph.BindingError, match=r"cache: expected one device's .* got list"):
        session.run(inputs, [kv])
    session.run(inputs, kv)


def test_many_rows_of_logits_after_few(session: Any) -> None:
    """The buffers grow, and give each chunk's own rows."""
    manager = PagedKVCacheManager(session.artifact.params(), session, 32, max_batch_size=1)
    context = TextContext("r", list(range(3, 43)))
    manager.claim("r")
    found = []
    for length in (1, 2, 30, 7):
        context.active_length = length
        found.append(run_step(session, manager, context, every_token=True)[0])
    whole = TextContext("whole", list(range(3, 43)))
    other = PagedKVCacheManager(session.artifact.params(), session, 32, max_batch_size=1)
    other.claim("whole")
    expected = run_step(session, other, whole, every_token=True)[0]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


# -- threads


def test_threads_are_physical_cores_of_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six processors, of which 0 and 3 are one core, as 1 and 4; 5 says nothing of its core."""
    for number, siblings in enumerate(["0,3", "1,4", "2", "0,3", "1,4"]):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    for usable, expected in (({0, 1, 2, 3, 4, 5}, 4), ({0, 3}, 1), ({2}, 1), ({1, 3, 5}, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, usable=usable: usable)
        assert default_threads(tmp_path) == expected
        require_threads(len(usable))
        with pytest.raises(kvgraph.RequestError, match=rf"to {len(usable)} .*, got \d"):
            require_threads(len(usable) + 1)


def test_sessions_refuse_too_many_threads(compiled: Compiled) -> None:
    artifact = kvgraph.load(compiled("tiny-llama"))
    most = len(os.sched_getaffinity(0))
    for asked in (most + 1, -1):
        with pytest.raises(kvgraph.RequestError, match=f"num_threads: expected 0 to {most} from"):
            artifact.session(num_threads=asked)
    odd: Any
    for odd in ("2", 2.0, True):
        with pytest.raises(kvgraph.RequestError, match="num_threads: expected an integer, got"):
            artifact.session(num_threads=odd)
    artifact.session(num_threads=most)


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_threads_are_the_samplers_too(compiled: Compiled, backend: str) -> None:
    """And on torch those of our ops."""
    artifact = kvgraph.load(compiled("tiny-llama", backend))
    native.set_num_threads(0)
    all_of_them = native.num_threads()
    artifact.session(num_threads=1)
    assert native.num_threads() == 1
    artifact.session()
    assert native.num_threads() == (default_threads() if backend == "onnx" else all_of_them)


# -- a step that is interrupted


class Breaking(CountingBinding):
    """Raises before or after what is bound `at` some place in the order."""

    def __init__(self, binding: Any, at: int, *, before: bool) -> None:
        super().__init__(binding)
        self.at, self.before = at, before

    def bind_input(self, name: str, *place: Any) -> None:
        self._bind(super().bind_input, name, *place)

    def bind_output(self, name: str, *place: Any) -> None:
        self._bind(super().bind_output, name, *place)

    def _bind(self, bind: Any, name: str, *place: Any) -> None:
        self.at -= 1
        if self.at == 0 and self.before:
            raise KeyboardInterrupt
        bind(name, *place)
        if self.at == 0:
            raise KeyboardInterrupt


def test_a_path_that_is_not_utf_8_is_refused(compiled: Compiled, tmp_path: Path) -> None:
    linked = tmp_path / "a\udcff.kvg"
    linked.symlink_to(compiled("tiny-llama"))
    message = r"expected a path in UTF-8 for onnxruntime, got b'.*/a\\xff\.kvg/model\.onnx'"
    with pytest.raises(kvgraph.ArtifactError, match=message):
        kvgraph.load(linked).session()


def rebind(session: Any, bindings: list[Any]) -> None:
    for bound, binding in zip(session._bindings, bindings, strict=True):
        bound.logits._binding = binding
        for held in bound.inputs:
            if hasattr(held, "_bindings"):
                held._bindings = bindings
            else:
                held._binding = binding


@pytest.mark.parametrize("before", [True, False])
def test_what_was_not_bound_to_its_end_is_bound_again(session: Any, before: bool) -> None:
    """A step of other sizes and another pool is interrupted at each binding; then both run on."""
    first, second = Rows(session, [5, 3], 7), Rows(session, [9, 1, 4], 30)
    bindings = [bound.binding for bound in session._bindings]
    alone = [Rows(session, [5, 3], 7), Rows(session, [9, 1, 4], 30)]
    wanted = [[rows.step().copy() for _ in range(12)] for rows in alone]
    broken = 0
    for step in range(12):
        for rows, logits in ((first, wanted[0]), (second, wanted[1])):
            rebind(session, [Breaking(each, step, before=before) for each in bindings])
            try:
                session.run(*rows.inputs())
            except KeyboardInterrupt:
                broken += 1
            rebind(session, bindings)
            for other in (first, second)[:: 1 if step % 2 else -1]:
                session.run(*other.inputs())
            np.testing.assert_array_equal(rows.step(), logits[step])
            session.run(*rows.inputs())  # both bindings have values of these rows
    assert broken > 12


def test_nothing_is_told_to_a_vendor(compiled: Compiled, tmp_path: Path) -> None:
    """A process with a home of its own: no identifier and no queue of events is left in it."""
    code = (
        "import sys, kvgraph\n"
        "kvgraph.Engine(sys.argv[1]).generate(['The'], kvgraph.SamplingParams(max_tokens=2))"
    )
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    kept = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    command = [sys.executable, "-c", code, str(compiled("tiny-llama"))]
    subprocess.run(command, check=True, env=kept | home)
    assert not [path for path in tmp_path.rglob("*") if "onnxruntime" in str(path).lower()]
    assert not list(tmp_path.rglob("Microsoft"))


FORKING = """
import os, signal, sys, time
import kvgraph

engine = kvgraph.Engine(sys.argv[1], num_pages=8, num_threads=2)
first = engine.generate(["A class"])[0].text
time.sleep(0.1)  # by then the session's threads wait for work
for end in ("freed", "left to the interpreter", "replaced"):
    if not (child := os.fork()):
        signal.alarm(60)
        if end != "left to the interpreter":
            del engine
        if end == "replaced":
            engine = kvgraph.Engine(sys.argv[1], num_pages=8, num_threads=2)
            assert engine.generate(["A class"])[0].text == first
        sys.exit()
    print(os.waitpid(child, 0)[1], flush=True)
print(engine.generate(["A class"])[0].text == first)
"""


def test_a_forked_child_ends_without_its_parents_threads(compiled: Compiled) -> None:
    command = [*command_line.FORKING, "-c", FORKING, str(compiled("tiny-llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("0\n0\n0\nTrue\n", "")


GLOBAL_POOL = """
import sys
import onnxruntime
import kvgraph

onnxruntime.set_global_thread_pool_sizes(1, 1)
session = kvgraph.load(sys.argv[1]).session()
assert not session._session.get_session_options().use_per_session_threads
print(kvgraph.Engine(session.artifact, session=session).generate(["A class"])[0].text)
"""


def test_a_session_runs_on_the_process_own_thread_pool(compiled: Compiled) -> None:
    folder = compiled("tiny-llama")
    command = [sys.executable, "-c", GLOBAL_POOL, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == kvgraph.Engine(folder).generate(["A class"])[0].text + "\n"
