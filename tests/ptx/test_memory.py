"""Loads, stores, copies and barriers: what they do, and each fault by a text that has it."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraph import ptx
from kvgraph.errors import KernelError, KernelFaultError
from tests.ptx.programs import addresses, kernel, run

ALL = "mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 2;\nmov.u32 %r10, smem;\nadd.s32 %r11, %r10, %r2;\n"
"""%r1: the thread, %r11: its word of shared memory."""


def vectors(count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count * 4, dtype=np.uint32), np.zeros(count * 4, np.uint32)


def test_vectors_and_predicates() -> None:
    x, y = vectors()
    text = kernel(
        f"""{addresses(16, 16)}
        setp.lt.s32 %p1, %r0, 40;
        mov.b32 %r1, 7;
        mov.b32 %r2, 7;
        mov.b32 %r3, 7;
        mov.b32 %r4, 7;
        @%p1 ld.global.L1::evict_last.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d1 + 0];
        @!%p1 st.global.v2.b32 [%d2+8], {{%r1, %r2}};
        @%p1 st.global.v4.b32 [ %d2 + 0 ], {{%r4, %r3, %r2, %r1}};
        ret;"""
    )
    run(text, x, y, threads=64)
    want = x.reshape(64, 4)[:, ::-1].copy()
    want[40:] = [0, 0, 7, 7]
    assert (y.reshape(64, 4) == want).all()


@pytest.mark.parametrize(
    ("access", "sentence"),
    [
        ("ld.global.b32 %r1, [%d1+4];", "got byte 128 of a, which has 128"),
        ("ld.global.b32 %r1, [%d1+-4];", "got byte -4 of a"),
        ("st.global.b32 [%d1+4], %r0;", "got byte 128 of a, which has 128"),
        ("ld.global.b16 %h1, [%d1+1];", "expected an address that is a multiple of 2"),
        ("ld.global.v2.b32 {%r1, %r2}, [%d1];", "expected an address that is a multiple of 8"),
        ("ld.shared.b32 %r1, [%r0+1024];", "inside of 1024 bytes of shared memory, got byte 1024"),
        ("st.shared.b32 [%r0+-4], %r0;", "inside of 1024 bytes of shared memory, got byte -4"),
    ],
)
def test_an_address_outside_is_a_fault(access: str, sentence: str) -> None:
    x, y = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    text = kernel(f"{addresses(4, 4)}\nshl.b32 %r0, %r0, 2;\n{access}\nret;")
    with pytest.raises(
        KernelFaultError, match=r"^k, line \d+, block \(0, 0, 0\), thread "
    ) as raised:
        run(text, x, y, shared=1024)
    assert sentence in str(raised.value)
    assert str(raised.value).endswith(f"({access[:-1]})")


def test_buffers_are_apart_and_a_sum_of_both_is_none() -> None:
    memory = ptx.Memory()
    a, b = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    first, second = memory.add(a, "a"), memory.add(b, "b")
    assert second - first > 100 + 4096
    with pytest.raises(KernelError, match=r"c: expected 8 free bytes at 0x.*, got a"):
        memory.map(first + 8, np.zeros(8, np.uint8), "c")
    memory.remove(first)
    memory.map(first + 8, np.zeros(8, np.uint8), "c")
    with pytest.raises(KernelError, match="expected the address of a buffer, got none"):
        memory.remove(first)
    with pytest.raises(KernelError, match="d: expected a C-contiguous array"):
        memory.add(np.zeros((4, 4))[:, ::2], "d")


def test_accesses_of_several_buffers_in_one_step() -> None:
    memory = ptx.Memory()
    parts = [np.full(16, i + 1, np.uint32) for i in range(2)]
    table = np.array([memory.add(part, f"part{i}") for i, part in enumerate(parts)], np.uint64)
    out = np.zeros(32, np.uint32)
    text = kernel(
        f"""{addresses(0, 4)}
        and.b32 %r1, %r0, 1;
        mad.wide.s32 %d3, %r1, 8, %d1;
        ld.global.b64 %d4, [%d3];
        shr.u32 %r2, %r0, 1;
        mad.wide.s32 %d4, %r2, 4, %d4;
        ld.global.b32 %r3, [%d4];
        st.global.b32 [%d2], %r3;
        ret;"""
    )
    arguments = [memory.add(table, "table"), memory.add(out, "out")]
    found = ptx.parse(text).kernels["k"]
    ptx.run(found, memory, grid=(1, 1, 1), threads=32, arguments=arguments)
    assert (out == np.tile([1, 2], 16)).all()


EXCHANGE = f"""{addresses(4, 4)}
    {ALL}
    ld.global.b32 %r3, [%d1];
    st.shared.b32 [%r11], %r3;
    BARRIER
    xor.b32 %r4, %r2, 252;
    add.s32 %r12, %r10, %r4;
    ld.shared.b32 %r5, [%r12];
    AGAIN
    st.shared.b32 [%r11], %r5;
    st.global.b32 [%d2], %r5;
    ret;"""


def exchange(first: str, second: str, order: int | None) -> np.ndarray:
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    text = kernel(EXCHANGE.replace("BARRIER", first).replace("AGAIN", second))
    run(text, x, y, threads=64, grid=2, shared=256, order=order)
    return y


@pytest.mark.parametrize("order", [None, 0, 1, 2])
def test_barriers_keep_warps_apart(order: int | None) -> None:
    found = exchange("bar.sync 0;", "bar.sync 0;", order)
    assert (found.reshape(2, 64) == np.arange(128).reshape(2, 64)[:, ::-1]).all()


@pytest.mark.parametrize("order", [None, 0, 1, 2])
def test_a_missing_barrier_is_a_fault_in_every_order(order: int | None) -> None:
    with pytest.raises(KernelFaultError, match=r"expected bytes that were written|no barrier"):
        exchange("", "bar.sync 0;", order)
    with pytest.raises(
        KernelFaultError, match=r"another warp's (read|write) before it and no barrier"
    ):
        exchange("bar.sync 0;", "", order)


def test_bytes_that_nobody_wrote_are_a_fault() -> None:
    text = kernel(
        f"{addresses(4, 4)}{ALL} ld.shared.b32 %r3, [%r11]; st.global.b32 [%d2], %r3; ret;"
    )
    with pytest.raises(KernelFaultError, match="expected bytes that were written"):
        run(text, *vectors(32), shared=128)
    run(text, *vectors(32), shared=128, checks=False)


def test_a_register_that_was_not_written_is_a_fault() -> None:
    body = f"""{addresses(4, 4)}
        setp.lt.s32 %p1, %r0, 8;
        @%p1 mov.b32 %r3, 1;
        st.global.b32 [%d2], %r3;
        ret;"""
    with pytest.raises(KernelFaultError, match=r"thread 8: expected a value in %r3"):
        run(kernel(body), *vectors(32))
    assert (run_out(kernel(body.replace("@%p1 mov", "mov")))[:32] == 1).all()


def test_of_an_instruction_that_is_not_run_no_register_is_read() -> None:
    body = f"""{addresses(4, 4)}
        setp.lt.s32 %p1, %r0, 8;
        @%p1 ld.global.b32 %r3, [%d1];
        @%p1 st.global.b32 [%d2], %r3;
        ret;"""
    x, y = vectors(32)
    run(kernel(body), x, y)
    assert (y[:32] == np.where(np.arange(32) < 8, x[:32], 0)).all()
    with pytest.raises(KernelFaultError, match=r"thread 8: expected a value in %r3"):
        run(kernel(body.replace("@%p1 st", "st")), *vectors(32))
    guard = body.replace("@%p1 ld", "@%p1 setp.ne.s32 %p2, %r0, 0;\n@%p2 ld")
    with pytest.raises(KernelFaultError, match=r"thread 8: expected a value in %p2"):
        run(kernel(guard), *vectors(32))


def run_out(text: str) -> np.ndarray:
    x, y = vectors(32)
    run(text, x, y)
    return y


def test_a_barrier_that_not_all_reach_is_a_fault() -> None:
    text = kernel(
        """mov.u32 %r1, %tid.x;
        setp.lt.s32 %p1, %r1, 32;
        @%p1 bra END;
        bar.sync 0;
        END:
        ret;"""
    )
    with pytest.raises(KernelFaultError, match=r"expected all 64 threads .*, got 32 that wait"):
        run(text, *vectors(32), threads=64)


def test_a_part_of_a_warp_takes_no_part_in_a_shuffle_of_all() -> None:
    text = kernel(
        """mov.u32 %r1, %tid.x;
        setp.lt.s32 %p1, %r1, 7;
        @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
        ret;"""
    )
    with pytest.raises(KernelFaultError, match="expected all threads of the member mask"):
        run(text, *vectors(32))


@pytest.mark.parametrize(
    "step",
    [
        "shfl.sync.idx.b32 %r2, %r1, 0, 31, 7;",
        "vote.sync.ballot.b32 %r2, %p1, 7;",
        "redux.sync.add.s32 %r2, %r1, 7;",
        "bar.warp.sync 7;",
    ],
)
def test_a_thread_outside_of_its_member_mask_is_a_fault(step: str) -> None:
    text = kernel(f"mov.u32 %r1, %tid.x;\nsetp.lt.s32 %p1, %r1, 3;\n{step}\nret;")
    with pytest.raises(
        KernelFaultError,
        match=r"thread 3: expected each thread in its own member mask, got one outside",
    ):
        run(text, *vectors(32))


def test_member_masks_of_threads_that_are_not_here_do_not_count() -> None:
    text = kernel(
        f"""{addresses(4, 4)}
        setp.lt.s32 %p1, %r0, 8;
        @%p1 mov.b32 %r4, 255;
        @%p1 shfl.sync.idx.b32 %r3, %r0, 5, 31, %r4;
        @%p1 st.global.b32 [%d2], %r3;
        ret;"""
    )
    assert (run_out(text).view(np.int32)[:8] == 5).all()


COPY = f"""{addresses(16, 16)}
    {ALL}
    shl.b32 %r2, %r1, 4;
    add.s32 %r11, %r10, %r2;
    mov.b32 %r9, SIZE;
    cp.async.cg.shared.global [%r11 + 0], [%d1 + 0], 0x10, %r9;
    cp.async.commit_group;
    cp.async.commit_group;
    WAIT
    ld.shared.v4.b32 {{%r3, %r4, %r5, %r6}}, [%r11];
    st.global.v4.b32 [%d2], {{%r3, %r4, %r5, %r6}};
    ret;"""


@pytest.mark.parametrize("wait", ["cp.async.wait_group 0;", "cp.async.wait_group 1;"])
@pytest.mark.parametrize("size", [16, 8, 0])
def test_copies_are_there_after_their_wait(wait: str, size: int) -> None:
    x, y = vectors(32)
    run(kernel(COPY.replace("WAIT", wait).replace("SIZE", str(size))), x, y, shared=512)
    want = x.reshape(32, 4).copy()
    want[:, size // 4 :] = 0
    assert (y.reshape(32, 4) == want).all()


@pytest.mark.parametrize("wait", ["", "cp.async.wait_group 2;"])
def test_a_missing_wait_is_a_fault(wait: str) -> None:
    text = kernel(COPY.replace("WAIT", wait).replace("SIZE", "16"))
    with pytest.raises(KernelFaultError, match=r"got a copy that was not waited for|were written"):
        run(text, *vectors(32), shared=512)


def test_a_copy_that_nobody_waits_for_is_a_fault() -> None:
    body = COPY[: COPY.index("WAIT")].replace("SIZE", "16") + "ret;"
    with pytest.raises(KernelFaultError, match="expected a wait for every asynchronous copy"):
        run(kernel(body), *vectors(32), shared=512)


def test_counters_see_scattered_and_broadcast_reads() -> None:
    x, y = np.zeros(32 * 8, np.uint32), np.zeros(32, np.uint32)
    near = kernel(f"{addresses(4, 4)} ld.global.b32 %r1, [%d1]; st.global.b32 [%d2], %r1; ret;")
    counters = run(near, x, y, profile=True)
    assert (counters.global_reads["a"].sectors, counters.global_reads["a"].ideal) == (4, 4)
    assert counters.global_writes["b"].bytes == 128
    far = kernel(f"{addresses(32, 4)} ld.global.b32 %r1, [%d1]; st.global.b32 [%d2], %r1; ret;")
    counters = run(far, x, y, profile=True)
    assert (counters.global_reads["a"].sectors, counters.global_reads["a"].ideal) == (32, 4)
    same = kernel(f"{addresses(0, 4)} ld.global.b32 %r1, [%d1]; st.global.b32 [%d2], %r1; ret;")
    assert run(same, x, y, profile=True).global_reads["a"].sectors == 1


@pytest.mark.parametrize(("shift", "ways"), [(2, 1), (3, 2), (7, 32), (0, 1)])
def test_counters_see_bank_conflicts(shift: int, ways: int) -> None:
    text = kernel(
        f"""mov.u32 %r1, %tid.x;
        shl.b32 %r2, %r1, {shift};
        and.b32 %r2, %r2, -4;
        mov.b32 %r3, 5;
        st.shared.b32 [%r2], %r3;
        ret;"""
    )
    counters = run(text, *vectors(32), shared=4096, profile=True)
    assert (counters.shared_requests, counters.ideal_wavefronts) == (1, 1)
    assert counters.wavefronts == ways


def test_launches_that_do_not_fit() -> None:
    text = kernel("ret;", threads=64)
    found = ptx.parse(text).kernels["k"]
    assert (found.threads, found.target) == (64, "sm_90a")
    fine = {"grid": (1, 1, 1), "threads": 64, "arguments": [0, 0]}
    ptx.run(found, ptx.Memory(), **fine)
    for change, sentence in (
        ({"grid": (0, 1, 1)}, r"a grid of at least one block, got \(0, 1, 1\)"),
        ({"threads": 32}, r"64 threads \(.reqntid\), got 32"),
        ({"threads": 48}, "whole warps of threads, got 48"),
        ({"arguments": [0]}, "2 arguments, got 1"),
    ):
        with pytest.raises(KernelError, match=f"^k: expected {sentence}"):
            ptx.run(found, ptx.Memory(), **fine | change)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("tcgen05.alloc.sync [%r1], 32;", "an instruction that is modelled, got 'tcgen05.alloc"),
        ("add.sat.s32 %r1, %r2, %r3;", "modifiers of add that are modelled, got"),
        ("cvt.rn.relu.f16.f32 %h1, %r2;", "modifiers of cvt that are modelled, got"),
        ("add.s32 %r1, %r2;", "3 operands, got"),
        ("add.s32 %r1, %r99, 1;", "a special register that is modelled instead of %r99, got"),
        ("mov.u32 %r1, %clock;", "a special register that is modelled instead of %clock, got"),
        ("bra NOWHERE;", "a label of the kernel, got"),
        ("ld.global.b32 %r1, [p0 + %r2];", "an address instead of"),
        ("ld.param.b64 %d1, [p7];", "a parameter of the kernel, got"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r4};",
         "an instruction that is modelled, got 'mma"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused_with_its_line(body: str, sentence: str) -> None:
    text = kernel(f"\n{body}\nret;")
    with pytest.raises(KernelError, match=r"^k, line \d+: expected ") as raised:
        run(text, *vectors(32))
    assert sentence in str(raised.value)
    assert not isinstance(raised.value, KernelFaultError)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda text: text[: text.rindex("}")],
            "expected a closing brace, got the end of the text",
        ),
        (lambda text: "", "expected .version, .target and .address_size 64, got none"),
        (lambda text: text[: text.index(".visible")], "expected an entry point, got none"),
        (lambda text: text.replace(".u64 p1", ".u64 p1[4]"), "expected a scalar parameter, got"),
        (lambda text: text.replace("ret;", "ret"), "expected a statement, got 'ret'"),
    ],
)
def test_texts_that_are_damaged(damage: object, sentence: str) -> None:
    with pytest.raises(KernelError, match=r"^PTX") as raised:
        ptx.parse(damage(kernel("mov.b32 %r1, 0;\nret;")))  # type: ignore[operator]
    assert sentence in str(raised.value)


def test_names_of_inline_assembly_are_its_own() -> None:
    body = f"""{addresses(4, 4)}
        mov.b32 %r1, 3;
        {{
        .reg .b32 t<2>;
        .reg .pred p;
        mov.b32 t0, 5;
        {{ .reg .b32 t<2>; mov.b32 t0, 9; }}
        again:
        add.s32 t0, t0, %r1;
        setp.lt.s32 p, t0, 20;
        @p bra again;
        mov.b32 %r2, t0;
        }}
        {{ again: mov.b32 %r1, 1; }}
        st.global.b32 [%d2], %r2;
        ret;"""
    assert (run_out(kernel(body))[:32] == 20).all()
