"""What TensorRT's plugins are given besides an op's attributes: the fields of plugins/tensorrt/.

`kernels` is text: the constants that an attention's kernels were compiled for, and for each
architecture how they are tiled, launched and found (plugins/launch/kernels.h has its grammar).
`images` holds cubins by SHA-256. Equal cubins of an engine travel once, in the first node.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence

from kvgraph.contract.dims import ceildiv
from kvgraph.kernels import launch, shapes
from kvgraph.kernels.aot import Compiled
from kvgraph.kernels.shapes import AttentionShape

HEADER = "kvgraph-kernels 1"

ROLES = {"store_kv": "store", "merge_parts": "merge"}
"""Kernel -> role in a plugin's plan; paged_attention's variants say theirs."""

IMAGE_HEADER = struct.Struct("<32sQ")


def kernels_text(shape: AttentionShape, compiled: Mapping[str, Sequence[Compiled]]) -> str:
    """The field `kernels` of every op of `shape`, from its kernels by architecture."""
    cache = shape.cache
    lines = [HEADER, f"type T {cache.dtype}", f"type P {cache.pool_dtype}"]
    lines += [f"dim {name} {extent}" for name, extent in _dims(shape).items()]
    lines += [f"attribute {name} {value!r}" for name, value in _attributes(shape).items()]
    for arch, kernels in compiled.items():
        lines.append(_arch(shape, arch))
        lines += [_kernel(kernel) for kernel in kernels]
    return "\n".join(lines) + "\n"


def _dims(shape: AttentionShape) -> dict[str, int]:
    cache = shape.cache
    dims = {
        "num_layers": cache.num_layers,
        "page_size": cache.page_size,
        "num_kv_heads": cache.kv_heads,
        "head_dim": cache.head_dim,
        "v_head_dim": cache.v_width,
        "num_heads": shape.heads,
    }
    if cache.granularity:
        dims["scales_per_head"] = ceildiv(cache.head_dim, cache.granularity)
    if shape.rope:
        dims["rotary_dim"] = shape.rope.rotary_dim
    return dims


def _attributes(shape: AttentionShape) -> dict[str, float | int]:
    attributes = {
        "scale": float(shape.scale),
        "window": shape.window,
        "softcap": float(shape.softcap),
        "causal": int(shape.causal),
    }
    if shape.rope:
        attributes["rope_style"] = int(shape.rope.interleaved)
    return attributes


def _arch(shape: AttentionShape, arch: str) -> str:
    store = launch.store_variant(shape.cache, shape.rope).constants["BLOCK_R"]
    prefill = shapes.prefill_tiles(shape, arch).block_m // shape.group
    decode = shapes.decode_tiles(shape, arch).block_m // shape.group
    devices = shapes.MULTIPROCESSORS[arch]
    limits = f"{shapes.MIN_PART} {shapes.MAX_PARTS}"
    return f"arch {arch} {devices} {store} {prefill} {decode} {limits}"


def _kernel(kernel: Compiled) -> str:
    variant = kernel.variant
    role = variant.role or ROLES[variant.kernel.name]
    parameters = [
        f"{p.name}*{launch.ALIGNMENT if p.aligned else 1}" if p.type.startswith("*") else p.name
        for p in variant.parameters
    ]
    digest = hashlib.sha256(kernel.cubin).hexdigest()
    said = [role, kernel.entry, variant.num_warps, kernel.resources.shared, digest, *parameters]
    return "kernel " + " ".join(map(str, said))


def image_digests(text: str) -> list[str]:
    """SHA-256 of every image that a field `kernels` names, each once, in its order."""
    words = (line.split() for line in text.splitlines())
    return list(dict.fromkeys(w[5] for w in words if w[:1] == ["kernel"]))


def pack_images(images: Iterable[bytes]) -> bytes:
    """The field `images`: for each its SHA-256, its size (u64, little-endian) and its bytes."""
    return b"".join(
        IMAGE_HEADER.pack(hashlib.sha256(image).digest(), len(image)) + image for image in images
    )
