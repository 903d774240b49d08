"""Tiles of matrix products with a weight, by the number of rows.

The rule is the mean number of rows per weight, an upper bound that the host knows. Tiles of few
rows have the least rows of a tensor core; their speed depends on the bytes of weights in flight.
Tiles of more rows use each byte more often. Tiles of sm_90 follow sweeps on an H100 and an H200
(docs/results/gpu.md), except for groups of 32 and 64: few kinds that are near the fastest of each
layer. Tiles of other architectures are as large as registers and shared memory allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.dtypes import itemsize
from kvgraph.errors import UnsupportedError
from kvgraph.kernels.shapes import capability
from kvgraph.kernels.variants import Constant, absent_of
from kvgraph.ops.matrices import group_of, span_of
from kvgraph.ops.packed import E4M3, WITH_OFFSETS, Form
from kvgraph.ops.packed_rules import form_of

FEW_ROWS = 16
ROLES_OF_OTHERS = {"few": FEW_ROWS, "many": 0}
"""Most rows of a step by role (0 for the last role), if no other roles of linear layers were
measured."""

ROLES = tuple(ROLES_OF_OTHERS)
"""Roles of these tiles; experts have the same."""

ROLES_OF_ROWS = {"few": FEW_ROWS, "rows32": 32, "rows64": 64, "rows128": 128}
"""Rows of a tile, and most rows of a step that uses it (the last role has no bound), for linear
layers on sm_90."""

ROLES_OF_ROUNDED = {"rows16": 16, "rows32": 32, "rows64": 256, "rows128": 512}
"""Most rows of a step by role (the last role has no bound), if x is rounded."""

SPREAD_COLUMNS = 16384
"""Least columns of a weight that give all multiprocessors a tile; the experts of a layer always do.
"""


MOST_TILES = 65535
"""Most programs of a grid's second dim, on all architectures."""


@dataclass(frozen=True, slots=True)
class MatrixTiles:
    """Tiles of `block_m` rows by `block_n` columns. `block_k`: inputs of a step, all under one
    scale; for nibbles half a span. `slices`: parts of the inputs that different warps sum."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    slices: int = 1


def tiles_of(op: str, what: str, extent: int, block: int) -> int:
    """Number of tiles of `block` for the second dim of a grid. `what`: names `extent` in errors.

    UnsupportedError if a grid has no room for so many.
    """
    tiles = ceildiv(extent, block)
    if tiles > MOST_TILES:
        raise UnsupportedError(
            f"{op}: expected a layer of at most {MOST_TILES * block} {what} on cuda, got {extent}; "
            "split the layer"
        )
    return tiles


def role_of(rows: int, tiles: int) -> str:
    """Role of the tiles: "few" if there are at most FEW_ROWS rows for each tile, else "many"."""
    return "few" if rows <= FEW_ROWS * tiles else "many"


def linear_roles(dtype: str, arch: str, *, rounds: bool = False) -> Mapping[str, int]:
    """Most rows of a step by role of linear layers, small tiles first; the last role has no bound.
    `rounds`: whether rows are rounded."""
    if arch != "sm_90" or itemsize(dtype) == 4:
        return ROLES_OF_OTHERS
    return ROLES_OF_ROUNDED if rounds else ROLES_OF_ROWS


def linear_tiles(
    role: str, dtype: str, form: Form, arch: str, *, spread: bool, rounds: bool = False
) -> MatrixTiles:
    """Tiles of a linear layer for one of `linear_roles`."""
    if rounds:
        return _tiles_of_bytes(role, form)
    if role in ROLES:
        return matrix_tiles(role, dtype, form, arch, spread=spread)
    rows, wide = ROLES_OF_ROWS[role], _inputs_of_step(form)
    columns = 64
    if form.bits == 4 and (rows == 64 or (rows == 32 and spread)):
        columns = 128
    return MatrixTiles(rows, columns, wide, 4, 3)


def multiply_bytes(form: Form, archs: Sequence[str]) -> bool:
    """Whether tensor cores of all `archs` multiply numbers of `form` by such numbers, and kernels
    support it: bytes with one scale per column, and FP8 also in groups of 128."""
    is_float8 = form.codes == E4M3
    if form.bits != 8 or form.has_offsets or form.group not in ((0, 128) if is_float8 else (0,)):
        return False
    return bool(archs) and all(capability(arch) >= (89 if is_float8 else 80) for arch in archs)


def _tiles_of_bytes(role: str, form: Form) -> MatrixTiles:
    """Tiles for products of bytes by bytes; the inputs are not divided into slices."""
    if role in ("few", "rows16"):
        return MatrixTiles(16, 64, form.group or 256, 4, 4)
    if role == "rows32":
        return MatrixTiles(32, 64, 128, 4, 4)
    if role == "rows64":
        return MatrixTiles(64, 128, 128, 8 if form.group else 4, 4)
    return (
        MatrixTiles(128, 128, 128, 8, 4) if role == "rows128" else MatrixTiles(64, 128, 128, 8, 3)
    )


def matrix_tiles(role: str, dtype: str, form: Form, arch: str, *, spread: bool) -> MatrixTiles:
    """Tiles of a role, "few" or "many". `spread`: whether columns and experts alone give all
    multiprocessors a tile."""
    few, bits, target = role == "few", form.bits, capability(arch)
    half = _inputs_of_step(form) if bits == 4 else 0
    if target < 80 or itemsize(dtype) == 4:  # no tensor cores
        wide = half or 32
        warps = 8 if wide > 32 and not few else 4
        return MatrixTiles(16 if few else 32, 32, wide, warps, 1 if target < 80 else 2)
    if target == 90:
        return _tiles_of_sm_90(few, form, half, spread)
    wide = half or form.group or (128 if bits else 64)
    stages = 4 if wide >= 64 else 8  # small steps need more of them in flight
    return MatrixTiles(16, 64, wide, 4, stages) if few else MatrixTiles(64, 128, wide, 8, 3)


def _tiles_of_sm_90(few: bool, form: Form, half: int, spread: bool) -> MatrixTiles:
    bits, wide = form.bits, half or form.group or 128
    if not few:
        return MatrixTiles(64, 128, wide if bits else 64, 4 if half == 64 else 8, 3)
    if not bits:
        return MatrixTiles(16, 64, wide, 4, 3)
    if wide < 64:  # small steps need more of them in flight
        return MatrixTiles(16, 32, wide, 4, 6, 4)
    if bits == 4:
        return MatrixTiles(16, 64, wide, 4, 4, 2) if spread else MatrixTiles(16, 32, wide, 4, 3, 4)
    if form.group:
        return MatrixTiles(16, 32, wide, 4, 3, 4)
    return MatrixTiles(16, 32, wide, 2, 4, 2) if spread else MatrixTiles(16, 32, wide, 4, 4, 4)


def _inputs_of_step(form: Form) -> int:
    """Bytes of a weight's row that a step loads: half a span of nibbles, or inputs of a scale."""
    return span_of(form.group) // 2 if form.bits == 4 else form.group or 128


def form_given(
    shapes: Mapping[str, tuple[int, ...]], attributes: Mapping[str, float], stem: str = ""
) -> Form:
    """The form of a call's weight with this stem, from its operands' shapes and its attributes."""
    bits, group, codes = (int(attributes[name]) for name in form_of(stem))
    return Form(bits, group, codes, f"{stem}group_bytes" in shapes and codes in WITH_OFFSETS)


def absent_operands(form: Form, has_bias: bool, prefix: str = "") -> frozenset[str]:
    """Operands of a weight that a kernel does not have."""
    given = {
        "scales": form.has_scales,
        "group_bytes": form.has_group_bytes,
        "bias": has_bias,
    }
    return absent_of(**{f"{prefix}{name}": not is_there for name, is_there in given.items()})


def product_constants(dtype: str, form: Form, tiles: MatrixTiles, arch: str) -> dict[str, Constant]:
    """Constants of every kernel with a product."""
    return {
        "BITS": form.bits,
        "GROUP": group_of(form.bits, form.group),
        "CODES": form.codes,
        "FP8_NATIVE": form.codes == E4M3 and capability(arch) >= 89,
        "PRECISION": "ieee" if dtype == "float32" else "tf32",
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "SLICES": tiles.slices,
    }
