"""Plans of an op's launches, for the interpreter, torch tensors and the native launcher.

Grids follow from sizes that the host knows (upper bounds, never the values on the device), so
nothing waits for the device. The rules of attention are the native library's
(`plugins/launch/plan.cpp`), the same in every host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.dtypes import DTYPES
from kvgraph.kernels import shapes
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.kernels.variants import (
    Variant,
    decode_variant,
    increment_variant,
    merge_variant,
    prefill_variant,
    store_variant,
)
from kvgraph.ops import launch_native
from kvgraph.ops.launch_names import ROLES, SCRATCH, VALUES
from kvgraph.ops.launch_native import Constants, Planned, StepSizes, Tiling

KEPT_PLANS = 128
"""Plans that are cached for one shape of products or norms, and for all attention, since sizes are
repeated within a step and later."""

PlanOf = Callable[..., "LaunchPlan"]
"""Function from the number of rows, or of columns, to a plan."""

TRITON_DTYPES = {f"*{dtype.triton}": dtype.name for dtype in DTYPES.values() if dtype.triton}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch. `arguments`: one per `variant.parameters`, the name of an operand or of scratch
    memory, or a value."""

    variant: Variant
    grid: tuple[int, int]
    arguments: tuple[str | int, ...]

    def with_argument(self, place: int, value: int) -> Launch:
        arguments = (*self.arguments[:place], value, *self.arguments[place + 1 :])
        return Launch(self.variant, self.grid, arguments)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Launches in stream order, and the scratch memory (name -> elements) that they share."""

    launches: tuple[Launch, ...] = ()
    scratch: Mapping[str, int] = field(default_factory=dict)
    _dtypes: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def scratch_dtypes(self) -> dict[str, str]:
        """Dtype of each scratch memory, from the parameters of the kernels that use it."""
        if len(self._dtypes) < len(self.scratch):
            types = {p.name: p.type for one in self.launches for p in one.variant.parameters}
            self._dtypes.update({name: TRITON_DTYPES[types[name]] for name in self.scratch})
        return self._dtypes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a step that the host knows. `max_new`, `max_context`: bounds (`max_lengths[0]`).
    `max_positions`: positions of the rotary table, which bound the context unless 0."""

    batch_size: int
    total_seq_len: int
    max_new: int
    max_context: int
    table_width: int
    max_positions: int = 0


def plan_store(shape: AttentionShape, arch: str, sizes: Sizes, layer: int) -> LaunchPlan:
    """Plan store_kv of one layer. Operands: the op's, cos_sin with rope, and k_norm with norm."""
    return _step_plans(b"store_kv", shape, arch, True, False, 0).plan(sizes, layer)


def plan_attention(
    shape: AttentionShape,
    arch: str,
    sizes: Sizes,
    layer: int,
    *,
    multiprocessors: int = 0,
) -> LaunchPlan:
    """Plan paged_attention of one layer: one launch for the rows that fit a decode tile, one for
    longer rows, each only if such rows may exist, and a merge if the context is split.

    `multiprocessors`: 0 means those of a typical device of `arch`.
    """
    plans = _step_plans(b"paged_attention", shape, arch, False, True, multiprocessors)
    return plans.plan(sizes, layer)


def plan_update_and_attend(
    shape: AttentionShape,
    arch: str,
    sizes: Sizes,
    layer: int,
    *,
    stores: bool = True,
    multiprocessors: int = 0,
) -> LaunchPlan:
    """Plan update_and_attend of one layer: k is normalised and rotated when it is stored, q when
    attention loads it.

    KernelError for impossible sizes.
    """
    plans = plans_of_steps(shape, arch, stores=stores, multiprocessors=multiprocessors)
    return plans.plan(sizes, layer)


def plans_of_steps(
    shape: AttentionShape, arch: str, *, stores: bool = True, multiprocessors: int = 0
) -> StepPlans:
    """The StepPlans behind `plan_update_and_attend`, for hosts that plan at every step."""
    return _step_plans(b"update_and_attend", shape, arch, stores, True, multiprocessors)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlans:
    """Shared data of an op's plans: `question`, the input for the native library, and `variants` in
    the order of ROLES."""

    question: launch_native.StepPlan
    variants: tuple[Variant, ...]

    def plan(self, sizes: Sizes, layer: int) -> LaunchPlan:
        """Plan of one layer; plans of layers differ only in the layer's number. KernelError for
        impossible sizes."""
        first, places = _first_layer(self, sizes)
        if not layer:
            return first
        launches = [
            one if at is None else one.with_argument(at, layer)
            for one, at in zip(first.launches, places, strict=True)
        ]
        return LaunchPlan(tuple(launches), first.scratch, first._dtypes)

    def ask(self, sizes: Sizes) -> LaunchPlan:
        """Get the plan of layer 0 from the native library."""
        asked = launch_native.StepPlan.from_buffer_copy(self.question)
        asked.sizes = StepSizes(
            sizes.batch_size,
            sizes.total_seq_len,
            sizes.max_new,
            sizes.max_context,
            sizes.table_width,
            sizes.max_positions,
        )
        launch_native.plan_step(asked)
        launches = [self._launch(planned) for planned in asked.launches[: asked.num_launches]]
        scratch = {name: n for name, n in zip(SCRATCH, asked.scratch, strict=True) if n}
        return LaunchPlan(tuple(launches), scratch)

    def _launch(self, planned: Planned) -> Launch:
        values = dict(zip(VALUES, planned.values, strict=True))
        columns, lines = planned.grid
        return launch_of(self.variants[planned.role], (columns, lines), values)


@lru_cache(KEPT_PLANS)
def _first_layer(plans: StepPlans, sizes: Sizes) -> tuple[LaunchPlan, list[int | None]]:
    """Plan of layer 0, and the place of the layer in each launch's arguments (None: not used)."""
    plan = plans.ask(sizes)
    names = [[p.name for p in one.variant.parameters] for one in plan.launches]
    return plan, [n.index("layer") if "layer" in n else None for n in names]


@lru_cache
def _step_plans(
    op: bytes, shape: AttentionShape, arch: str, stores: bool, attends: bool, multiprocessors: int
) -> StepPlans:
    question = launch_native.StepPlan(
        op=op,
        constants=constants(shape),
        tiling=tiling(shape, arch, multiprocessors),
        stores=stores,
        attends=attends,
    )
    by_role = {
        "store": store_variant(shape),
        "prefill": prefill_variant(shape, arch),
        "decode": decode_variant(shape, arch, split=False),
        "decode_split": decode_variant(shape, arch, split=True),
        "merge": merge_variant(shape, arch),
    }
    return StepPlans(question, tuple(by_role[role] for role in ROLES))


def constants(shape: AttentionShape) -> Constants:
    """Constants that the kernels of `shape` are compiled for."""
    cache, rope, norm = shape.cache, shape.rope, shape.norm
    return Constants(
        scale=shape.scale,
        softcap=shape.softcap,
        window=shape.window,
        chunked=shape.chunked,
        causal=shape.causal,
        rope_style=bool(rope and rope.interleaved),
        num_layers=cache.num_layers,
        page_size=cache.page_size,
        num_kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        v_head_dim=cache.v_width,
        num_heads=shape.heads,
        scales_per_head=ceildiv(cache.head_dim, cache.granularity) if cache.granularity else 0,
        rotary_dim=rope.rotary_dim if rope else 0,
        dtype=DTYPES[cache.dtype].code,
        pool_dtype=DTYPES[cache.pool_dtype].code,
        norms=norm is not None,
        norm_epsilon=norm.epsilon if norm else 0.0,
        norm_offset=norm.offset if norm else 0.0,
    )


def tiling(shape: AttentionShape, arch: str, multiprocessors: int = 0) -> Tiling:
    """Sizes by which kernels of `arch` split a step. `multiprocessors`: 0 means those of a typical
    device."""
    return Tiling(
        store_tokens=_int(store_variant(shape), "BLOCK_R"),
        prefill_tokens=shapes.prefill_tiles(shape, arch).block_m // shape.group,
        decode_tokens=shapes.decode_tiles(shape, arch).block_m // shape.group,
        multiprocessors=multiprocessors or shapes.MULTIPROCESSORS[arch],
        min_part=shapes.MIN_PART,
        max_parts=shapes.MAX_PARTS,
    )


# ---- element-wise kernels, which are planned in Python only -------------------------------------


def plan_rms_norm(variant: Variant, num_rows: int) -> LaunchPlan:
    return _plan_rows(variant, ceildiv(num_rows, _int(variant, "BLOCK_R")), num_rows=num_rows)


def plan_silu_mul(variant: Variant, num_rows: int) -> LaunchPlan:
    blocks = ceildiv(_int(variant, "WIDTH"), _int(variant, "BLOCK_D"))
    return _plan_rows(variant, num_rows * blocks)


def plan_increment(batch_size: int) -> LaunchPlan:
    variant = increment_variant()
    return _plan_rows(variant, ceildiv(batch_size, _int(variant, "BLOCK_B")), batch_size=batch_size)


@cache
def plans_by_sizes(plan: Callable[..., LaunchPlan], *constants: Hashable) -> PlanOf:
    """Cached function from sizes to `plan(*constants, *sizes)`: layers of a shape repeat sizes."""
    return lru_cache(KEPT_PLANS)(partial(plan, *constants))


def _plan_rows(variant: Variant, programs: int, **values: int) -> LaunchPlan:
    return LaunchPlan((launch_of(variant, (programs, 1), values),)) if programs else LaunchPlan()


def launch_of(variant: Variant, grid: tuple[int, int], values: Mapping[str, int]) -> Launch:
    arguments = tuple(values.get(p.name, p.name) for p in variant.parameters)
    return Launch(variant, grid, arguments)


def _int(variant: Variant, name: str) -> int:
    value: Any = variant.constants[name]
    return int(value)
