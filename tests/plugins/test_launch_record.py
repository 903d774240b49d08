"""Records of kernels, and what the native planner is asked: layouts, versions, refusals, bounds."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraph.errors import KernelError
from kvgraph.kernels import launch
from kvgraph.kernels.launch import Sizes
from kvgraph.kernels.record import archs_of, image_digests
from kvgraph.ops import launch_native
from kvgraph.ops.launch_names import ROLES
from kvgraph.ops.launch_native import (
    ArchRecord,
    KernelsHeader,
    bound_scratch,
    check_kernels,
    plan_step,
)
from kvgraph.ops.specs import ABI_VERSION
from tests.plugins.tensorrt_fields import record_of, shape_of

HEADER = (Path(__file__).parents[2] / "plugins/include/kvgraph/launch.h").read_text()
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "kvg_constants": launch_native.Constants,
    "kvg_tiling": launch_native.Tiling,
    "kvg_sizes": launch_native.StepSizes,
    "kvg_planned": launch_native.Planned,
    "kvg_plan": launch_native.StepPlan,
    "kvg_parameter": launch_native.KernelParameter,
    "kvg_kernel": launch_native.KernelRecord,
    "kvg_arch_kernels": ArchRecord,
    "kvg_kernels": KernelsHeader,
}
RECORD = record_of(shape_of(), ["sm_86", "sm_89"])
ANOTHER = "compile the model again"


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_are_those_of_the_header(name: str) -> None:
    match = re.search(rf"typedef struct {name} {{(.*?)}} {name};", HEADER, re.DOTALL)
    assert match
    body = re.sub(r"//.*|\[[^]]*\]", "", match[1])
    declared = [re.split(r"[,\s*]+", line.strip()) for line in body.split(";") if line.strip()]
    names = [word for words in declared for word in words if not re.fullmatch(TYPE, word)]
    assert names == [field for field, *_ in STRUCTS[name]._fields_]


TYPE = r"const|char|double|kvg_\w+|u?int\d+_t"


def test_numbers_are_those_of_the_header() -> None:
    for name, number in {
        "KERNELS_VERSION": launch_native.KERNELS_VERSION,
        "MAX_PARAMETERS": launch_native.MAX_PARAMETERS,
        "MAX_PLANNED": launch_native.MAX_PLANNED,
    }.items():
        assert f"#define KVG_{name} {number}\n" in HEADER
    assert f"KVG_PARAMETER_OPERAND = {launch_native.OPERAND}," in HEADER
    assert f"KVG_PARAMETER_SCRATCH = {launch_native.SCRATCH_MEMORY}," in HEADER
    assert f"KVG_PARAMETER_VALUE = {launch_native.VALUE}," in HEADER


def test_a_record_names_every_image_once() -> None:
    kernels = [kernel for arch in archs_of(RECORD) for kernel in arch.kernels]
    digests = image_digests(RECORD)
    assert digests == list(dict.fromkeys(bytes(k.sha256).hex() for k in kernels))
    assert len(set(digests)) == len(digests) >= len(ROLES)


# ---- what is refused ----------------------------------------------------------------------------

Change = Callable[[KernelsHeader, ArchRecord], object]


def changed(change: Change) -> bytes:
    """RECORD after `change` of its header and its first architecture."""
    data = bytearray(RECORD)
    header = KernelsHeader.from_buffer(data)
    change(header, ArchRecord.from_buffer(data, ctypes.sizeof(KernelsHeader)))
    return bytes(data)


def refusal(record: bytes, *, op: str = "update_and_attend", stores: bool = True) -> str:
    with pytest.raises(KernelError) as error:
        check_kernels(record, op, stores=stores)
    return str(error.value)


def put(structure: ctypes.Structure, **values: object) -> None:
    for name, value in values.items():
        setattr(structure, name, value)


MERGE = ROLES.index("merge")
SIZE = ctypes.sizeof(KernelsHeader) + 2 * ctypes.sizeof(ArchRecord)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda h, a: put(h, version=9), f"expected version 4 of this kvgraph, got 9: {ANOTHER}"),
        (lambda h, a: put(h, contract_version=7),
         f"expected operands of ABI version {ABI_VERSION} of this kvgraph, got 7: {ANOTHER}"),
        (lambda h, a: put(h, arch_size=8),
         f"expected {ctypes.sizeof(ArchRecord)} bytes for an arch, got 8"),
        (lambda h, a: put(h, num_archs=0),
         "expected kernels of at least one arch, got none"),
        (lambda h, a: put(h, num_archs=3),
         f"expected a record of {SIZE + ctypes.sizeof(ArchRecord)} bytes, got {SIZE}"),
        (lambda h, a: put(h.constants, dtype=0), "dtype: expected a dtype of 1 to 6, got 0"),
        (lambda h, a: put(h.constants, pool_dtype=7),
         "pool_dtype: expected a dtype of 1 to 6, got 7"),
        (lambda h, a: put(h.constants, num_kv_heads=0),
         "update_and_attend: expected dim num_kv_heads of at least 1, got 0"),
        (lambda h, a: put(h.constants, rotary_dim=-2),
         "update_and_attend: expected dim rotary_dim of at least 1, got -2"),
        (lambda h, a: put(a.tiling, min_part=0), "sm_86: expected a tiling of numbers of at least "
         "1, got 16 32 4 84 0 32"),
        (lambda h, a: put(a.kernels[MERGE], function=b""),
         "sm_86: expected a merge kernel for update_and_attend, got none"),
        (lambda h, a: put(a.kernels[MERGE], function=b"f" * 64, sha256=(ctypes.c_uint8 * 32)(1)),
         f"{'f' * 64}: expected a name that ends and at most 24 parameters, got 7"),
        (lambda h, a: put(a.kernels[MERGE], function=b"fold", num_parameters=25),
         "fold: expected a name that ends and at most 24 parameters, got 25"),
        (lambda h, a: put(a.kernels[MERGE].parameters[0], kind=4, index=0),
         "expected parameters of kind 1 to 3 that a plan has, got kind 4, index 0"),
        (lambda h, a: put(a.kernels[MERGE].parameters[0], kind=3, index=9),
         "expected parameters of kind 1 to 3 that a plan has, got kind 3, index 9"),
        (lambda h, a: put(a.kernels[MERGE].parameters[0], alignment=0),
         "expected an alignment of at least 1 of every pointer, got 0"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_refused(change: Change, sentence: str) -> None:
    said = refusal(changed(change))
    assert said.startswith("field kernels: ")
    assert said.endswith(sentence)


def test_an_architecture_has_a_name() -> None:
    expected = 'arch: expected a name such as sm_90 or sm_90a, got "%s"'
    assert refusal(changed(lambda h, a: put(a, arch=b"hopper"))) == expected % "hopper"
    assert refusal(changed(lambda h, a: put(a, arch=b"sm_86666"))) == expected % ""


def test_other_versions_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 was text."""
    assert refusal(b"kvgraph-kernels 1\ntype T bfloat16\n" * 9) == (
        f"field kernels: expected version 4 of this kvgraph, got 1: {ANOTHER}"
    )
    header = ctypes.sizeof(KernelsHeader)
    assert refusal(b"") == f"field kernels: expected a record of at least {header} bytes, got 0"
    monkeypatch.setattr(launch_native, "KERNELS_VERSION", 5)
    with pytest.raises(
        KernelError, match=r"expected a library that reads version 5 .* got one for version 4;"
    ):
        check_kernels(RECORD, "update_and_attend", stores=True)


def test_an_op_needs_its_own_kernels_only() -> None:
    """One record serves the three ops; a string's final NUL is not part of it."""
    without = changed(lambda h, a: put(a.kernels[MERGE], function=b""))
    check_kernels(without, "store_kv", stores=True)
    check_kernels(RECORD + b"\0", "paged_attention", stores=False)
    assert refusal(without, op="paged_attention", stores=False) == (
        "field kernels: sm_86: expected a merge kernel for paged_attention, got none"
    )
    assert refusal(RECORD, op="linear") == 'op: expected one of domain kvgraph, got "linear"'


def question(**fields: int) -> launch_native.StepPlan:
    """A plan of 4 rows, with `fields` of its own or of its structures."""
    shape = shape_of()
    plan = launch_native.StepPlan(
        op=b"update_and_attend",
        constants=launch.constants(shape),
        tiling=launch.tiling(shape, "sm_86"),
        sizes=launch_native.StepSizes(4, 4, 1, 4096, 256, 0),
        stores=1,
        attends=1,
    )
    for name, value in fields.items():
        owners = (plan, plan.constants, plan.tiling, plan.sizes)
        owner = next(owner for owner in owners if name in dict(owner._fields_))
        setattr(owner, name, value)
    return plan


@pytest.mark.parametrize("ask", [plan_step, bound_scratch])
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"batch_size": 2**62 + 1}, f"batch_size: expected at most {2**30}, got {2**62 + 1}"),
        ({"total_seq_len": 2**63 - 1},
         f"total_seq_len: expected at most {2**31 - 1}, got {2**63 - 1}"),
        ({"total_seq_len": -1}, "total_seq_len: expected at least 0, got -1"),
        ({"max_new": 2**40}, f"max_new: expected at most {2**31 - 1}, got {2**40}"),
        ({"max_context": 2**62}, f"max_context: expected at most {2**48}, got {2**62}"),
        ({"max_positions": -1}, "max_positions: expected at least 0, got -1"),
        ({"table_width": -3}, "table_width: expected at least 0, got -3"),
        ({"layer": -4}, "layer: expected at least 0, got -4"),
        ({"layer": 9}, "layer: expected at most 3, got 9"),
        ({"window": -1000}, "window: expected at least 0, got -1000"),
        ({"num_heads": -8}, "num_heads: expected at least 0, got -8"),
        ({"num_heads": 0}, "num_heads: expected at least 1, got 0"),
        ({"num_heads": 7}, "num_heads: expected a multiple of the 2 kv heads, got 7"),
        ({"v_head_dim": -5}, "v_head_dim: expected at least 0, got -5"),
        ({"chunked": 2}, "chunked: expected at most 1, got 2"),
        ({"multiprocessors": 2**31 - 1},
         f"multiprocessors: expected at most {2**16}, got {2**31 - 1}"),
    ],
)  # fmt: skip
def test_numbers_that_no_plan_has_are_refused(
    ask: Callable[[launch_native.StepPlan], None], fields: dict[str, int], sentence: str
) -> None:
    with pytest.raises(KernelError) as error:
        ask(question(**fields))
    assert str(error.value) == f"update_and_attend: {sentence}"


def test_plans_of_the_largest_numbers() -> None:
    """Within 64 bits, and soon: memory for any batch is reckoned without a look at each."""
    plain, windowed = question(), question(window=2**31 - 1)
    plan_step(plain)
    plan_step(windowed)
    assert list(windowed.scratch) == list(plain.scratch) != [0, 0]
    most = question(batch_size=2**30)
    bound_scratch(most)
    with pytest.raises(KernelError, match=f"grid: expected at most {2**48}, got more"):
        plan_step(question(batch_size=2**30, num_heads=2**30, num_kv_heads=2**30))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (Sizes(0, 3, 1, 9, 1), "batch_size: expected at least 1, got 0"),
        (Sizes(2, 2, 0, 9, 1),
         "max_lengths: expected at least 1 new token and a context of 1, got 0 and 9"),
        (Sizes(2, 2, 1, 0, 1),
         "max_lengths: expected at least 1 new token and a context of 1, got 1 and 0"),
        (Sizes(2, 2, 1, 65, 9, 64),
         "max_lengths: expected contexts of at most the 64 positions of cos_sin, got 65"),
    ],
)  # fmt: skip
def test_sizes_that_no_step_has_are_refused(sizes: Sizes, sentence: str) -> None:
    with pytest.raises(KernelError) as error:
        launch.plan_update_and_attend(shape_of(), "sm_86", sizes, 0)
    assert str(error.value) == f"update_and_attend: {sentence}"


# ---- memory -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(batch=st.integers(1, 300), total=st.integers(1, 4000), pages=st.integers(1, 3000),
       fewer=st.tuples(st.integers(1, 300), st.integers(1, 4000), st.integers(1, 3000)),
)  # fmt: skip
def test_the_workspace_of_a_profile_holds_every_smaller_step(
    batch: int, total: int, pages: int, fewer: tuple[int, int, int]
) -> None:
    shape = shape_of(dtype="float16", pool_dtype="float16")
    most = launch_native.StepPlan(
        op=b"update_and_attend",
        constants=launch.constants(shape),
        tiling=launch.tiling(shape, "sm_89"),
        sizes=launch_native.StepSizes(batch, total, total, 16 * pages, pages),
    )
    bound_scratch(most)
    b, t, p = (min(pair) for pair in zip((batch, total, pages), fewer, strict=True))
    plan = launch.plan_update_and_attend(shape, "sm_89", Sizes(b, t, t, 16 * p, p), 0)
    assert all(used <= most.scratch[i] for i, used in enumerate(plan.scratch.values()))
