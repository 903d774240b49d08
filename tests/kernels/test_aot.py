"""Kernels compiled for GPUs that this machine does not have: cubins, metadata, PTX."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")

from triton.backends.compiler import GPUTarget

from kvgraph.errors import UnsupportedError
from kvgraph.kernels import aot, variants
from kvgraph.kernels.aot import Resources
from kvgraph.kernels.shapes import AttentionShape, PoolShape
from kvgraph.kernels.variants import Variant
from tests.kernels.table import instructions, shape_of

pytestmark = [
    pytest.mark.fresh_kernels,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreting process compiles nothing"
    ),
]

SHAPE = shape_of("bfloat16", "bfloat16", 128, 128, 0)
PREFILL = {
    "sm_80": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "sm_120": "mma.sync",
}


@pytest.mark.parametrize("arch", PREFILL)
def test_prefill_uses_tensor_cores_and_wide_loads(arch: str) -> None:
    made = aot.compile_variant(variants.prefill_variant(SHAPE, arch), arch)
    counts = instructions(made.ptx)
    assert counts[PREFILL[arch]] > 0
    assert counts["cp.async 16"] >= 16, "keys and values travel in 16-byte copies"
    assert counts["ld.v4"] > 0, "queries are loaded 16 bytes at a time"
    assert made.resources.spill_stores == made.resources.spill_loads == 0
    assert 0 < made.resources.registers <= 255


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("pool", ["bfloat16", "float8_e4m3fn"])
def test_decode(arch: str, pool: str) -> None:
    granularity = 128 if pool == "float8_e4m3fn" else 0
    shape = shape_of("bfloat16", pool, 128, 16, granularity)
    made = aot.compile_variant(variants.decode_variant(shape, arch, split=True), arch)
    counts = instructions(made.ptx)
    assert counts["mma.sync"] > 0
    assert counts["cp.async 16"] >= 8
    assert made.resources.spill_stores == made.resources.spill_loads == 0


SPILLED = {
    "decode of halves": ("sm_80", "decode", ("float16", "float16", 128, 64, 0)),
    "decode of small heads": ("sm_90", "decode", ("bfloat16", "bfloat16", 64, 16, 0)),
    "decode of bytes": ("sm_80", "decode", ("bfloat16", "float8_e4m3fn", 128, 128, 128)),
    "prefill of bytes": ("sm_120", "prefill", ("bfloat16", "int8", 128, 128, 128)),
}
"""What the assembler spills when it chooses registers, or did with one stage more."""


@pytest.mark.parametrize("name", SPILLED)
def test_nothing_spills(name: str) -> None:
    arch, role, given = SPILLED[name]
    shape = shape_of(*given)
    decode = variants.decode_variant(shape, arch, split=False)
    variant = variants.prefill_variant(shape, arch) if role == "prefill" else decode
    used = aot.compile_variant(variant, arch).resources
    assert used.spill_stores == used.spill_loads == 0
    assert used.registers <= 255


@pytest.mark.parametrize(
    ("num_warps", "made", "asked"),
    [
        (8, [224, 240], [240]),
        (8, [240], []),
        (16, [112, 128], [128]),
        (16, [128], []),
        (32, [64], []),
        (8, [100, 100], [116]),
        (8, [100, 110, 110], [116, 126]),
        (8, [100, 90], [116]),
    ],
)
def test_a_kernel_that_spills_gets_no_more_registers_than_its_block_may_have(
    monkeypatch: pytest.MonkeyPatch, num_warps: int, made: list[int], asked: list[int]
) -> None:
    """Registers that the assembler takes in turn, each time with spills."""
    said: list[object] = []

    def compiled(*given: object) -> tuple[None, Resources]:
        said.append(given[-1])
        return None, Resources(made[len(said) - 1], 0, 8, 8, 8)

    monkeypatch.setattr(aot, "_compile", compiled)
    variant = replace(variants.store_variant(replace(SHAPE, rope=None)), num_warps=num_warps)
    target = GPUTarget("cuda", 80, 32)
    _, used = aot._without_spills(ModuleType("triton"), variant, "sm_80", target)
    assert said == [None, *asked]
    assert used.registers == made[-1]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_rows_are_loaded_16_bytes_at_a_time(arch: str) -> None:
    norm = variants.rms_norm_variant("bfloat16", 4096, 1e-5, residual=True, round_first=True)
    for variant in (norm, variants.silu_mul_variant("bfloat16", 14336)):
        made = aot.compile_variant(variant, arch)
        assert instructions(made.ptx)["ld.v4"] >= 2
        assert instructions(made.ptx)["ld.b16"] == 0
        assert "st.global.v4" in made.ptx
        assert made.resources.spill_stores == 0


def test_the_same_variant_gives_the_same_bytes() -> None:
    variant = variants.store_variant(SHAPE)
    first, second = (aot.compile_variant(variant, "sm_90") for _ in range(2))
    assert first.cubin == second.cubin
    assert first.metadata() == second.metadata()


def test_metadata_is_all_that_a_launcher_needs() -> None:
    variant = variants.decode_variant(SHAPE, "sm_90", split=False)
    made = aot.compile_variant(variant, "sm_90")
    said = json.loads(json.dumps(made.metadata()))
    assert made.cubin.startswith(b"\x7fELF")
    assert said["entry"] == "paged_attention"
    assert said["sha256"] == hashlib.sha256(made.cubin).hexdigest()
    assert (said["num_warps"], said["shared"]) == (4, made.resources.shared)
    assert said["parameters"][0] == ["q", "*bf16"]
    assert [name for name, _ in said["parameters"]][-1] == "num_parts"
    assert not {"kv_scales", "sinks", "partial_out"} & {name for name, _ in said["parameters"]}
    assert len(entry_parameters(made.ptx)) == len(said["parameters"]) + 2
    assert str(aot.__file__).rsplit("/", 1)[0].encode() not in made.cubin, "no paths in cubins"


def entry_parameters(ptx: str) -> list[str]:
    declared = ptx.split(".visible .entry", 1)[1].split(")", 1)[0]
    return [line for line in declared.splitlines() if ".param" in line]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_tiny_llama_compiles_for(arch: str) -> None:
    """head_dim 16, float32: what the example checkpoint is."""
    shape = AttentionShape(PoolShape("float32", "float32", 4, 16, 16, 4), 8, 0.25)
    listed: list[Variant] = [
        *variants.attention_variants(shape, arch),
        variants.store_variant(shape),
        variants.increment_variant(),
    ]
    made = list(aot.compile_all(listed, arch))
    assert [m.variant.name for m in made] == [v.name for v in listed]


def test_refuses_before_compiling() -> None:
    with pytest.raises(UnsupportedError, match="got 'sm_70'"):
        aot.compile_attention(SHAPE, "sm_70")
    with pytest.raises(UnsupportedError, match=r"float16 or float32 .*on sm_75, got bfloat16"):
        aot.compile_attention(SHAPE, "sm_75")
    cache = PoolShape("bfloat16", "bfloat16", 8, 128, 100, 32)
    with pytest.raises(UnsupportedError, match=r"page_size: .*got 100"):
        aot.compile_attention(AttentionShape(cache, 32, 0.1), "sm_90")
