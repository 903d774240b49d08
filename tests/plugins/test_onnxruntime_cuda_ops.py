"""ONNX Runtime's CUDA ops without ONNX Runtime or a GPU: a host of our own (onnxruntime_host.cpp)
registers the library and runs its kernels; launches go to a fake driver, and are those that the
CUDA session plans for the same step.
"""

from __future__ import annotations

import re
from functools import partial

import pytest

from tests.plugins.hosts import Drive, build
from tests.plugins.tensorrt_fields import compiled, shape_of

PRELUDE = """
import ctypes, json, os
from tests.plugins.onnxruntime_host import *
from kvgraph.kernels.shapes import HeadNorm, Rope

def refused(op="update_and_attend", **changed):
    assert not Kernel(op, attributes(**changed))
    return said()
"""


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """`drive(code)` -> what `code`, with PRELUDE, puts in `result`."""
    host = build("onnxruntime", tmp_path_factory.mktemp("host"))
    return partial(host.result, PRELUDE, driver=True)


# ---- registration -------------------------------------------------------------------------------


def test_every_cache_op_is_registered_for_both_providers(drive: Drive) -> None:
    """With equal types and aliases; the CUDA provider leaves max_lengths with the host."""
    found = drive("result = [register(), ops()]", driver=False)
    assert found[0] == ""
    by_provider: dict[str, set[tuple[str, ...]]] = {}
    for domain, op, provider, types, _, aliases in found[1]:
        assert domain == "kvgraph"
        by_provider.setdefault(provider, set()).add((op, types, aliases))
    cuda = by_provider["CUDAExecutionProvider"]
    assert by_provider["CPUExecutionProvider"] >= cuda
    assert {op for op, *_ in cuda} == {"store_kv", "paged_attention", "update_and_attend"}
    assert {aliases for op, _, aliases in cuda if op == "update_and_attend"} == {"1>1,9>2"}
    memory = {(op, on): where for _, op, on, _, where, _ in found[1]}
    assert memory["update_and_attend", "CUDAExecutionProvider"] == "0,0,0,0,0,-2,0,0,0,0,0,0,0"
    assert memory["update_and_attend", "CPUExecutionProvider"] == "0,0,0,0,0,0,0,0,0,0,0,0,0"
    assert memory["store_kv", "CUDAExecutionProvider"] == "0,0,0,0,0,0,0"


def test_arrays_of_aliases_are_made_only_where_there_are_some(drive: Drive) -> None:
    found = drive("register(); result = ops()", driver=False)
    aliases = {op: aliases for _, op, *_, aliases in found}
    assert aliases["linear"] == aliases["paged_attention"] == ""
    assert aliases["update_and_attend"] == "1>1,9>2"


@pytest.mark.parametrize(
    ("newest", "version", "is_refused"),
    [(20, "1.20.9", True), (21, "1.21.0", True), (27, "1.27.1", True), (28, "1.28.0", False),
     (100, "1.100.2", False), (24, "2.0.0", False), (23, "1.28.0", True)],
)  # fmt: skip
def test_an_older_runtime_is_refused(
    drive: Drive, newest: int, version: str, is_refused: bool
) -> None:
    """Those before 1.28 have the functions that the library calls, but crash later."""
    sentence = f"kvgraph: expected ONNX Runtime 1.28 or newer, got {version}"
    found = drive(f"result = register({newest}, {version!r})", driver=False)
    assert found == (sentence if is_refused else "")


MEMORY = "memory: expected enough for this call, got no more from the system"


def test_memory_that_runs_out_while_a_library_is_registered(drive: Drive) -> None:
    found = drive("""
dll.o_memory(ctypes.c_size_t(300))
short = register()
dll.o_memory(ctypes.c_size_t(-1))
result = [short, register(), len(ops()) > 0]
""", driver=False)  # fmt: skip
    assert found == [MEMORY, "", True]


# ---- what a node must have ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("kernels=None", "update_and_attend: expected attribute kernels, a tensor of bytes, for "
         "the CUDA provider, got none: compile the model for a cuda target"),
        ("layer=None", "no attribute layer"),
        ("kernels=bytes([9, 0, 0, 0]) + attributes()['kernels'][4:]",
         "field kernels: expected version 4 of this kvgraph, got 9: compile the model again"),
        ("scale=0.25",
         "update_and_attend: scale: expected 0.125 from the node's kernels, got 0.25"),
        ("window=9", "update_and_attend: window: expected 0 from the node's kernels, got 9"),
        ("images=attributes()['images'][:-1]", "field images: expected whole images, got 859 "
         "bytes, which end inside one"),
        ("images=b'?' + attributes()['images'][1:]", None),
        ("kernels=5", "expected to have type: TENSOR"),
        ("images=5", "expected to have type: TENSOR"),
    ],
)  # fmt: skip
def test_what_attributes_are_refused(drive: Drive, change: str, sentence: str | None) -> None:
    found, alive = drive(f"result = [refused({change}), dll.o_alive()]", driver=False)
    if sentence is None:
        assert re.fullmatch("field images: expected SHA-256 3f.*: it was changed", found)
    else:
        assert found == sentence
    assert alive == 0, "no status is left over"


def test_attributes_of_another_type_are_refused(drive: Drive) -> None:
    """21 is uint4, which has two elements in a byte."""
    code = "dll.o_bytes(21); result = [refused(), dll.o_alive()]"
    sentence = "kernels: expected a row of uint8, got rank 1 of ONNX element type 21"
    assert drive(code, driver=False) == [f"update_and_attend: {sentence}", 0]


@pytest.mark.parametrize(("provider", "bytes_"), [("CPU", 64), ("CUDA", 64), ("CUDA", 600)])
def test_memory_that_runs_out_while_a_kernel_is_made(
    drive: Drive, provider: str, bytes_: int
) -> None:
    """For the kernel itself, and for its images, which are copied from a value of the host's."""
    found = drive(f"""
register()
dll.o_memory(ctypes.c_size_t({bytes_}))
short = [bool(Kernel(provider={provider})), said(), dll.o_alive()]
dll.o_memory(ctypes.c_size_t(-1))
result = [short, bool(Kernel(provider={provider}))]
""", driver=False)  # fmt: skip
    assert found == [[False, MEMORY, 0], True]


def test_no_device_is_asked_before_the_first_step(drive: Drive) -> None:
    code = "k = Kernel(); result = [bool(k), 'libcuda' in open('/proc/self/maps').read()]"
    assert drive(code) == [True, False]


# ---- launches -----------------------------------------------------------------------------------

STEPS = [(1, 1, 200, 1, 3000), (4, 4, 200, 1, 900), (64, 64, 500, 1, 7900), (3, 700, 60, 600, 900),
         (1, 300, 30, 300, 300), (200, 200, 4, 1, 50), (2, 1024, 40, 512, 640)]  # fmt: skip
KINDS = {
    "plain": ("", []),
    "int8 pool": ("pool_dtype='int8', granularity=64", ["kv_scales"]),
    "rope": ("rope=Rope(64)", ["cos_sin"]),
    "norms": ("norm=HeadNorm(1e-5, 1.0), rope=Rope(64)", ["cos_sin", "q_norm", "k_norm"]),
    "all": (
        "pool_dtype='float8_e4m3fn', granularity=64, rope=Rope(32, True), sinks=True, window=700",
        ["cos_sin", "kv_scales", "sinks"],
    ),
}


@pytest.mark.parametrize(
    ("kind", "step"),
    [*(("plain", step) for step in STEPS), *((kind, STEPS[3]) for kind in list(KINDS)[1:]),
     ("all", STEPS[2])],
)  # fmt: skip
def test_a_step_launches_what_the_cuda_session_does(
    drive: Drive, kind: str, step: tuple[int, ...]
) -> None:
    """Names, grids, arguments, stream; scratch memory is the host's, and goes back to it."""
    options, more = KINDS[kind]
    batch, tokens, width, longest_new, longest = step
    refusals, calls, expected, asked, reloads, alive = drive(f"""
shape = shape_of({options})
pool = shape.cache.pool_dtype
given = operands({batch}, {tokens}, {width}, given=[*UPDATE, *{more!r}], pool=pool)
if "cos_sin" in given: given["cos_sin"] = ("float32", (16 * {width}, shape.rope.rotary_dim))
mine = Kernel(given=attributes(shape))
assert mine, said()
first = mine.compute(given, {(longest_new, longest)})
before = len(driver_calls())
again = mine.compute(given, {(longest_new, longest)})
loads = [c for c in driver_calls()[before:] if "Load" in c or "GetFunction" in c or "FuncSet" in c]
asked = log()
mine.destroy()
expected = planned(Sizes({batch}, {tokens}, {longest_new}, {longest}, {width}), shape)
result = [[first, again], launched(), expected, [asked, log()], loads, dll.o_alive()]
""")  # fmt: skip
    assert refusals == ["", ""]
    assert expected
    assert calls == expected * 2
    assert reloads == [], "a second step loads nothing"
    assert alive == 0
    asked, at_the_end = asked
    assert at_the_end == [*asked, "release"]
    scratch = [line for line in asked if line.startswith(("scratch", "free"))]
    if any(call.split()[1].startswith("mergeparts") for call in calls):
        assert re.fullmatch(r"scratch \d+;free 0;scratch \d+;free 0", ";".join(scratch))
    else:
        assert scratch == []


def test_other_ops_launch_their_part(drive: Drive) -> None:
    """store_kv, paged_attention, and an update_and_attend that reads another layer's cache."""
    stored, attended, reads, expected = drive("""
def run(op, names, *left_out):
    mine = Kernel(op, attributes())
    assert mine, said()
    before = len(launched())
    assert mine.compute(operands(given=names), (1, 160)) == ""
    return launched()[before:]

def named(calls):  # addresses differ: an operand has another place in another op
    return [c.split(" in ")[0] + c[c.index(" grid"):c.index(": p")] for c in calls]

result = [
    named(run("store_kv", ["kv_blocks", "k", "v", *UPDATE[2:5]])),
    named(run("paged_attention", UPDATE[:6])),
    run("update_and_attend", UPDATE[:6]),
    planned(Sizes(2, 2, 1, 160, 10)),
]
""")  # fmt: skip
    names = [c.split(" in ")[0] + c[c.index(" grid") : c.index(": p")] for c in expected]
    assert stored == names[:1]
    assert attended == names[1:]
    assert reads == expected[1:]


def test_one_node_carries_the_images_of_its_graph(drive: Drive) -> None:
    alone, before, after = drive("""
alone = Kernel(given=attributes(images=None)).compute(operands())
carrier, other = Kernel(), Kernel(given=attributes(images=b""))
before = other.compute(operands())
third = Kernel(given=attributes(images=None))
carrier.destroy()
result = [alone, before, third.compute(operands())]
""")  # fmt: skip
    sentence = r"storekv_p+i+: expected image [0-9a-f]{16} from the node of this graph that .*"
    assert re.fullmatch(sentence, alone)
    assert before == ""
    assert re.fullmatch(sentence, after)


@pytest.mark.parametrize(
    ("sm", "arch"),
    [(86, "sm_86"), (87, "sm_86"), (89, "sm_89"), (120, "sm_120"), (80, ""), (121, "")],
)
def test_a_device_gets_its_architectures_kernels(drive: Drive, sm: int, arch: str) -> None:
    refusal, loaded = drive("""
mine = Kernel(given=attributes(archs=("sm_86", "sm_89", "sm_120")))
refusal = mine.compute(operands())
result = [refusal, [c.split()[1] for c in driver_calls() if c.startswith("cuModuleLoadData")]]
""", sm=sm)  # fmt: skip
    if arch:
        assert refusal == ""
        assert loaded == [k.cubin[64:68].decode() for k in compiled(shape_of(), arch)]
    else:
        assert (refusal, loaded) == (
            "device: expected one that runs the graph's kernels (sm_86, sm_89, sm_120a), got "
            f"compute capability {sm // 10}.{sm % 10}: compile with --target cuda:sm_{sm}",
            [],
        )


CONTEXTS = """
step = lambda mine: mine.compute(operands())
fake = ctypes.CDLL("libcuda.so.1")
gone = ctypes.c_uint64()
push, pop = fake.cuCtxPushCurrent_v2, lambda: fake.cuCtxPopCurrent_v2(ctypes.byref(gone))
def launched_in():
    return [call.split(" in ")[1].split()[0] for call in launched()]
"""


def test_kernels_are_those_of_the_threads_context(drive: Drive) -> None:
    """Two contexts of one device."""
    code = """
mine = Kernel()
said = []
for context in (0x2000, 0x3000, 0x2000):
    push(ctypes.c_uint64(context))
    said.append(step(mine))
    pop()
result = [said, launched_in()]
"""
    said, contexts = drive(CONTEXTS + code)
    assert said == [""] * 3
    each = len(contexts) // 3
    assert contexts == ["0x2000"] * each + ["0x3000"] * each + ["0x2000"] * each


def test_a_load_that_fails_leaves_the_kernels_of_the_last_context(drive: Drive) -> None:
    """Some of a node's kernels are there on device 1, because store_kv has them, others are not."""
    code = """
archs = ("sm_80", "sm_86")
mine, stores = Kernel(given=attributes(archs=archs)), Kernel("store_kv", attributes(archs=archs))
push(ctypes.c_uint64(0x2000))
said = [step(mine)]
push(ctypes.c_uint64(0x2001))
given = operands(given=["kv_blocks", "k", "v", *UPDATE[2:5]])
said.append(stores.compute(given))
before = len(launched())
os.environ["FAKE_FAIL"] = "cuModuleLoadData=2"
said.append(step(mine))
pop()
said.append(step(mine))
result = [said, launched_in()[before:]]
"""
    said, contexts = drive(CONTEXTS + code)
    assert [not s for s in said] == [True, True, False, True]
    assert set(contexts) == {"0x2000"}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("operands(), kv_blocks_out=0xB00000", "kv_blocks_out: expected the address of kv_blocks "
         "0x200000, got 0xb00000: bind one buffer to both, a copy of the pool is never made"),
        ("operands(lookup_table=('int32', (3, 10)))",
         "lookup_table: dim batch_size: expected 2 as cache_lengths has it, got 3"),
        ("operands(dtype='float16')", "q: expected bfloat16 from the node's kernels, got float16"),
        ("operands(pool='int8')", "kv_blocks: expected bfloat16 from the node's kernels, got int8"),
        ("operands(q=('bfloat16', (2, 8, 16)))",
         "q: head_dim: expected 64 from the node's kernels, got 16"),
        ("operands(q=('bfloat16', (2, 512)))", "q: expected rank 3, got 2"),
        ("operands(max_lengths=('int32', (0, 2)))",
         "max_lengths: expected at least one step, got none"),
        ("operands(), (0, 5)",
         "max_lengths: expected at least 1 new token and a context of 1, got 0 and 5"),
        ("operands(given=UPDATE[1:])", "q: expected bfloat16 from the node's kernels, got none"),
        ("operands(given=[*UPDATE, 'sinks'])",
         "sinks: expected none, as the node's kernels take none, got one: "
         "compile the model again with it"),
        ("operands(given=[*UPDATE, 'q_norm', 'k_norm'])",
         "q_norm: expected none, as the node's kernels take none, got one: "
         "compile the model again with it"),
    ],
)  # fmt: skip
def test_what_a_step_refuses(drive: Drive, call: str, sentence: str) -> None:
    code = f"result = [Kernel().compute({call}), launched(), dll.o_alive()]"
    assert drive(code) == [f"update_and_attend: {sentence}", [], 0]


def test_contexts_beyond_the_rotary_table_are_refused(drive: Drive) -> None:
    said, calls = drive("""
mine = Kernel(given=attributes(shape_of(rope=Rope(64))))
given = operands(given=[*UPDATE, "cos_sin"])
result = [mine.compute(given, (1, 161)), launched()]
""")  # fmt: skip
    assert (said, calls) == (
        "update_and_attend: max_lengths: expected contexts of at most the 160 positions of "
        "cos_sin, got 161",
        [],
    )


def test_a_step_without_tokens_launches_nothing(drive: Drive) -> None:
    code = "result = [Kernel().compute(operands(2, 0), (0, 0)), launched()]"
    assert drive(code) == ["", []]


def test_the_hosts_and_the_drivers_refusals_are_handed_on(drive: Drive) -> None:
    code = """
mine = Kernel()
dll.o_no_scratch(True)
result = [mine.compute(operands(1, 1, 200), (1, 3000)), launched()]
"""
    assert drive(code) == ["out of device memory", []]
    said = drive("result = Kernel().compute(operands())", FAKE_FAIL="cuModuleLoadData=999")
    assert said == (
        "cuModuleLoadData: expected success of the CUDA driver, got CUDA_ERROR_UNKNOWN (999): no "
        "description"
    )
    said = drive("result = Kernel().compute(operands())", driver=False)
    assert said.startswith("libcuda.so.1: expected an NVIDIA driver on this machine, got none")
