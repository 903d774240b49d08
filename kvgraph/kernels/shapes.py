"""Constants of kernels, the values that they support, and the tiles of each architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.contract.devices import CUDA_ARCHS
from kvgraph.contract.dtypes import ACTIVATIONS, POOLS, QUANTIZED, itemsize
from kvgraph.contract.params import KVCacheParams
from kvgraph.errors import UnsupportedError

HEAD_DIMS = tuple(range(16, 513, 8))
PAGE_SIZES = (16, 32, 48, 64, 96, 128, 256)
MAX_GROUP = 128
"""Most query heads of one kv head: they share a tile."""

WIDE_HEAD, WIDE_GROUP = 256, 16
"""Above WIDE_HEAD elements of head_dim, one kv head may have at most WIDE_GROUP query heads."""

MAX_PARTS = 32
"""Most parts of a split context: one per lane of a warp. More parts would only cost time."""

MIN_PART = 256
"""Least keys of a part: with fewer keys the merge costs more than parallel reads save."""

MULTIPROCESSORS = {
    "sm_75": 40,
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 128,
    "sm_90": 132,
    "sm_100": 148,
    "sm_120": 170,
    "sm_121": 48,
}
"""Multiprocessors of a typical device, which only decide into how many parts a context is split."""

SHARED_MEMORY = {
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "sm_121": 101376,
}
"""Most bytes of shared memory of a block (CUDA programming guide, compute capabilities)."""


def capability(arch: str) -> int:
    """Compute capability of `arch`: 90 for "sm_90". UnsupportedError names the known ones."""
    if arch not in CUDA_ARCHS:
        raise UnsupportedError(f"arch: expected one of {list(CUDA_ARCHS)}, got {arch!r}")
    return int(arch.removeprefix("sm_"))


def check_arch(cache: PoolShape, arch: str) -> None:
    """Raise UnsupportedError for bfloat16 and wide heads on an architecture without them."""
    if capability(arch) >= 80:
        return
    if cache.head_dim > WIDE_HEAD:
        raise UnsupportedError(
            f"head_dim: expected at most {WIDE_HEAD} on {arch}, got {cache.head_dim}"
        )
    if "bfloat16" in (cache.dtype, cache.pool_dtype):
        raise UnsupportedError(
            f"dtype: expected float16 or float32 activations and a pool other than bfloat16 on "
            f"{arch}, got {cache.dtype} and {cache.pool_dtype}"
        )


def power_of_two(n: int, least: int = 1) -> int:
    """Smallest power of two >= max(n, least)."""
    return max(1 << max(n - 1, 0).bit_length(), least)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Constants of one pool and its activations. `granularity`: 0 if the pool is not quantised."""

    dtype: str
    pool_dtype: str
    kv_heads: int
    head_dim: int
    page_size: int
    num_layers: int
    v_head_dim: int = 0
    granularity: int = 0

    @classmethod
    def of(cls, leaf: KVCacheParams, dtype: str) -> PoolShape:
        """The shape of one shard of a leaf, with activations of `dtype`."""
        return cls(
            dtype=dtype,
            pool_dtype=leaf.pool_dtype,
            kv_heads=leaf.n_kv_heads_per_device,
            head_dim=leaf.head_dim,
            page_size=leaf.page_size,
            num_layers=leaf.num_layers,
            v_head_dim=leaf.v_head_dim if leaf.v_head_dim != leaf.head_dim else 0,
            granularity=leaf.scale_granularity if leaf.quantization else 0,
        )

    @property
    def v_width(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def quantized(self) -> str | None:
        return self.pool_dtype if self.pool_dtype in QUANTIZED else None

    def check(self) -> None:
        """Raise UnsupportedError, with the supported values, for one that no kernel supports."""
        _expect("dtype", self.dtype, ACTIVATIONS)
        _expect("pool dtype", self.pool_dtype, POOLS)
        if self.head_dim not in HEAD_DIMS:
            raise UnsupportedError(
                f"head_dim: expected a multiple of 8 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, "
                f"got {self.head_dim}"
            )
        if self.v_width % 8 or not 8 <= self.v_width <= self.head_dim:
            raise UnsupportedError(
                f"v_head_dim: expected a multiple of 8 from 8 to head_dim {self.head_dim}, "
                f"got {self.v_width}"
            )
        _expect("page_size", self.page_size, PAGE_SIZES)
        self.check_granularity()

    def check_granularity(self) -> None:
        if (self.quantized is None) != (self.granularity == 0):
            raise UnsupportedError(
                f"granularity: expected {'0' if self.quantized is None else 'at least 1'} "
                f"for a {self.pool_dtype} pool, got {self.granularity}"
            )
        if self.quantized is None:
            return
        whole = self.granularity >= self.head_dim and self.v_width == self.head_dim
        if not whole and (
            self.granularity & (self.granularity - 1) or self.v_width % self.granularity
        ):
            raise UnsupportedError(
                f"granularity: expected head_dim {self.head_dim} or a power of two that divides "
                f"v_head_dim {self.v_width}, got {self.granularity}"
            )


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `rotary_dim` elements of q's and k's heads."""

    rotary_dim: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of q's and k's heads. `offset` is added to its weights."""

    epsilon: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constants of one attention op. `rope`: None if update_and_attend gets no cos_sin; `norm`:
    None if it gets no q_norm."""

    cache: PoolShape
    heads: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    sinks: bool = False
    rope: Rope | None = None
    chunked: bool = False
    norm: HeadNorm | None = None

    @classmethod
    def of(cls, leaf: KVCacheParams, given: Mapping[str, Any]) -> AttentionShape:
        """The shape of an update_and_attend in a torch graph; it is the same when kernels are
        compiled and when they are launched. `given`: its arguments by name; a node's `meta["val"]`
        has dtype and shape."""
        query, table = given["q"].meta["val"], given["cos_sin"]
        rotary_dim = None if table is None else table.meta["val"].shape[1]
        norm = HeadNorm(given["norm_epsilon"], given["norm_offset"])
        return cls(
            cache=PoolShape.of(leaf, str(query.dtype).removeprefix("torch.")),
            heads=query.shape[1],
            scale=given["scale"],
            window=given["window"],
            softcap=given["softcap"],
            causal=bool(given["causal"]),
            sinks=given["sinks"] is not None,
            rope=None if rotary_dim is None else Rope(rotary_dim, bool(given["rope_style"])),
            chunked=bool(given["chunked"]),
            norm=None if given["q_norm"] is None else norm,
        )

    @property
    def head_constants(self) -> dict[str, int | float]:
        """Constants of the kernels that load heads of q or k."""
        norm, rope = self.norm, self.rope
        return {
            "NORM": norm is not None,
            "EPSILON": norm.epsilon if norm else 0.0,
            "OFFSET": norm.offset if norm else 0.0,
            "ROTARY": rope.rotary_dim if rope else 0,
            "INTERLEAVED": bool(rope and rope.interleaved),
        }

    @property
    def group(self) -> int:
        return self.heads // self.cache.kv_heads

    def check(self) -> None:
        """Raise UnsupportedError, with the supported values, for one that no kernel supports."""
        self.cache.check()
        is_wide = self.cache.head_dim > WIDE_HEAD
        most = WIDE_GROUP if is_wide else MAX_GROUP
        kv_heads = self.cache.kv_heads
        if kv_heads < 1 or self.heads % kv_heads or not 1 <= self.group <= most:
            width = f" of {self.cache.head_dim} elements" if is_wide else ""
            raise UnsupportedError(
                f"num_heads: expected 1 to {most} query heads for each of "
                f"{kv_heads} kv heads{width}, got {self.heads}"
            )


def _expect(name: str, value: str | int, supported: tuple[str | int, ...]) -> None:
    if value not in supported:
        raise UnsupportedError(f"{name}: expected one of {list(supported)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of `block_m` query rows (tokens x group) by `block_n` keys, and Triton's options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tiles(shape: AttentionShape, arch: str) -> Tiles:
    """Tiles for few query rows: the speed depends on the bytes of keys in flight."""
    width, rows = power_of_two(shape.cache.head_dim), power_of_two(shape.group, 16)
    if capability(arch) < 80:
        return Tiles(rows, 32, 4, 1)
    if itemsize(shape.cache.dtype) == 4:
        return Tiles(rows, 16 if width >= 128 else 32, 4, 2)
    small = SHARED_MEMORY[arch] < 2**17 or rows > 64
    keys = 8192 // width if not small else 4096 // width
    return Tiles(rows, min(max(keys, 16), 64), 4, 3)


def prefill_tiles(shape: AttentionShape, arch: str) -> Tiles:
    """Tiles for many query rows: as large as registers and shared memory allow without spills."""
    target, width = capability(arch), power_of_two(shape.cache.head_dim)
    least = power_of_two(shape.group, 16)
    if shape.cache.head_dim > WIDE_HEAD:
        return _wide_prefill_tiles(shape, arch)
    if target < 80:  # Triton has no tensor cores there
        return Tiles(max(32, least), 16, 8, 1)
    if itemsize(shape.cache.dtype) == 4:
        return Tiles(max(32, least), 16 if width >= 128 else 32, 8, 2)
    if target in (90, 100):
        return Tiles(max(64, least), 64, 8, 2) if width > 128 else Tiles(128, 64, 8, 3)
    if width > 128:
        return Tiles(max(64, least), 32, 8, 2)
    if width <= 64:
        return Tiles(128, 64, 8, 3)
    if target >= 120:
        # Quantised tiles are decoded in registers: a third stage would spill.
        return Tiles(128, 32, 8, 2 if shape.cache.quantized else 3)
    return Tiles(max(64, least), 32, 4, 3)


def _wide_prefill_tiles(shape: AttentionShape, arch: str) -> Tiles:
    """Tiles for heads of up to 512: a row of the output takes four registers of each thread."""
    if itemsize(shape.cache.dtype) == 4:
        return Tiles(16, 16, 8, 2)
    if SHARED_MEMORY[arch] < 2**17:
        return Tiles(32, 16, 8, 2)
    keys = 64 if capability(arch) >= 90 else 32
    return Tiles(32, keys // 2 if shape.cache.quantized else keys, 8, 2)
