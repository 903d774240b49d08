"""The CUDA launcher without a GPU: what it asks of a driver, and what it refuses to ask.

The driver is a fake, compiled here and found as libcuda.so.1 by a process of its own: it records
every call, so that what a real one would get is compared word for word.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_driver import build, cubin

PRELUDE = """
import ctypes, json, os, sys, threading
from kvgraph.errors import KVGraphError
from kvgraph.ops.cuda_native import Launcher, Module
cuda = Launcher()
loaded = lambda: "libcuda.so.1" in open("/proc/self/maps").read()
fake = lambda: ctypes.CDLL("libcuda.so.1")
def image(name):
    with open(os.path.join(os.environ["IMAGES"], name), "rb") as file:
        return file.read()
def log():
    function = fake().fake_log
    function.restype = ctypes.c_char_p
    return function().decode().splitlines()
def said(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except KVGraphError as error:
        return [type(error).__name__, str(error)]
def launched():
    return [line for line in log() if line.startswith("cuLaunch")]
"""

Drive = Callable[..., Any]


SM_80, SM_90 = cubin(0x06005004, tag=b"sm80"), cubin(0x06005A04, tag=b"sm90")
SM_90_OTHER = cubin(0x06005A04, tag=b"more")
SM_90A = cubin(0x5A0D5A, abi=7, tag=b"90a7")
SM_100 = cubin(0x06006402, tag=b"s100")
SM_120A = cubin(0x0600780A, tag=b"s120")
IMAGES = {
    "sm_80": SM_80,
    "sm_90": SM_90,
    "more": SM_90_OTHER,
    "sm_90a": SM_90A,
    "sm_100": SM_100,
    "sm_120a": SM_120A,
}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, and of fake drivers: `new/` and `partial/`, which lacks cuInit."""
    folder = tmp_path_factory.mktemp("driver")
    for name, options in {"new": [], "partial": ["-DcuInit=cuNone"]}.items():
        build(folder / name, *options)
    for name, image in IMAGES.items():
        (folder / name).write_bytes(image)
    return folder


@pytest.fixture
def drive(fakes: Path) -> Drive:
    """`drive(code, driver="new", **environment)` -> what `code`, with PRELUDE, puts in `result`."""

    def run(code: str, driver: str = "new", **environment: str) -> Any:
        given = {**os.environ, "IMAGES": str(fakes), **environment}
        given["LD_LIBRARY_PATH"] = str(fakes / driver)
        script = f"{PRELUDE}\n{code}\nprint(json.dumps(result))"
        done = subprocess.run(
            [sys.executable, "-c", script], env=given, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_a_kernel_is_loaded_once_and_launched(drive: Drive) -> None:
    result = drive("""
before = loaded()
module = cuda.load(image("sm_90"), "sm_90")
again = cuda.load(image("sm_90"), "sm_90")
other = cuda.load(image("more"), "sm_90")
options = dict(num_warps=8, shared_bytes=163840)
kernel = cuda.kernel(module, "attend_pilfp", ["*bf16:16", "i32", "i64", "fp32", "*i32"], **options)
cuda.launch(kernel, (7, 3), [0x7F00_1234_5670, -5, -(2**40), 0.5, 0], stream=0xABC)
cuda.launch(kernel, (2**31 - 1, 65535, 65535), [16, 2**31 - 1, 2**63 - 1, -1e30, 2**64 - 1])
small = cuda.kernel(module, "store_i", ["i32"], num_warps=1, shared_bytes=49152)
cuda.launch(small, (1,), [-(2**31)])
result = [before, [module.handle, again.handle, other.handle], log()]
""")
    before, handles, calls = result
    assert not before, "the driver was loaded before it was needed"
    assert handles == [1, 1, 2]
    assert calls == [
        "cuInit 0",
        "cuDevicePrimaryCtxRetain 0",
        "cuCtxPushCurrent 0x1000",
        "cuModuleLoadData sm90 in 0x1000",
        "cuCtxPopCurrent 0x1000",
        "cuCtxPushCurrent 0x1000",
        "cuModuleLoadData more in 0x1000",
        "cuCtxPopCurrent 0x1000",
        "cuCtxPushCurrent 0x1000",
        "cuModuleGetFunction 0x501 attend_pilfp",
        "cuFuncSetCacheConfig attend_pilfp 1",
        "cuFuncSetAttribute attend_pilfp 8 163840",
        "cuCtxPopCurrent 0x1000",
        "cuCtxPushCurrent 0x1000",
        "cuLaunchKernel attend_pilfp in 0x1000 grid 7,3,1 block 256,1,1 shared 163840 stream abc: "
        "p7f0012345670 i-5 l-1099511627776 f0.5 p0 s0 s0 extra0",
        "cuCtxPopCurrent 0x1000",
        "cuCtxPushCurrent 0x1000",
        "cuLaunchKernel attend_pilfp in 0x1000 grid 2147483647,65535,65535 block 256,1,1 "
        "shared 163840 stream 0: "
        "p10 i2147483647 l9223372036854775807 f-1e+30 pffffffffffffffff s0 s0 extra0",
        "cuCtxPopCurrent 0x1000",
        "cuCtxPushCurrent 0x1000",
        "cuModuleGetFunction 0x501 store_i",  # 48 KiB need no attribute
        "cuCtxPopCurrent 0x1000",
        "cuCtxPushCurrent 0x1000",
        "cuLaunchKernel store_i in 0x1000 grid 1,1,1 block 32,1,1 shared 49152 stream 0: "
        "i-2147483648 s0 s0 extra0",
        "cuCtxPopCurrent 0x1000",
    ]


def test_the_threads_own_context_is_used_and_left(drive: Drive) -> None:
    """A context of device 0 that is current is taken as it is; one of device 1 is put back."""
    result = drive("""
cuda.device_count()
push, current = fake().cuCtxPushCurrent_v2, ctypes.c_uint64()
push(ctypes.c_uint64(0x2000))
module = cuda.load(image("sm_90"), "sm_90")
kernel = cuda.kernel(module, "k_", [], num_warps=1)
cuda.launch(kernel, (1,), [])
push(ctypes.c_uint64(0x2001))
same = cuda.load(image("sm_90"), "sm_90")
cuda.launch(kernel, (1,), [])
cuda.load(image("sm_80"), "sm_80", device=1)
fake().cuCtxGetCurrent(ctypes.byref(current))
result = [module.handle, same.handle, current.value, log()]
""")
    first, primary, current, calls = result
    assert (first, primary, current) == (1, 2, 0x2001)
    assert [c for c in calls if "Kernel" in c or "Module" in c or "Retain" in c] == [
        "cuModuleLoadData sm90 in 0x2000",
        "cuModuleGetFunction 0x501 k_",
        "cuLaunchKernel k_ in 0x2000 grid 1,1,1 block 32,1,1 shared 0 stream 0: s0 s0 extra0",
        "cuDevicePrimaryCtxRetain 0",
        "cuModuleLoadData sm90 in 0x1000",
        "cuLaunchKernel k_ in 0x2000 grid 1,1,1 block 32,1,1 shared 0 stream 0: s0 s0 extra0",
        "cuModuleLoadData sm80 in 0x2001",
    ]


def test_what_a_launch_refuses(drive: Drive) -> None:
    result = drive("""
module = cuda.load(image("sm_90"), "sm_90")
def kernel(*parameters, name="k_pi", **options):
    return cuda.kernel(module, name, parameters, **{"num_warps": 4, **options})
pair = kernel("*bf16:16", "i32")
result = [
    said(cuda.launch, pair, (1,), [8, 1]),
    said(cuda.launch, pair, (1,), [16]),
    said(cuda.launch, pair, (1,), [16, 2**31]),
    said(cuda.launch, pair, (1,), [1.5, 0]),
    said(cuda.launch, pair, (0,), [16, 1]),
    said(cuda.launch, pair, (1, 65536), [16, 1]),
    said(cuda.launch, pair, (), [16, 1]),
    said(cuda.launch, pair, (1, 1, 1, 1), [16, 1]),
    said(cuda.launch, kernel("fp32"), (1,), [None]),
    said(cuda.launch, kernel(num_warps=33), (1,), []),
    said(cuda.launch, kernel(*["i32"] * 63), (1,), [0] * 63),
    said(kernel, "bf16"),
    said(kernel, name="missing"),
    said(kernel, name=""),
    said(kernel, shared_bytes=232449),
    said(cuda.kernel, Module(5, "sm_90"), "k", [], num_warps=1),
    launched(),
]
""")
    assert result.pop() == [], "nothing of this was launched"
    digest = hashlib.sha256(SM_90).hexdigest()[:16]
    assert [sentence for _, sentence in result] == [
        "k_pi: argument 0: expected an address that is a multiple of 16, got 0x8",
        "k_pi: expected 2 arguments, got 1",
        "k_pi: argument 1: expected i32, got 2147483648",
        "k_pi: argument 0: expected *bf16:16, got 1.5",
        "k_pi: grid: dim 0: expected 1 to 2147483647 blocks, got 0",
        "k_pi: grid: dim 1: expected 1 to 65535 blocks, got 65536",
        "k_pi: grid: expected 1 to 3 dims, got ()",
        "k_pi: grid: expected 1 to 3 dims, got (1, 1, 1, 1)",
        "k_pi: argument 0: expected fp32, got None",
        "k_pi: num_warps: expected 1 to 32, got 33",
        "k_pi: expected at most 62 arguments, got 63",
        "k_pi: parameter 0: expected *TYPE, *TYPE:ALIGNMENT, i32, i64 or fp32, got 'bf16'",
        f'function: expected a kernel of the sm_90 image {digest}, got "missing"',
        "function: expected a name, got none",
        "k_pi: shared_bytes: expected at most 232448 of this device, got 232449",
        "module: expected one of the 1 modules loaded, got 5",
    ]
    kinds = [kind for kind, _ in result]
    assert kinds == ["DeviceError" if "of this device" in s else "KernelError" for _, s in result]


@pytest.mark.parametrize(
    ("image", "arch", "sm", "sentence"),
    [
        ("sm_90", "sm_90", "90", None),
        ("sm_80", "sm_80", "86", None),
        ("sm_100", "sm_100", "103", None),
        ("sm_90a", "sm_90a", "90", None),
        ("sm_90", "sm_90", "80", "9.0 or newer of its major for sm_90 code, got 8.0 (sm_80)"),
        ("sm_80", "sm_80", "90", "8.0 or newer of its major for sm_80 code, got 9.0 (sm_90)"),
        ("sm_100", "sm_100a", "103", "10.0 for sm_100a code, got 10.3 (sm_103)"),
        ("sm_120a", "sm_120", "121", "12.0 for sm_120a code, got 12.1 (sm_121)"),
    ],
)  # fmt: skip
def test_an_image_loads_only_where_it_runs(
    drive: Drive, image: str, arch: str, sm: str, sentence: str | None
) -> None:
    code = (
        f"result = [said(cuda.load, image({image!r}), {arch!r}), cuda.compute_capability(), log()]"
    )
    outcome, capability, calls = drive(code, FAKE_SM=sm)
    assert capability == [int(sm) // 10, int(sm) % 10]
    assert any("cuModuleLoadData" in c for c in calls) == (sentence is None)
    if sentence is None:
        assert outcome == [1, arch]
    else:
        assert outcome == ["DeviceError", f"device 0: expected compute capability {sentence}"]


def test_devices(drive: Drive) -> None:
    result = drive("""
result = [
    cuda.device_count(), cuda.device(0), cuda.device(1),
    said(cuda.check_arch, "sm_90a"), said(cuda.check_arch, "sm_90a", 1), said(cuda.device, 2),
]
""")  # fmt: skip
    assert result[:4] == [2, [[9, 0], 132, 232448], [[8, 0], 132, 232448], None]
    assert result[4:] == [
        ["DeviceError",
         "device 1: expected compute capability 9.0 for sm_90a code, got 8.0 (sm_80)"],
        ["DeviceError", "device: expected one of the 2 CUDA devices of this machine, got 2"],
    ]  # fmt: skip


def test_an_old_driver_is_refused(drive: Drive) -> None:
    code = """
result = [
    said(cuda.load, image("sm_120a"), "sm_120"),
    said(cuda.load, image("sm_90"), "sm_90", min_driver=(13, 0)),
    said(cuda.load, image("sm_90"), "sm_90"),
]
"""
    kind, sentence = "DeviceError", "libcuda.so.1: expected a driver for CUDA %s, got one for 12.2"
    assert drive(code, FAKE_DRIVER="12020") == [
        [kind, sentence % "12.8 or newer for sm_120a code"],
        [kind, sentence % "13.0 or newer for sm_90 code"],
        [1, "sm_90"],
    ]
    missing = "libcuda.so.1: expected the entry point cuInit, got none: update the NVIDIA driver"
    assert drive("result = said(cuda.device_count)", driver="partial") == [kind, missing]


def test_errors_of_the_driver_have_their_names(drive: Drive) -> None:
    code = """
module = said(cuda.load, image("sm_90"), "sm_90")
if isinstance(module, Module):
    kernel = cuda.kernel(module, "k_", [], num_warps=4)
    module = said(cuda.launch, kernel, (1,), [])
result = module
"""
    digest = hashlib.sha256(SM_90).hexdigest()[:16]
    for fail, kind, sentence in (
        ("cuLaunchKernel=701", "DeviceError",
         "k_: expected success of the CUDA driver, got CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701): "
         "too many resources requested for launch"),
        ("cuLaunchKernel=700", "DeviceError",
         "k_: expected success of the CUDA driver, got CUDA_ERROR_ILLEGAL_ADDRESS (700): "
         "no description; nothing runs on this device in this process any more: start it again"),
        ("cuInit=999", "DeviceError",
         "cuInit: expected success of the CUDA driver, got CUDA_ERROR_UNKNOWN (999): "
         "no description"),
        ("cuModuleLoadData=4711", "DeviceError",
         "cuModuleLoadData: expected success of the CUDA driver, got an unknown error (4711): "
         "no description"),
        ("cuModuleLoadData=200", "KernelError",
         f"image: expected a cubin that the driver takes, got the sm_90 image {digest}, which it "
         "calls damaged (CUDA_ERROR_INVALID_IMAGE)"),
    ):  # fmt: skip
        assert drive(code, FAKE_FAIL=fail) == [kind, sentence]
    assert drive("result = cuda.device_count()", FAKE_FAIL="cuInit=100") == 0


def test_threads_share_modules_and_do_not_mix_arguments(drive: Drive) -> None:
    launches = drive("""
def work(thread):
    for i in range(50):
        module = cuda.load(image("more" if i % 2 else "sm_90"), "sm_90")
        kernel = cuda.kernel(module, "k_ii", ["i32", "i32"], num_warps=1, shared_bytes=50000)
        cuda.launch(kernel, (1,), [thread, i])
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
result = log()
""")
    assert sum("cuModuleLoadData" in c for c in launches) == 2
    assert sum("cuModuleGetFunction" in c for c in launches) == 2
    assert sum("cuFuncSetAttribute" in c for c in launches) == 2
    got = {c.partition(": ")[2] for c in launches if c.startswith("cuLaunchKernel")}
    assert got == {f"i{thread} i{i} s0 s0 extra0" for thread in range(8) for i in range(50)}


def test_threads_that_launch_one_kernel_have_their_own_arguments(drive: Drive) -> None:
    """And each is told of its own ones."""
    result = drive("""
sys.setswitchinterval(1e-6)
kernel = cuda.kernel(
    cuda.load(image("sm_90"), "sm_90"), "k_pi", ["*bf16:16", "i32"], num_warps=1
)
refused = []
def work(thread):
    for i in range(50):
        cuda.launch(kernel, (thread + 1,), [16 * i, thread])
        refused.append([thread, said(cuda.launch, kernel, (1,), [16 * i, 2**31 + thread])])
        refused.append([thread, said(cuda.launch, kernel, (1,), [16 * thread + 8, i])])
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
result = [launched(), refused]
""")
    launches, refused = result
    assert sorted(line.partition(" grid ")[2].partition(" s0")[0] for line in launches) == sorted(
        f"{thread + 1},1,1 block 32,1,1 shared 0 stream 0: p{16 * i:x} i{thread}"
        for thread in range(8)
        for i in range(50)
    )
    said = {
        thread: {
            f"k_pi: argument 1: expected i32, got {2**31 + thread}",
            "k_pi: argument 0: expected an address that is a multiple of 16, "
            f"got {16 * thread + 8:#x}",
        }
        for thread in range(8)
    }
    found: dict[int, set[str]] = {}
    for thread, (kind, sentence) in refused:
        assert kind == "KernelError"
        found.setdefault(thread, set()).add(sentence)
    assert found == said
