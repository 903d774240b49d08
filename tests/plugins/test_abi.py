"""The C ABI: the generated header, versions, struct layout, threads."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

import kvgraph.onnx
from kvgraph.errors import KernelError
from kvgraph.ops import LINEAR, PAGED_ATTENTION, cuda_native, native, packed
from kvgraph.ops.header import ACTIVATIONS, CODES, header
from kvgraph.ops.specs import ABI_VERSION
from kvgraph.runtime.sessions.onnxruntime import register_ops
from tests.support.conformance import Case, build, check
from tests.support.host_threads import host_threads

PLUGINS = Path(__file__).parents[2] / "plugins"
LONG = Case("update_and_attend", heads=8, rows=((3000, 1), (40, 5), (0, 200)), sinks=True)


def test_generated_header_is_fresh() -> None:
    assert (PLUGINS / "include/kvgraph/contract.h").read_text() == header()


def test_headers_say_how_weights_are_packed() -> None:
    """Every number of an attribute, and where the codes of a word come from."""
    for prefix, names, numbers in (
        ("CODES", CODES, packed.CODE_BITS),
        ("ACTIVATION", ACTIVATIONS, packed.ACTIVATIONS),
    ):
        for name, number in zip(names, numbers, strict=True):
            assert f"KVG_{prefix}_{name} = {number}" in header()
            assert getattr(packed, name) == number
    text = (PLUGINS / "include/kvgraph/abi.h").read_text()
    for bits, order in packed.IN_LINE.items():
        word = {4: "nibble", 8: "byte"}[bits]
        assert f"its {word} {{{', '.join(map(str, order))}}}[i]" in text


def raw_call(
    version: int = ABI_VERSION, size: int = native.CALL.size, operands: int = 9, null: str = ""
) -> str:
    """The sentence with which paged_attention refuses a call that has nothing but a frame."""
    dll = native.library().dll
    tensors = ctypes.create_string_buffer(native.TENSOR_BYTES * 9)
    values = ctypes.create_string_buffer(8 * len(PAGED_ATTENTION.attributes))
    frame = native.CALL.pack(
        version, size, 0 if null == "operands" else ctypes.addressof(tensors),
        0 if null == "attributes" else ctypes.addressof(values), operands,
        len(PAGED_ATTENTION.attributes), 0, 0, 0, 0,
    )  # fmt: skip
    message = ctypes.create_string_buffer(200)
    entry = dll.kvg_cpu_paged_attention
    assert entry(frame, message, len(message)) != 0
    return message.value.decode()


def test_versions_sizes_and_counts_are_checked() -> None:
    assert raw_call() == "paged_attention: q: expected a tensor, got none"
    assert raw_call(version=7) == (
        f"paged_attention: expected ABI version {ABI_VERSION} of this library, got 7 from its "
        "caller"
    )
    assert raw_call(size=8) == "paged_attention: expected a kvg_call of at least 64 bytes, got 8"
    assert raw_call(operands=3) == "paged_attention: expected 9 operands, got 3"
    for field in ("operands", "attributes"):
        sentence = f"paged_attention: {field}: expected data, got a null pointer"
        assert raw_call(null=field) == sentence


def test_a_longer_call_of_a_newer_caller_is_taken() -> None:
    assert raw_call(size=native.CALL.size + 8) == "paged_attention: q: expected a tensor, got none"


def test_a_short_message_buffer_is_not_overrun() -> None:
    message = ctypes.create_string_buffer(b"x" * 16, 16)
    assert native.library().dll.kvg_cpu_paged_attention(None, message, 8) != 0
    assert message.raw == b"paged_a\0" + b"x" * 8


def test_another_abi_version_is_refused_on_load() -> None:
    other = ABI_VERSION + 1
    sentence = rf"expected ABI version {other} of this kvgraph .*, got {ABI_VERSION};"
    with pytest.raises(KernelError, match=sentence):
        native.Library(native.library_path("cpu"), abi_version=other)


def test_a_missing_library_says_how_to_get_it() -> None:
    with pytest.raises(
        KernelError, match=r"libkvgraph_nothing\..*: expected in _native .* pip install"
    ):
        native.library_path("nothing")


class Options:
    """Of a session of ONNX Runtime."""

    def register_custom_ops_library(self, path: str) -> None:
        raise AssertionError(path)


USERS: dict[str, tuple[ModuleType, Callable[[], object]]] = {
    "cpu": (native, lambda: native.Library(native.library_path("cpu"))),
    "onnxruntime": (native, lambda: register_ops(cast(Any, Options()))),
    "a host's onnxruntime": (native, kvgraph.onnx.library_path),
    "cuda": (cuda_native, cuda_native.Launcher),
    "tensorrt": (cuda_native, cuda_native.plugins_path),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("case", ["empty", "another", "old", "missing"])
def test_a_library_that_is_damaged_or_of_another_build_is_refused(
    user: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "library.so"
    messages = {
        "empty": rf"^{path}: expected a library of this kvgraph package, .*file too short",
        "another": rf"^{path}: expected a library of this .*undefined symbol: kvg_\w*abi_version",
        "old": rf"^{path}: expected ABI version \d+ of this kvgraph package, got 1; install both",
        "missing": r"^library.so: expected in _native of the kvgraph package, found in none",
    }
    if case == "empty":
        path.touch()
    elif case != "missing":
        functions = ("kvg_abi_version", "kvg_cuda_abi_version") if case == "old" else ("other",)
        build_library(
            path, "".join(f"unsigned {name}(void) {{ return 1; }}\n" for name in functions)
        )
    module, use = USERS[user]
    native.library()  # the session's own check of the processor

    def given(name: str) -> Path:
        if case == "missing":
            raise KernelError(
                "library.so: expected in _native of the kvgraph package, found in none"
            )
        return path

    monkeypatch.setattr(module, "library_path", given)
    with pytest.raises(KernelError, match=messages[case]):
        use()


def build_library(path: Path, source: str) -> None:
    """A shared library of C. Skips without a compiler."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C compiler to build a library with")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


def test_layout_is_that_of_the_header() -> None:
    assert native.TENSOR_BYTES == 8 + 4 + 4 + 6 * 8
    assert native.CALL.size == struct.calcsize("@IIPPIIPPPI0P")


@pytest.fixture
def threads_restored():  # type: ignore[no-untyped-def]
    yield
    native.set_num_threads(0)


@pytest.mark.usefixtures("threads_restored")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    results = []
    for count in (1, 2, 5, 3):
        native.set_num_threads(count)
        assert native.num_threads() == count
        operands = build(LONG)
        out = native.run(operands.spec, *operands.arrays, **operands.attributes)
        check(LONG, out, operands)
        results.append(out.tobytes())
    assert len(set(results)) == 1
    native.set_num_threads(0)
    assert native.num_threads() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("count", [1, 3, 0])
def test_a_forked_child_has_as_many_threads(count: int) -> None:
    """Also where its parent's pool has run a job; the child's own number holds too."""
    code = f"""
import os
from kvgraph.ops import native
from tests.support.conformance import Case, build

def work():
    operands = build(Case("update_and_attend", rows=((70, 1),) * 9))
    native.run(operands.spec, *operands.arrays, **operands.attributes)
    return native.num_threads()

native.set_num_threads({count})
expected = work()
if not (child := os.fork()):
    same = work() == expected
    native.set_num_threads(2)
    os._exit(0 if same and work() == 2 else 3)
assert os.waitpid(child, 0)[1] == 0
print(expected, work())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PLUGINS.parent
    )
    assert done.returncode == 0, done.stderr
    expected = count or len(os.sched_getaffinity(0))
    assert done.stdout.split() == [str(expected)] * 2


def test_a_row_has_one_result_in_every_batch() -> None:
    operands = build(LONG)
    alone = build(LONG)
    for name in ("q", "k", "v"):
        alone.inputs[name] = alone.inputs[name][:1]  # type: ignore[index]
    alone.inputs["input_row_offsets"] = np.array([0, 1], np.int32)
    for name in ("cache_lengths", "lookup_table"):
        alone.inputs[name] = alone.inputs[name][:1]  # type: ignore[index]
    whole, one = (native.run(o.spec, *o.arrays, **o.attributes) for o in (operands, alone))
    assert whole[:1].tobytes() == one.tobytes()


@pytest.mark.parametrize("rows", [((3000, 1), (40, 5), (0, 200)), ((0, 7),)])
def test_attention_may_write_over_its_queries(rows: tuple[tuple[int, int], ...]) -> None:
    case = Case("paged_attention", heads=8, rows=rows)
    operands = build(case)
    q = operands.inputs["q"]
    assert q is not None
    given = [None if a is None else (a.ctypes.data, str(a.dtype), a.shape) for a in operands.arrays]
    expected = native.run(operands.spec, *operands.arrays, **operands.attributes)
    native.call(operands.spec, [*given, given[0]], operands.attributes)
    assert q.tobytes() == expected.tobytes()


@pytest.mark.parametrize("rows", [1, 40, 500])
def test_linear_layers_may_write_over_their_inputs(rows: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, 64)).astype(np.float32)
    weight = random.standard_normal((4, 64, 16)).astype(np.float32)
    attributes = {"out_features": 64, "bits": 32}
    expected = native.run(LINEAR, x, weight, **attributes)
    own = (x.ctypes.data, "float32", x.shape)
    given = [own, (weight.ctypes.data, "float32", weight.shape), *[None] * 4, own, None, None]
    native.call(LINEAR, given, attributes)
    assert x.tobytes() == expected.tobytes()


@pytest.mark.usefixtures("threads_restored")
def test_calls_from_several_threads_do_not_mix() -> None:
    native.set_num_threads(3)

    def work(seed: int) -> None:
        for _ in range(5):
            operands = build(LONG)
            out = native.run(operands.spec, *operands.arrays, **operands.attributes)
            check(LONG, out, operands)

    check(LONG, *_run(LONG))  # the reference is computed once, here
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(4)))
    assert threading.active_count() >= 1


def _run(case: Case):  # type: ignore[no-untyped-def]
    operands = build(case)
    return native.run(operands.spec, *operands.arrays, **operands.attributes), operands


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.usefixtures("threads_restored")
def test_a_forked_child_has_its_own_threads() -> None:
    native.set_num_threads(3)
    check(LONG, *_run(LONG))
    child = os.fork()
    if child == 0:  # no pytest in here: the status is the answer
        signal.alarm(120)  # ends a child that hangs
        gc.freeze()  # sessions of other tests would wait for their threads, which are not here
        try:
            check(LONG, *_run(LONG))
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_callers_own_parallel_for_is_used() -> None:
    """A host hands its threads in; every index runs once, and no thread of ours starts."""
    counts: list[int] = []

    def loop(run: Callable[[int], None], count: int) -> None:
        counts.append(count)
        for index in reversed(range(count)):
            run(index)

    with host_threads(loop):
        out, operands = _run(LONG)
    assert counts
    assert all(count > 1 for count in counts)
    check(LONG, out, operands)


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
