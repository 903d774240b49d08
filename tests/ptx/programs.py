"""Small PTX texts: a kernel whose threads read x[i], compute, and write y[i]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvgraph import ptx

Array = np.ndarray[Any, Any]

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 smem[];\n"
REGISTERS = """
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<64>;
    .reg .b64 %d<32>;
"""


def kernel(body: str, parameters: int = 2, threads: int | None = None) -> str:
    """A module of one kernel `k` of 64-bit parameters p0, p1, ...; a statement a line."""
    listed = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    fixed = f".reqntid {threads}\n" if threads else ""
    return f"{HEAD}.visible .entry k({listed})\n{fixed}{{{REGISTERS}{body}\n}}\n"


def addresses(width_in: int, width_out: int) -> str:
    """%d1 and %d2: where thread %r0 has its elements of p0 and p1; %r0 counts over all blocks."""
    return f"""
    mov.u32 %r61, %ctaid.x;
    mov.u32 %r62, %ntid.x;
    mov.u32 %r63, %tid.x;
    mad.lo.s32 %r0, %r61, %r62, %r63;
    ld.param.b64 %d1, [p0];
    ld.param.b64 %d2, [p1];
    mad.wide.s32 %d1, %r0, {width_in}, %d1;
    mad.wide.s32 %d2, %r0, {width_out}, %d2;
    """


def elementwise(code: str, loads: str, store: str, width_in: int, width_out: int) -> str:
    return kernel(f"{addresses(width_in, width_out)}\n{loads}\n{code}\n{store}\nret;")


def run(
    text: str,
    *arrays: Array,
    grid: int = 1,
    threads: int = 32,
    shared: int = 0,
    **options: Any,
) -> ptx.Counters:
    """Kernel `k` over buffers a, b, ...; they hold its results."""
    memory = ptx.Memory()
    given: Sequence[int] = [memory.add(a, "abcdef"[i]) for i, a in enumerate(arrays)]
    found = ptx.parse(text).kernels["k"]
    return ptx.run(
        found, memory, grid=(grid, 1, 1), threads=threads, arguments=given, shared=shared, **options
    )
