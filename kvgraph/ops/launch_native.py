"""Plans of launches, from the native library through `plugins/include/kvgraph/launch.h`.

The rules are C++ (`plugins/launch/plan.cpp`), the same for every host. No GPU or driver is needed.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_double, c_int32, c_int64, c_uint8, c_uint16, c_uint32

from kvgraph.errors import KernelError
from kvgraph.ops.cuda_native import LAUNCH_ABI_VERSION, launcher
from kvgraph.ops.launch_names import ROLES, SCRATCH, VALUES
from kvgraph.ops.native import INSTALL

KERNELS_VERSION = 4
"""Version of the record in the attribute `kernels` of a graph's node."""

MAX_PLANNED, MAX_PARAMETERS = 4, 24
OPERAND, SCRATCH_MEMORY, VALUE = 1, 2, 3
"""Kinds of a kernel's parameters."""


class Constants(ctypes.Structure):
    """Constants that kernels were compiled for; dims that an op does not have are 0."""

    _fields_ = (
        ("scale", c_double),
        ("softcap", c_double),
        ("norm_epsilon", c_double),
        ("norm_offset", c_double),
        ("window", c_int32),
        ("chunked", c_int32),
        ("causal", c_int32),
        ("rope_style", c_int32),
        ("num_layers", c_int32),
        ("page_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("v_head_dim", c_int32),
        ("num_heads", c_int32),
        ("scales_per_head", c_int32),
        ("rotary_dim", c_int32),
        ("dtype", c_int32),
        ("pool_dtype", c_int32),
        ("norms", c_int32),
        ("reserved", c_int32),
    )


class Tiling(ctypes.Structure):
    """Sizes by which the kernels of an architecture split a step."""

    _fields_ = (
        ("store_tokens", c_int32),
        ("prefill_tokens", c_int32),
        ("decode_tokens", c_int32),
        ("multiprocessors", c_int32),
        ("min_part", c_int32),
        ("max_parts", c_int32),
    )


class StepSizes(ctypes.Structure):
    """Sizes of a step that the host knows."""

    _fields_ = (
        ("batch_size", c_int64),
        ("total_seq_len", c_int64),
        ("max_new", c_int64),
        ("max_context", c_int64),
        ("table_width", c_int64),
        ("max_positions", c_int64),
    )


class Planned(ctypes.Structure):
    """One launch: an index into ROLES, a grid, and the integers of VALUES."""

    _fields_ = (("role", c_int64), ("grid", c_int64 * 2), ("values", c_int64 * len(VALUES)))


class StepPlan(ctypes.Structure):
    """Input and output of a plan; the output begins at `num_launches`."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("struct_size", c_uint32),
        ("op", ctypes.c_char_p),
        ("constants", Constants),
        ("tiling", Tiling),
        ("sizes", StepSizes),
        ("layer", c_int32),
        ("stores", c_int32),
        ("attends", c_int32),
        ("num_launches", c_int32),
        ("launches", Planned * MAX_PLANNED),
        ("scratch", c_int64 * len(SCRATCH)),
    )


class KernelParameter(ctypes.Structure):
    _fields_ = (("kind", c_uint8), ("index", c_uint8), ("alignment", c_uint16))


class KernelRecord(ctypes.Structure):
    """A compiled kernel; `function` is empty if its role has no kernel."""

    _fields_ = (
        ("function", c_char * 64),
        ("sha256", c_uint8 * 32),
        ("num_warps", c_uint32),
        ("shared_bytes", c_uint32),
        ("num_parameters", c_uint32),
        ("parameters", KernelParameter * MAX_PARAMETERS),
    )


class ArchRecord(ctypes.Structure):
    _fields_ = (("arch", c_char * 8), ("tiling", Tiling), ("kernels", KernelRecord * len(ROLES)))


class KernelsHeader(ctypes.Structure):
    """Header of a record; one ArchRecord per architecture follows."""

    _fields_ = (
        ("version", c_uint32),
        ("contract_version", c_uint32),
        ("arch_size", c_uint32),
        ("num_archs", c_uint32),
        ("constants", Constants),
    )


def plan_step(plan: StepPlan) -> None:
    """Fill in the launches and the scratch memory. KernelError for impossible sizes."""
    _fill(plan, "plan")


def bound_scratch(plan: StepPlan) -> None:
    """Fill in `scratch` with the most memory that any step up to the plan's sizes uses."""
    _fill(plan, "bound_scratch")


def _fill(plan: StepPlan, entry: str) -> None:
    plan.abi_version, plan.struct_size = LAUNCH_ABI_VERSION, ctypes.sizeof(StepPlan)
    launcher().call(entry, ctypes.byref(plan))


def check_kernels(record: bytes, op: str, *, stores: bool) -> None:
    """Raise KernelError unless `record` has kernels that `op` can launch, as hosts do.

    `stores`: whether `op` is given k and v.
    """
    found = int(launcher().dll.kvg_cuda_kernels_version())
    if found != KERNELS_VERSION:
        raise KernelError(
            f"kernels: expected a library that reads version {KERNELS_VERSION} of this kvgraph "
            f"package, got one for version {found}; install both from one build: {INSTALL}"
        )
    launcher().call(
        "check_kernels", record, ctypes.c_size_t(len(record)), op.encode(), c_int32(stores)
    )
