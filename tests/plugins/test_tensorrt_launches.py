"""Launches of TensorRT's plugins without TensorRT or a GPU, by a host of our own: those that the
CUDA session plans, as a fake driver gets them.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from kvgraph.kernels import launch
from kvgraph.kernels.launch import Sizes
from kvgraph.kernels.shapes import HeadNorm, Rope
from tests.plugins.hosts import Drive, build
from tests.plugins.tensorrt_fields import SHARED_BYTES, compiled, entry_of, shape_of

PRELUDE = "import ctypes, json\nfrom tests.plugins.tensorrt_host import *"


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """`drive(code)` -> what `code`, with PRELUDE, puts in `result`."""
    host = build("tensorrt", tmp_path_factory.mktemp("host"))
    return partial(host.result, PRELUDE, driver=False)


def test_no_device_is_asked_before_the_first_step(drive: Drive) -> None:
    """Engines are built where there is none."""
    assert drive("""
mine = plugin(archs=("sm_80", "sm_86", "sm_120"))
given = operands()
mine.types([d for d, _ in given.values()])
mine.shapes([s for _, s in given.values()])
mine.configure(operands(4, 9, 8, 3)); mine.workspace(operands(4, 9, 8, 3))
mine.clone().reload().attach()
result = "libcuda" in open("/proc/self/maps").read()
""", driver=True) is False  # fmt: skip


GIVEN = ["q", "kv_blocks", "input_row_offsets", "cache_lengths", "lookup_table", "max_lengths",
         "k", "v"]  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, GIVEN),
    "int8 pool": ({"pool_dtype": "int8", "granularity": 64}, [*GIVEN, "kv_scales"]),
    "rope": ({"rope": Rope(64)}, [*GIVEN, "cos_sin"]),
    "norms": ({"norm": HeadNorm(1e-5), "rope": Rope(64)}, [*GIVEN, "cos_sin", "q_norm", "k_norm"]),
    "all": (
        {"pool_dtype": "float8_e4m3fn", "granularity": 64, "rope": Rope(32, True), "sinks": True,
         "window": 700},
        [*GIVEN, "cos_sin", "kv_scales", "sinks"],
    ),
}  # fmt: skip


def launches_of(sizes: Sizes, workspace: int, kind: str = "plain", layer: int = 3) -> list[str]:
    """What the driver gets, by the plan of the Triton kernels."""
    options, given = KINDS[kind]
    plan = launch.plan_update_and_attend(shape_of(**options), "sm_86", sizes, layer)
    at = {name: 0x100000 * (i + 1) for i, name in enumerate(given)} | {"out": 0xA00000}
    for name, elements in plan.scratch.items():
        at[name] = workspace
        workspace += -(-elements * 4 // 256) * 256
    said = []
    for step in plan.launches:
        values = [f"p{at[a]:x}" if isinstance(a, str) else f"i{a}" for a in step.arguments]
        variant = step.variant
        said.append(
            f"cuLaunchKernel {entry_of(variant)} in 0x1000 grid {step.grid[0]},{step.grid[1]},1 "
            f"block {32 * variant.num_warps},1,1 shared {SHARED_BYTES} stream 77: "
            f"{' '.join(values)} s0 s0 extra0"
        )
    return said


STEPS = [(1, 1, 200), (4, 4, 200), (64, 64, 500), (3, 700, 60), (1, 300, 30), (200, 200, 4)]


@pytest.mark.parametrize(
    ("kind", "batch", "tokens", "width"),
    [*(("plain", *step) for step in STEPS), ("int8 pool", 3, 700, 60), ("rope", 4, 4, 200),
     ("norms", 4, 4, 200), ("all", 64, 64, 500)],
)  # fmt: skip
def test_a_step_launches_what_the_kernels_plan(
    drive: Drive, kind: str, batch: int, tokens: int, width: int
) -> None:
    options, names = KINDS[kind]
    shape = ", ".join(f"{name}={value!r}" for name, value in options.items())
    first, again, needed, loads, calls = drive(f"""
from kvgraph.kernels.shapes import HeadNorm, Rope
names = {names!r}
mine = plugin(shape=shape_of({shape}), given=names,
              rope_style=int({bool(options.get("rope") and options["rope"].interleaved)}),
              norm_epsilon={options["norm"].epsilon if "norm" in options else 0.0})
mine = mine.reload().attach()
given = operands({batch}, {tokens}, 900, {width}, given=names)
first = mine.enqueue(given, addresses(given), workspace=0x7000000, stream=0x77)
before = len(driver_calls())
again = mine.enqueue(given, addresses(given), workspace=0x7000000, stream=0x77)
loads = [c for c in driver_calls()[before:] if "Load" in c or "GetFunction" in c or "FuncSet" in c]
result = [first, again, mine.workspace(given), loads, kernels_launched()]
""", driver=True)  # fmt: skip
    sizes = Sizes(batch, tokens, tokens, 16 * width, width)
    assert (first, again) == ("", "")
    assert calls == launches_of(sizes, 0x7000000, kind) * 2
    assert loads == [], "a second step loads nothing"
    plan = launch.plan_update_and_attend(shape_of(**options), "sm_86", sizes, 3)
    assert needed >= 4 * sum(plan.scratch.values())


def test_nothing_runs_while_an_engine_is_built(drive: Drive) -> None:
    """A builder times plugins on made-up offsets, lengths and pages."""
    said, calls, loaded = drive("""
built = plugin()
given = operands(2, 2, 900, 10)
step = lambda mine: mine.enqueue(given, addresses(given), 0x7000000, 0x77)
said = [step(mine) for mine in (built, built.clone(), built.attach(), built.clone().attach())]
calls = driver_calls()
result = [said, calls, [step(built.reload()), len(kernels_launched())]]
""", driver=True)  # fmt: skip
    assert said == [""] * 4
    assert calls == []
    assert loaded == ["", len(launches_of(Sizes(2, 2, 2, 160, 10), 0x7000000))]


def test_other_ops_launch_their_part(drive: Drive) -> None:
    stored, attended, reads = drive("""
order = ["kv_blocks", "k", "v", *UPDATE[2:5]]
given = operands(2, 2, 900, 10)
at = addresses(given)

def run(built, names, *outputs):
    mine = built.reload()
    before = len(kernels_launched())
    bound = {n: at[n] for n in names} | {f"to {n}": at[n] for n in outputs}
    assert mine.enqueue({n: given[n] for n in names}, bound, 0x7000000, 0x77) == ""
    return kernels_launched()[before:]

result = [
    run(plugin("store_kv", given=order), order, "kv_blocks"),
    run(plugin("paged_attention", given=UPDATE[:6]), UPDATE[:6], "to:out"),
    run(plugin(given=UPDATE[:6]), UPDATE[:6], "to:out", "kv_blocks"),
]
""", driver=True)  # fmt: skip
    expected = launches_of(Sizes(2, 2, 2, 160, 10), 0x7000000)
    assert stored == expected[:1]
    assert attended == reads == expected[1:]


def test_what_a_step_refuses(drive: Drive) -> None:
    result = drive("""
mine = plugin(archs=("sm_86", "sm_89")).reload()
given = operands(2, 2, 900, 10)
apart = {**addresses(given), "to:kv_blocks": 0xB00000}
result = [
    mine.enqueue(given, apart),
    mine.enqueue({**given, "lookup_table": ("int32", (3, 10))}, addresses(given)),
    mine.enqueue(operands(2, 0, 900, 10), addresses(given)),
    kernels_launched(),
]
""", driver=True)  # fmt: skip
    assert result == [
        "update_and_attend: kv_blocks_out: expected the address of kv_blocks 0x200000, got "
        "0xb00000: bind one buffer to both, a copy of the pool is never made",
        "update_and_attend: lookup_table: dim batch_size: expected 2 as cache_lengths has it, got "
        "3",
        "",
        [],
    ]


def test_a_step_that_needs_scratch_memory_is_refused_without(drive: Drive) -> None:
    """TensorRT gives none where the plugin refused the profile's sizes."""
    needed, split, whole, calls = drive("""
mine = plugin().reload()
given = operands(1, 1, 900, 200)
needed = mine.workspace(operands(1, 2**31, 900, 200))
split = mine.enqueue(given, addresses(given))
before = len(kernels_launched())
small = operands(1, 1, 900, 2)
result = [needed, split, mine.enqueue(small, addresses(small)), before]
""", driver=True)  # fmt: skip
    sentence = (
        r"update_and_attend: workspace: expected \d+ bytes, got none: the engine was built for a "
        "profile that the kernels refuse; build it for a smaller one"
    )
    assert needed == calls == 0
    assert re.fullmatch(sentence, split)
    assert whole == ""


@pytest.mark.parametrize(
    ("sm", "arch"),
    [(86, "sm_86"), (87, "sm_86"), (89, "sm_89"), (120, "sm_120"), (80, ""), (121, "")],
)
def test_a_device_gets_its_architectures_kernels(drive: Drive, sm: int, arch: str) -> None:
    """Those of 9.0 and newer run on their own compute capability alone."""
    code = """
mine = plugin(archs=("sm_86", "sm_89", "sm_120")).reload()
given = operands(2, 2, 900, 10)
refusal = mine.enqueue(given, addresses(given))
result = [refusal, [c.split()[1] for c in driver_calls() if c.startswith("cuModuleLoadData")]]
"""
    refusal, loaded = drive(code, driver=True, sm=sm)
    if arch:
        assert refusal == ""
        assert loaded == [k.cubin[64:68].decode() for k in compiled(shape_of(), arch)]
    else:
        assert (refusal, loaded) == (
            "device: expected one that runs the graph's kernels (sm_86, sm_89, sm_120a), got "
            f"compute capability {sm // 10}.{sm % 10}: compile with --target cuda:sm_{sm}",
            [],
        )


def test_one_node_carries_the_images_of_its_engine(drive: Drive) -> None:
    first, second, third, alone = drive("""
given = operands(2, 2, 900, 10)
alone = plugin(images=b"").reload().attach().enqueue(given, addresses(given))
carrier = plugin()
others = [plugin(images=b"", layer=i).reload() for i in (1, 2)]
carrier, gone = carrier.reload(), carrier
gone.delete()
second = others[0].enqueue(given, addresses(given))
first = carrier.enqueue(given, addresses(given))
carrier.delete()
third = others[1].enqueue(given, addresses(given))
result = [first, second, third, alone]
""", driver=True)  # fmt: skip
    sentence = "expected image [0-9a-f]{16} from the node of this graph that carries it, got none"
    assert (first, second) == ("", "")
    for found in (third, alone):
        assert re.fullmatch(rf"storekv_p+i+: {sentence}", found)
