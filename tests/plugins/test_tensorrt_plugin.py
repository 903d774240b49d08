"""TensorRT's plugins without TensorRT: a host of our own calls every method (tensorrt_host.cpp).

The builder of tensorrt-rtx calls them for real in tests/compiler/test_tensorrt_target.py. Launches
go to the fake driver of the launcher's tests.
"""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.plugins.hosts import Drive, build

PRELUDE = "import ctypes, json\nfrom tests.plugins.tensorrt_host import *"


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """`drive(code)` -> what `code`, with PRELUDE, puts in `result`."""
    host = build("tensorrt", tmp_path_factory.mktemp("host"))
    return partial(host.result, PRELUDE, driver=False)


def test_creators_and_interfaces(drive: Drive) -> None:
    found, names = drive("result = [creators(), plugin().text('h_names')]")
    assert [line[:4] for line in found] == [
        ["PLUGIN CREATOR_V3ONE", "kvgraph", op, "1"]
        for op in ("store_kv", "paged_attention", "update_and_attend")
    ]
    own = ["inputs", "aliased", "pool_out", "kernels", "images"]
    assert found[0][4:] == ["layer", *own]
    assert found[2][4:] == [
        "layer", "scale", "window", "softcap", "causal", "v_head_dim", "chunked", "rope_style",
        "norm_epsilon", "norm_offset", *own
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
        ("kernels=b''", "field kernels: expected a record of at least 112 bytes, got 0"),
        ("kernels='kvgraph-kernels 1'", "field kernels: expected version 4 of this kvgraph, got 1: "
         "compile the model again"),
        ("inputs=6", "update_and_attend: field inputs: expected a bit for each of 13 operands with "
         "all of 63 set, got 6"),
        ("inputs=1 << 13 | 255", "update_and_attend: field inputs: expected a bit for each of 13 "
         "operands with all of 63 set, got 8447"),
        ("inputs=1 << 10 | 255",
         "update_and_attend: sinks: expected none, as the node's kernels take none, got one: "
         "compile the model again with it"),
        ("inputs=1 << 12 | 1 << 11 | 255",
         "update_and_attend: q_norm: expected none, as the node's kernels take none, got one: "
         "compile the model again with it"),
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
    """64-bit numbers, and bytes as characters with an end."""
    assert drive("""
mine = fields()
ended = {name: mine[name] + b"\\0" for name in ("kernels", "images")}
wide = dict(
    layer=("int64", (3).to_bytes(8, "little"), 1),
    scale=("float64", np.float64(0.125).tobytes(), 1),
    **{name: ("char", data, len(data)) for name, data in ended.items()},
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
