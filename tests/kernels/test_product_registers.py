"""No kernel for sm_90 writes a register that an asynchronous product still reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")

from kvgraph.errors import KernelError
from kvgraph.kernels import aot, sass, variants
from kvgraph.kernels.experts_plan import experts_variants
from kvgraph.kernels.linear_plan import linear_variants
from kvgraph.kernels.shapes import AttentionShape, PoolShape
from kvgraph.kernels.variants import Variant
from kvgraph.ops.packed import E2M1, E4M3, EIGHTHS, INT8
from tests.support.matrix_products import LLAMA_8B, QWEN3_30B, in_form

LOOP = """
        /*0100*/                   IMAD.U32 R{written}, RZ, RZ, UR14 ;
        /*0110*/                   LDS.128 R20, [R4+0x200] ;
        /*0120*/                   HGMMA.64x64x16.F32.BF16 R56, R{first}, gdesc[UR16], R56, gsb0 ;
        /*0130*/                   WARPGROUP.DEPBAR.LE gsb0, {kept:#x} ;
        /*0140*/              @!P4 BRA 0x100 ;
        /*0150*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0160*/                   IMAD.U32 R{first}, RZ, RZ, UR14 ;
"""


@pytest.mark.parametrize(
    ("written", "first", "kept", "found"),
    [
        (90, 88, 1, ["IMAD.U32 R90, RZ, RZ, UR14"]),
        (90, 88, 0, []),  # waited for in each step
        (92, 88, 1, []),  # registers of nothing
        (30, 23, 1, ["LDS.128 R20, [R4+0x200]"]),  # the last of four
    ],
)
def test_what_a_step_writes_while_the_one_before_is_read_is_found(
    written: int, first: int, kept: int, found: list[str]
) -> None:
    code = sass.parse(LOOP.format(written=written, first=first, kept=kept))
    assert len(code) == 7
    assert sass.written_while_read(code) == found


FORMS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int8 of 64": {"bits": 8, "group": 64, "codes": INT8},
    "FP8 of 128": {"bits": 8, "group": 128, "codes": E4M3},
    "int4": {"bits": 4},
    "int4 of 32 with offsets": {"bits": 4, "group": 32, "offsets": True},
    "eighths": {"bits": 4, "group": 32, "codes": EIGHTHS, "offsets": True},
    "FP4 of 32": {"bits": 4, "group": 32, "codes": E2M1},
}


def linears(form: dict[str, Any], dtype: str) -> list[Variant]:
    shapes = [
        in_form(replace(LLAMA_8B[name], dtype=dtype), **form) for name in ("gate and up", "down")
    ]
    return [variant for shape in shapes for variant in linear_variants(shape, "sm_90")]


def experts(form: dict[str, Any], dtype: str) -> list[Variant]:
    shape = in_form(replace(QWEN3_30B, dtype=dtype), **form)
    return list(experts_variants(shape, "sm_90"))


def attention() -> list[Variant]:
    found: list[Variant] = []
    for head_dim in (64, 128):
        for pool, granularity in (("bfloat16", 0), ("float8_e4m3fn", head_dim), ("int8", 32)):
            cache = PoolShape("bfloat16", pool, 2, head_dim, 128, 1, 0, granularity)
            found += variants.attention_variants(AttentionShape(cache, 8, 0.1), "sm_90")
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("made_of", [linears, experts])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_products_of_small_weights_keep_their_registers(
    made_of: Callable[[dict[str, Any], str], list[Variant]], form: str, dtype: str
) -> None:
    require_kept(made_of(FORMS[form], dtype))


def test_products_of_plain_experts_and_attention_keep_their_registers() -> None:
    require_kept([*experts({"bits": 0}, "bfloat16"), *attention()])


def require_kept(made: list[Variant]) -> None:
    products = aot.compile_all((variant for variant in made if variant.role), "sm_90")
    assert any(aot.ASYNCHRONOUS in one.ptx for one in products)


def disassembler(folder: Path, said: str, code: int = 0) -> str:
    """Says the same of every file."""
    (folder / "said").write_text(said)
    tool = folder / "cuobjdump"
    tool.write_text(f"#!/bin/sh\ncat {folder / 'said'} >&{2 if code else 1}\nexit {code}\n")
    tool.chmod(0o755)
    return str(tool)


def test_a_kernel_that_writes_them_is_refused(tmp_path: Path) -> None:
    fine = disassembler(tmp_path, LOOP.format(written=92, first=88, kept=1))
    sass.require_kept(b"", fine, "kernel for sm_90")
    wrong = disassembler(tmp_path, LOOP.format(written=90, first=88, kept=1))
    with pytest.raises(KernelError) as error:
        sass.require_kept(b"", wrong, "kernel for sm_90")
    assert str(error.value) == (
        "kernel for sm_90: expected registers that stay as they are while a product reads them, "
        "got 'IMAD.U32 R90, RZ, RZ, UR14' before the wait for it; report the model and Triton's "
        "version"
    )


def test_machine_code_that_is_not_shown_is_not_taken_for_right(tmp_path: Path) -> None:
    empty = disassembler(tmp_path, "")
    sentence = f"kernel: expected products in its machine code, from {empty}, got none in 0 "
    with pytest.raises(KernelError, match=f"^{re.escape(sentence)}"):
        sass.require_kept(b"", empty, "kernel")
    with pytest.raises(KernelError, match=r"disassembler, got an error \(no cubin\); install"):
        sass.require_kept(b"", disassembler(tmp_path, "no cubin\nat all\n", 1), "kernel")
    with pytest.raises(
        KernelError, match=r"got an error \(.*No such file.*\); install Triton again"
    ):
        sass.require_kept(b"", str(tmp_path / "gone"), "kernel")
