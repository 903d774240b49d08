"""What compiles of many tests have in common, made once.

Kernels are kept on disk for all processes, by what they are made of (`artifacts.py`), and the table
of the ONNX exporter's operators in each process. A test of compiling is marked `fresh_kernels`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from kvgraph.kernels import aot
from kvgraph.kernels.aot import Compiled
from kvgraph.kernels.variants import Variant
from tests.support import artifacts

REGISTRY = "torch.onnx._internal.exporter._registration"

compile_variant = aot.compile_variant


def remember_kernels() -> None:
    """For every compile in this process."""
    aot.compile_variant = _remembered


@contextmanager
def fresh_kernels() -> Iterator[None]:
    aot.compile_variant = compile_variant
    try:
        yield
    finally:
        remember_kernels()


def _remembered(variant: Variant, arch: str) -> Compiled:
    sources = getattr(variant.kernel.function(), "cache_key", None)  # of all that it calls, too
    if sources is None:  # of Triton's interpreter, where nothing is compiled
        return compile_variant(variant, arch)
    key = hashlib.sha256(f"{arch} {variant!r} {sources}".encode()).hexdigest()
    path = artifacts.shared("kernels") / key
    if not path.exists():
        partial = path.with_name(f"{key}.{os.getpid()}")
        partial.write_bytes(pickle.dumps(compile_variant(variant, arch)))
        partial.rename(path)
    made: Compiled = pickle.loads(path.read_bytes())
    return made


def remember_operators() -> None:
    """Once torch's exporter is loaded: it reads the sources of all its functions at each export."""
    module = sys.modules.get(REGISTRY)
    if module is not None and not hasattr(module.ONNXRegistry, "remembered"):
        module.ONNXRegistry.remembered = True
        make = _copies(module.ONNXRegistry.from_torchlib)
        module.ONNXRegistry.from_torchlib = staticmethod(make)


def _copies(make: Callable[..., Any]) -> Callable[..., Any]:
    made = cache(make)

    def copied(**settings: int) -> Any:
        whole = made(**settings)
        copy = type(whole)()
        copy._opset_version = whole._opset_version
        copy.functions = {name: list(found) for name, found in whole.functions.items()}
        return copy

    return copied
