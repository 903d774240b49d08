"""Calls of native kernels by a host that has threads of its own (`parallel_for` of abi.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

from kvgraph.ops import native
from kvgraph.ops.spec import OpSpec

HOST = 1234
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
LOOP = ctypes.CFUNCTYPE(None, ctypes.c_void_p, TASK, ctypes.c_void_p, ctypes.c_size_t)

Loop = Callable[[Callable[[int], None], int], None]
"""`loop(run, count)` calls `run(index)` for every index."""


@contextmanager
def host_threads(loop: Loop, num_threads: int = 2) -> Iterator[None]:
    """Make kernels run their tasks by `loop`, which may call kernels too."""

    def parallel_for(host: int, task: Callable[[int, int], None], data: int, count: int) -> None:
        assert host == HOST
        loop(lambda index: task(data, index), count)

    callback = LOOP(parallel_for)

    def call(
        library: native.Library,
        spec: OpSpec,
        operands: Sequence[native.NativeOperand],
        attributes: Mapping[str, float],
    ) -> None:
        frame = native._Frame(library.dll, spec)  # of its own: calls may nest
        fields = list(native.CALL.unpack(frame.frame))
        fields[6:8] = ctypes.cast(callback, ctypes.c_void_p).value, HOST
        fields[9] = num_threads
        native.CALL.pack_into(frame.frame, 0, *fields)
        frame.call(operands, attributes)

    with mock.patch.object(native.Library, "call", call):
        yield
