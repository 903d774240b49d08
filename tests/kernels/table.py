"""What each kernel variant takes: registers, shared memory, spills, instructions, compile time.

python -m tests.kernels.table [arch ...]
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace

from kvgraph.errors import UnsupportedError
from kvgraph.kernels import aot, experts_plan, linear_plan, variants
from kvgraph.kernels.aot import Compiled
from kvgraph.kernels.route_plan import route_variant
from kvgraph.kernels.shapes import AttentionShape, PoolShape, Rope
from kvgraph.kernels.variants import Variant
from tests.support.matrix_products import LLAMA_8B, QWEN3_30B, in_form
from tests.support.routes import DEEPSEEK

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121")

# (dtype, pool dtype, head_dim, page_size, granularity): 32 query heads, 8 kv heads, rope.
COMMON = (
    ("bfloat16", "bfloat16", 64, 16, 0),
    ("bfloat16", "bfloat16", 80, 16, 0),
    ("bfloat16", "bfloat16", 96, 128, 0),
    ("bfloat16", "bfloat16", 128, 16, 0),
    ("bfloat16", "bfloat16", 128, 128, 0),
    ("bfloat16", "bfloat16", 256, 256, 0),
    ("float16", "float16", 128, 64, 0),
    ("bfloat16", "int8", 128, 128, 128),
    ("bfloat16", "float8_e4m3fn", 128, 128, 128),
)

TENSOR_CORES = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")


def shape_of(
    dtype: str, pool: str, head_dim: int, page_size: int, granularity: int
) -> AttentionShape:
    cache = PoolShape(dtype, pool, 8, head_dim, page_size, 32, 0, granularity)
    shape = AttentionShape(cache, 32, head_dim**-0.5, rope=Rope(head_dim))
    shape.check()
    return shape


def instructions(ptx: str) -> dict[str, int]:
    """Counts of what makes a kernel fast: tensor-core operations, 16-byte loads and copies."""
    patterns = {name: re.escape(name) + r"\." for name in TENSOR_CORES}
    patterns["cp.async 16"] = r"cp\.async\.cg\.[^\n]*, 0x10"
    patterns["ld.v4"] = r"ld\.global[a-z0-9_.:]*\.v4"
    patterns["ld.b16"] = r"ld\.global\.b16"
    return {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}


def line(what: str, made: Compiled) -> str:
    used, counts = made.resources, instructions(made.ptx)
    found = " ".join(f"{name} {count}" for name, count in counts.items() if count)
    return (
        f"{made.arch:7} {what:34} {made.variant.kernel.name + ' ' + made.variant.role:28} "
        f"{used.registers:4} {used.shared:7} {used.spill_stores:4}/{used.spill_loads:<4} "
        f"{made.seconds:5.1f} {len(made.cubin) // 1024:5}  {found}"
    )


def rows_variants(arch: str) -> list[Variant]:
    dtype = "float16" if arch == "sm_75" else "bfloat16"
    return [
        variants.rms_norm_variant(dtype, 4096, 1e-5, residual=True),
        variants.rms_norm_variant(dtype, 128, 1e-6),
        variants.rms_norm_variant(dtype, 512, 1e-6, x_stride=576),  # DeepSeek's latent
        variants.silu_mul_variant(dtype, 14336),
        route_variant(DEEPSEEK),
        variants.increment_variant(),
    ]


def product_variants(arch: str) -> list[tuple[str, Variant]]:
    """Of experts and linear layers of models that run on one GPU, by what they are."""
    dtype = "float16" if arch == "sm_75" else "bfloat16"
    found = []
    for bits in (0, 8, 4):
        experts = in_form(replace(QWEN3_30B, dtype=dtype), bits)
        name = f"experts {bits or 16} bits K2048 I768"
        found += [(name, v) for v in experts_plan.experts_variants(experts, arch) if v.role]
        for layer, given in LLAMA_8B.items() if bits else ():
            shape = in_form(replace(given, dtype=dtype), bits)
            variants_ = linear_plan.linear_variants(shape, arch)
            found += [(f"{layer} {bits} bits", variant) for variant in variants_]
    return found


def main() -> None:
    print("arch    shape                              kernel                       regs  shared"
          " spill/load     s    KB  PTX")  # fmt: skip
    spilled = total = 0
    seconds = 0.0
    for arch in sys.argv[1:] or ARCHS:
        for given in COMMON:
            dtype, pool, head_dim, page_size, granularity = given
            scales = f" g{granularity}" if granularity else ""
            what = f"{dtype} {pool} D{head_dim} S{page_size}{scales}"
            try:
                compiled = aot.compile_attention(shape_of(*given), arch)
            except UnsupportedError as error:
                print(f"{arch:7} {what:34} {error}", flush=True)
                continue
            for made in compiled:
                print(line(what, made), flush=True)
                total += 1
                spilled += made.resources.spill_stores > 0
                seconds += made.seconds
        for made in aot.compile_all(rows_variants(arch), arch):
            print(line(f"{made.variant.constants.get('WIDTH', '')}", made), flush=True)
            total += 1
            seconds += made.seconds
        for what, variant in product_variants(arch):
            made = aot.compile_variant(variant, arch)
            print(line(what, made), flush=True)
            total += 1
            spilled += made.resources.spill_stores > 0
            seconds += made.seconds
    print(f"{total} kernels, {seconds:.0f} s of compiling, {spilled} spill registers")


if __name__ == "__main__":
    main()
