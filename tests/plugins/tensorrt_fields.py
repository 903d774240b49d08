"""Fields of TensorRT's plugins without a compiler: real variants, made-up cubins."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from kvgraph.kernels import variants
from kvgraph.kernels.aot import Compiled, Resources
from kvgraph.kernels.record import pack_images, pack_kernels
from kvgraph.kernels.shapes import AttentionShape, HeadNorm, PoolShape, Rope
from tests.support.fake_driver import cubin

SHARED_BYTES = 49664
"""Of every made-up kernel: above what needs no attribute."""


def shape_of(
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    *,
    dtype: str = "bfloat16",
    pool_dtype: str = "bfloat16",
    window: int = 0,
    sinks: bool = False,
    granularity: int = 0,
    rope: Rope | None = None,
    norm: HeadNorm | None = None,
) -> AttentionShape:
    cache = PoolShape(dtype, pool_dtype, kv_heads, head_dim, 16, 4, granularity=granularity)
    scale = head_dim**-0.5
    return AttentionShape(cache, heads, scale, window, sinks=sinks, rope=rope, norm=norm)


def compiled(shape: AttentionShape, arch: str) -> list[Compiled]:
    """Each with an image of its own, which the fake driver tells by the first four of its tag."""
    store = variants.store_variant(shape)
    used = Resources(64, SHARED_BYTES, 0, 0, 0)
    flags = int(arch.removeprefix("sm_")) << 8 | 0x06000004
    made = []
    for variant in [store, *variants.attention_variants(shape, arch)]:
        tag = hashlib.sha256(variant.name.encode()).hexdigest()[:4].encode()
        made.append(
            Compiled(variant, arch, entry_of(variant), cubin(flags, tag=tag), "", used, 0.0)
        )
    return made


def entry_of(variant: variants.Variant) -> str:
    """A name that ends in the parameters' kinds: the fake driver reads arguments by it."""
    kinds = "".join("p" if p.type.startswith("*") else "i" for p in variant.parameters)
    role = variant.role or variant.kernel.name
    return f"{role.replace('_', '')}_{kinds}"


def fields_of(shape: AttentionShape, archs: Sequence[str]) -> tuple[bytes, bytes]:
    """The fields `kernels` and `images`."""
    kernels: Mapping[str, list[Compiled]] = {arch: compiled(shape, arch) for arch in archs}
    images = dict.fromkeys(k.cubin for of in kernels.values() for k in of)
    return pack_kernels(shape, kernels), pack_images(images)


def record_of(shape: AttentionShape, archs: Sequence[str]) -> bytes:
    return fields_of(shape, archs)[0]
