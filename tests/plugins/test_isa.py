"""Which instruction set's kernels run, and that forcing one does force it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from ml_dtypes import bfloat16

from kvgraph.errors import KernelError
from kvgraph.ops import PAGED_ATTENTION, native
from tests.support.conformance import Case, Operands, build
from tests.support.isa import forced_isa, isa_of, load

X86 = ("amx", "avx512_bf16", "avx512", "avx2")
FLAGS = {
    "avx2": {"avx2"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512cd", "avx512vl"},
}
FLAGS["avx512_bf16"] = FLAGS["avx512"] | {"avx512_bf16", "avx512_vnni"}
FLAGS["amx"] = FLAGS["avx512_bf16"] | {"amx_tile", "amx_int8", "amx_bf16"}
CASE = Case("paged_attention", "bfloat16", "bfloat16", head_dim=128, rows=((700, 1), (40, 9)))


def processor() -> set[str]:
    """Flags of this processor, as the kernel tells them: not through cpuid, as the library asks.

    Without `amx_tile` where the system refuses its use: arch_prctl's ARCH_REQ_XCOMP_PERM.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags: set[str] = set(next((x for x in lines if x.startswith("flags")), "").split())
    if "avx2" not in flags:
        pytest.skip("needs /proc/cpuinfo of an x86-64 processor with AVX2")
    arch_prctl, request, tile_data = 158, 0x1023, 18
    if "amx_tile" in flags and ctypes.CDLL(None).syscall(arch_prctl, request, tile_data):
        flags.remove("amx_tile")
    return flags


def attend(case: Case = CASE) -> Any:
    operands = build(case)
    return native.run(operands.spec, *operands.arrays, **operands.attributes)


def refusal(isa: str) -> str:
    """The sentence of a call under KVGRAPH_CPU_ISA=`isa`, which must fail."""
    with (
        mock.patch.dict(os.environ, KVGRAPH_CPU_ISA=isa),
        mock.patch.object(native, "library", return_value=load(isa)),
        pytest.raises(KernelError) as raised,
    ):
        attend()
    return str(raised.value)


def test_the_best_of_this_processor_is_chosen() -> None:
    flags = processor()
    assert isa_of(load("")) == next(name for name in X86 if flags >= FLAGS[name])


@pytest.mark.parametrize("name", X86)
def test_a_forced_one_runs_or_is_refused(name: str) -> None:
    flags = processor()
    if flags >= FLAGS[name]:
        assert isa_of(load(name)) == name
        return
    have = ", ".join(isa for isa in X86 if flags >= FLAGS[isa])
    assert refusal(name) == (
        f"KVGRAPH_CPU_ISA: expected one of {have} of this processor, got {name}"
    )


def test_an_unknown_one_is_refused_and_nothing_is_written() -> None:
    processor()
    want = "KVGRAPH_CPU_ISA: expected one of amx, avx512_bf16, avx512, avx2, got sse9"
    assert refusal("sse9") == want
    operands = build(Case("update_and_attend"))
    before = operands.copy().inputs["kv_blocks"]
    with (
        mock.patch.dict(os.environ, KVGRAPH_CPU_ISA="sse9"),
        mock.patch.object(native, "library", return_value=load("sse9")),
        pytest.raises(KernelError, match="got sse9"),
    ):
        native.run(operands.spec, *operands.arrays, **operands.attributes)
    with (
        mock.patch.dict(os.environ, KVGRAPH_CPU_ISA="sse9"),
        mock.patch.object(native, "library", return_value=load("sse9")),
        pytest.raises(KernelError, match=r"^KVGRAPH_CPU_ISA: expected amx.* got sse9$"),
    ):
        native.isa()
    after = operands.inputs["kv_blocks"]
    assert before is not None
    assert after is not None
    assert after.tobytes() == before.tobytes()


def test_the_variants_are_different_code() -> None:
    """They add in different orders: float32 results agree closely, and not bit for bit."""
    case = Case("paged_attention", head_dim=128, rows=((700, 1), (40, 9)))
    results = []
    for name in ("avx2", "avx512"):
        with forced_isa(name):
            results.append(attend(case))
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)
    assert results[0].tobytes() != results[1].tobytes()


def test_the_variable_is_read_from_the_environment() -> None:
    code = (
        "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).kvg_cpu_isa; "
        "f.restype = ctypes.c_char_p; print(f().decode())"
    )
    processor()
    env = os.environ | {"KVGRAPH_CPU_ISA": "avx2"}
    command = [sys.executable, "-c", code, str(native.library_path("cpu"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "avx2"


@pytest.mark.parametrize("name", X86)
@pytest.mark.parametrize(
    ("pool", "kv_heads", "granularity"),
    [("bfloat16", 2, 0), ("bfloat16", 8, 0), ("int8", 2, 64), ("int8", 16, 128)],
)
def test_results_do_not_depend_on_threads_or_on_other_rows(
    name: str, pool: str, kv_heads: int, granularity: int
) -> None:
    """Of 8 heads in bfloat16, and of 16 in int8, a task takes all or one: steps of 8 or 32 keys."""
    rows = ((3000, 1), (40, 5), (0, 90), (700, 1))
    heads, groups = max(8, kv_heads), granularity
    case = Case(
        "paged_attention", "bfloat16", pool, heads, kv_heads, 128, rows=rows, granularity=groups
    )
    with forced_isa(name) as library:
        results = []
        for threads in (1, 16):
            library.dll.kvg_cpu_set_num_threads(threads)
            results.append(attend(case))
        library.dll.kvg_cpu_set_num_threads(0)
        operands = build(case)
        alone = [operands.inputs[i.name] for i in operands.spec.inputs]
        alone[0], alone[2], alone[3], alone[4] = (
            operands.inputs["q"][:1],  # type: ignore[index]
            np.array([0, 1], np.int32),
            np.array([3000], np.int32),
            operands.inputs["lookup_table"][:1],  # type: ignore[index]
        )
        single = native.run(operands.spec, *alone, **operands.attributes)
    assert results[0].tobytes() == results[1].tobytes()
    assert single.tobytes() == results[0][:1].tobytes()


POOLS = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


@pytest.mark.parametrize("name", X86)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tokens", "window"),
    [(4, 2, 128, 600, 0), (8, 1, 64, 2500, 0), (4, 4, 80, 2500, 100), (2, 1, 520, 600, 0)],
)
def test_results_do_not_depend_on_the_chunk(
    name: str, pool: str, heads: int, kv_heads: int, head_dim: int, tokens: int, window: int
) -> None:
    """A token's query comes alone, with a few others or with all of a prompt; contexts are split
    among tasks from 1,024 tokens on, and windows begin inside of a tile of keys."""
    case = Case(
        "paged_attention",
        "float32",
        pool,
        heads,
        kv_heads,
        head_dim,
        rows=((20, tokens),),
        window=window,
        granularity=head_dim if pool in ("int8", "float8_e4m3fn") else 0,
    )
    operands = build(case)
    if window:
        operands.inputs["q"] *= 50  # nearly all weight is on one key
    with forced_isa(name):
        whole = native.run(operands.spec, *inputs_of(operands), **operands.attributes)
        for start, end in [chunk for chunk in CHUNKS if chunk[1] <= tokens]:
            part = inputs_of(operands)
            part[0] = part[0][start:end]
            part[2] = np.array([0, len(part[0])], np.int32)
            part[3] = np.array([20 + start], np.int32)
            found = native.run(operands.spec, *part, **operands.attributes)
            assert found.tobytes() == whole[start:end].tobytes()


@pytest.mark.parametrize("name", X86)
def test_the_sign_of_zero_does_not_depend_on_the_chunk(name: str) -> None:
    """A negative output that underflows in bfloat16 products: alone, and with a next token whose
    key is in another tile."""
    keys = 33
    pool = np.zeros((1, 2, 1, 64, 1, 2), bfloat16)
    pool[0, 0, 0, 0], pool[0, 1, 0, 1:-1], pool[0, 1, 0, keys - 1] = 84, -0.01, 1
    q = np.full((2, 1, 2), 0.5, np.float32)
    found = []
    with forced_isa(name):
        for count in (1, 2):
            offsets, page = np.array([0, count], np.int32), np.zeros((1, 1), np.int32)
            cached = np.array([keys - 2], np.int32)
            most = np.array([[count, keys - 2 + count]], np.int32)
            index = offsets, cached, page, most
            out = native.run(PAGED_ATTENTION, q[:count], pool, *index, None, None, layer=0, scale=1)
            found.append(out[0].tobytes())
    assert found[0] == found[1]


CHUNKS = ((0, 1), (100, 103), (333, 334), (64, 350), (400, 404), (590, 600), (400, 600))
CHUNKS += ((900, 1100), (1500, 1501), (2000, 2007), (2100, 2300))


def inputs_of(operands: Operands) -> list[np.ndarray[Any, Any]]:
    return [operands.inputs[each.name] for each in operands.spec.inputs]
