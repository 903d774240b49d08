"""TensorRT's plugins without TensorRT: a host of our own calls every method (tensorrt_host.cpp).

The builder of tensorrt-rtx calls them for real in tests/compiler/test_tensorrt_target.py. Launches
go to the fake driver of the launcher's tests.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest

from kvgraph.kernels import launch
from kvgraph.kernels.launch import Sizes
from kvgraph.kernels.shapes import Rope
from tests.plugins.hosts import Drive, build
from tests.plugins.tensorrt_fields import SHARED_BYTES, compiled, entry_of, shape_of

PRELUDE = """
import ctypes, json
from tests.plugins.tensorrt_fields import fields_of, shape_of
from tests.plugins.tensorrt_host import *

UPDATE = ["q", "kv_blocks", "input_row_offsets", "cache_lengths", "lookup_table", "max_lengths",
          "k", "v"]
SHAPE = shape_of()

def fields(shape=SHAPE, archs=("sm_86",), given=UPDATE, op="update_and_attend", **changed):
    kernels, images = fields_of(shape, archs)
    made = dict(layer=3, scale=shape.scale, window=shape.window, kernels=kernels, images=images)
    made["inputs"] = mask(op, given)
    if op == "store_kv":
        del made["scale"], made["window"]
    return {**made, **changed}

def plugin(op="update_and_attend", **options):
    return Plugin.of(op, fields(op=op, **options))

def refused(op="update_and_attend", **options):
    made = plugin(op, **options)
    assert not made
    return said()

def operands(batch=-1, tokens=-1, pages=-1, width=-1, steps=1, given=UPDATE, dtype="bfloat16",
             pool="bfloat16"):
    all_ = {
        "q": (dtype, (tokens, 8, 64)), "kv_blocks": (pool, (pages, 2, 4, 16, 2, 64)),
        "k": (dtype, (tokens, 2, 64)), "v": (dtype, (tokens, 2, 64)),
        "input_row_offsets": ("int32", (batch + (batch > 0),)),
        "cache_lengths": ("int32", (batch,)), "lookup_table": ("int32", (batch, width)),
        "max_lengths": ("int32", (steps, 2)),
        "kv_scales": ("float32", (pages, 2, 4, 16, 2, 1)), "sinks": ("float32", (8,)),
        "cos_sin": ("float32", (4096, 64)),
    }
    return {name: all_[name] for name in given}

def changed(given, name, shape):
    return [shape if n == name else s for n, (_, s) in given.items()]

def driver_calls():
    function = ctypes.CDLL("libcuda.so.1").fake_log
    function.restype = ctypes.c_char_p
    return function().decode().splitlines()

def kernels_launched():
    return [c for c in driver_calls() if c.startswith("cuLaunch")]

def addresses(given, outputs=("out", "kv_blocks")):
    made = {name: 0x100000 * (i + 1) for i, name in enumerate(given)}
    made["to:out"] = 0xA00000
    if "kv_blocks" in outputs:
        made["to:kv_blocks"] = made["kv_blocks"]
    if "kv_scales" in given:
        made["to:kv_scales"] = made["kv_scales"]
    return made
"""


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """`drive(code)` -> what `code`, with PRELUDE, puts in `result`."""
    host = build("tensorrt", tmp_path_factory.mktemp("host"))
    return partial(host.result, PRELUDE, driver=False)


# ---- what TensorRT finds ------------------------------------------------------------------------


def test_creators_and_interfaces(drive: Drive) -> None:
    found, names = drive("result = [creators(), plugin().text('h_names')]")
    assert [line[:4] for line in found] == [
        ["PLUGIN CREATOR_V3ONE", "kvgraph", op, "1"]
        for op in ("store_kv", "paged_attention", "update_and_attend")
    ]
    own = ["inputs", "aliased", "pool_out", "kernels", "images"]
    assert found[0][4:] == ["layer", *own]
    assert found[2][4:] == [
        "layer", "scale", "window", "softcap", "causal", "v_head_dim", "rope_style", *own
    ]  # fmt: skip
    assert names == (
        "kvgraph|update_and_attend|1|PLUGIN 1|PLUGIN_V3ONE_CORE 1|PLUGIN_V3ONE_BUILD 2|"
        "PLUGIN_V3ONE_RUNTIME 1"
    )


def test_types_follow_the_kernels(drive: Drive) -> None:
    result = drive("""
half = plugin(shape=shape_of(dtype="float16", pool_dtype="int8", granularity=64),
              given=[*UPDATE, "kv_scales"])
good = [d for d, _ in operands().values()]
result = [
    plugin().types(good),
    half.types(["float16", "int8", *["int32"] * 4, "float16", "float16", "float32"]),
    plugin().types(["float32", *good[1:]]),
    plugin().types([good[0], "int8", *good[2:]]),
    plugin().types([*good[:2], "int64", *good[3:]]),
    plugin().types(good[:-1]),
    plugin().configure(operands(2, 4, 8, 3)),
    plugin().configure(operands(2, 4, 8, 3, dtype="float16")),
]
""")
    op = "update_and_attend"
    assert result == [
        ["bfloat16", "bfloat16"],
        ["float16", "int8", "float32"],
        f"{op}: q: expected bfloat16 from the node's kernels, got float32",
        f"{op}: kv_blocks: expected bfloat16 from the node's kernels, got int8",
        f"{op}: input_row_offsets: expected int32 from the node's kernels, got a type that no "
        "kernel takes",
        f"{op}: expected 8 inputs and 2 outputs from its fields, got 7 and 2",
        "",
        f"{op}: q: expected bfloat16 from the node's kernels, got float16",
    ]


def test_shapes_are_the_inputs_dims(drive: Drive) -> None:
    result = drive("""
given = operands()
pool = dict(given)["kv_blocks"][1]
result = [
    plugin().shapes([s for _, s in given.values()]),
    plugin(pool_out=0).shapes([s for _, s in given.values()]),
    plugin().shapes(changed(given, "q", (-1, 8, 80))),
    plugin().shapes(changed(given, "q", (-1, 8, -1))),
    plugin().shapes(changed(given, "q", (-1, 4, 64))),
    plugin().shapes(changed(given, "q", (-1, 512))),
    plugin().shapes(changed(given, "kv_blocks", (-1, 2, 4, 128, 2, 64))),
    plugin().shapes(changed(given, "kv_blocks", (-1, 2, 5, 16, 2, 64))),
    plugin().shapes(changed(given, "max_lengths", (-1, 3))),
    plugin("store_kv", given=["kv_blocks", "k", "v", *UPDATE[2:5]]).shapes(
        [given[n][1] for n in ["kv_blocks", "k", "v", *UPDATE[2:5]]]),
    plugin("paged_attention", given=UPDATE[:6]).shapes([given[n][1] for n in UPDATE[:6]]),
]
""")
    made = "from the node's kernels, got"
    assert result == [
        [["0.0", 8, 64], ["1.0", 2, 4, 16, 2, 64]],
        [["0.0", 8, 64]],
        f"update_and_attend: q: head_dim: expected 64 {made} 80",
        f"update_and_attend: q: head_dim: expected 64 {made} a dim that is known at run time only",
        f"update_and_attend: q: num_heads: expected 8 {made} 4",
        "update_and_attend: q: expected rank 3, got 2",
        f"update_and_attend: kv_blocks: page_size: expected 16 {made} 128",
        f"update_and_attend: kv_blocks: num_layers: expected 4 {made} 5",
        f"update_and_attend: max_lengths: dim: expected 2 {made} 3",
        [["0.0", 2, 4, 16, 2, 64]],
        [["0.0", 8, 64]],
    ]


def test_only_dense_tensors_of_one_type_are_taken(drive: Drive) -> None:
    result = drive("""
mine = plugin(shape=shape_of(dtype="float16", pool_dtype="float8_e4m3fn", granularity=64),
              given=[*UPDATE, "kv_scales"])
result = [mine.formats(i, 9) for i in range(-1, 13)]
""")
    dtypes = ["float16", "float8_e4m3fn", *["int32"] * 4, "float16", "float16", "float32"]
    outputs = ["float16", "float8_e4m3fn", "float32"]
    assert result == [[], *([[dtype, 0]] for dtype in [*dtypes, *outputs]), []]


def test_the_pool_is_aliased_where_it_is_said(drive: Drive) -> None:
    assert drive("""
scaled = dict(shape=shape_of(pool_dtype="int8", granularity=64), given=[*UPDATE, "kv_scales"])
store = ["kv_blocks", "k", "v", *UPDATE[2:5]]
result = [plugin(**o).aliased() for o in (
    dict(), dict(aliased=0), dict(pool_out=0), scaled, {**scaled, "aliased": 0})]
result += [plugin("store_kv", given=store).aliased(),
           plugin("paged_attention", given=UPDATE[:6]).aliased()]
""") == [[-1, 1], [-1, -1], [-1], [-1, 1, 8], [-1, -1, -1], [0], [-1]]


def test_clones_and_engines_make_equal_plugins(drive: Drive) -> None:
    result = drive("""
scaled = dict(shape=shape_of(pool_dtype="int8", granularity=64), given=[*UPDATE, "kv_scales"])
first = plugin(aliased=0, **scaled)
copies = [first.clone(), first.attach(), first.reload(), first.reload().reload()]
first.delete()
given = operands(given=scaled["given"], pool="int8")
result = [[p.text("h_serialized"), p.text("h_names"), p.types([d for d, _ in given.values()]),
           p.shapes([s for _, s in given.values()]), p.aliased()] for p in copies]
""")
    assert len({json.dumps(entry) for entry in result}) == 1
    assert result[0][0].splitlines()[0] == "layer 10 1"
    assert [line.split()[0] for line in result[0][0].splitlines()][-5:] == [
        "inputs", "aliased", "pool_out", "kernels", "images",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("layer=None", "update_and_attend: expected field layer, got none"),
        ("scale=None", "update_and_attend: expected field scale, got none"),
        ("kernels=None", "update_and_attend: expected field kernels, got none"),
        ("layer=0.5",
         "update_and_attend: field layer: expected one integer, got type 1 with 1 elements"),
        ("layer=('int32', bytes(8), 2)",
         "update_and_attend: field layer: expected one integer, got type 5 with 2 elements"),
        ("scale='0.125'",
         "update_and_attend: field scale: expected one float, got type 6 with 6 elements"),
        ("kernels=7",
         "update_and_attend: field kernels: expected bytes, got type 5 with 1 elements"),
        ("kernels=''", 'field kernels: expected "kvgraph-kernels 1" from this kvgraph, got ""'),
        ("inputs=6", "update_and_attend: field inputs: expected a bit for each of 11 operands with "
         "all of 63 set, got 6"),
        ("inputs=1 << 11 | 255", "update_and_attend: field inputs: expected a bit for each of 11 "
         "operands with all of 63 set, got 2303"),
        ("scale=0.25",
         "update_and_attend: scale: expected 0.125 from the node's kernels, got 0.25"),
        ("window=9", "update_and_attend: window: expected 0 from the node's kernels, got 9"),
        ("images=fields()['images'][:-1]", "field images: expected whole images, got 859 bytes, "
         "which end inside one"),
        ("images=b'?' + fields()['images'][1:]", None),
    ],
)  # fmt: skip
def test_what_fields_are_refused(drive: Drive, change: str, sentence: str | None) -> None:
    found = drive(f"result = refused({change})")
    if sentence is None:
        assert found.startswith("field images: expected SHA-256 3f")
        assert found.endswith(": it was changed")
    else:
        assert found == sentence


def test_python_and_parser_types_of_fields_are_taken(drive: Drive) -> None:
    """64-bit numbers, text without an end, images as characters with one."""
    assert drive("""
mine = fields()
ended = mine["images"] + b"\\0"
wide = dict(
    layer=("int64", (3).to_bytes(8, "little"), 1),
    scale=("float64", np.float64(0.125).tobytes(), 1),
    kernels=mine["kernels"].encode(), images=("char", ended, len(ended)),
)
result = [bool(plugin(**wide)), said()]
""") == [True, ""]


def test_refusals_reach_the_logger(drive: Drive) -> None:
    assert drive("""
logged()
refused(scale=0.25)
first = logged(present=False)
refused(window=9)
result = [first, logged(), said()]
""") == [
        "1 update_and_attend: scale: expected 0.125 from the node's kernels, got 0.25\n",
        "1 update_and_attend: scale: expected 0.125 from the node's kernels, got 0.25\n",
        "update_and_attend: window: expected 0 from the node's kernels, got 9",
    ]


# ---- launches -----------------------------------------------------------------------------------


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
     ("all", 64, 64, 500)],
)  # fmt: skip
def test_a_step_launches_what_the_kernels_plan(
    drive: Drive, kind: str, batch: int, tokens: int, width: int
) -> None:
    options, names = KINDS[kind]
    shape = ", ".join(f"{name}={value!r}" for name, value in options.items())
    first, again, needed, loads, calls = drive(f"""
from kvgraph.kernels.shapes import Rope
names = {names!r}
mine = plugin(shape=shape_of({shape}), given=names,
              rope_style=int({bool(options.get("rope") and options["rope"].interleaved)})).attach()
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


def test_other_ops_launch_their_part(drive: Drive) -> None:
    stored, attended, reads = drive("""
order = ["kv_blocks", "k", "v", *UPDATE[2:5]]
given = operands(2, 2, 900, 10)
at = addresses(given)

def run(mine, names, *outputs):
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
mine = plugin(archs=("sm_86", "sm_89"))
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


@pytest.mark.parametrize(("sm", "arch"), [(86, "sm_86"), (87, "sm_86"), (89, "sm_89"), (80, "")])
def test_a_device_gets_its_architectures_kernels(drive: Drive, sm: int, arch: str) -> None:
    code = """
mine = plugin(archs=("sm_86", "sm_89", "sm_120"))
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
            "device: expected one that runs the graph's kernels (sm_86, sm_89, sm_120), got "
            "compute capability 8.0",
            [],
        )


def test_one_node_carries_the_images_of_its_engine(drive: Drive) -> None:
    first, second, third, alone = drive("""
given = operands(2, 2, 900, 10)
alone = plugin(images=b"").attach().enqueue(given, addresses(given))
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
