"""Images and structs that the CUDA launcher refuses without a driver; cubins of a real assembler.

That a real driver does with a launch what its documentation says, only the last test shows, on a
GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from kvgraph.errors import DeviceError, KernelError
from kvgraph.ops import cuda_native
from kvgraph.ops.cuda_native import DEVICE, IMAGE, LAUNCH, Launcher, Module, launcher
from kvgraph.ops.cuda_native import LAUNCH_ABI_VERSION as VERSION
from kvgraph.ops.native import library_path
from tests.support.fake_driver import cubin

HEADER = (Path(__file__).parents[2] / "plugins/include/kvgraph/launch.h").read_text()
SM_80, SM_90 = cubin(0x06005004, tag=b"sm80"), cubin(0x06005A04, tag=b"sm90")
SM_90A = cubin(0x5A0D5A, abi=7, tag=b"90a7")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
def test_no_driver_is_one_sentence() -> None:
    sentence = r"libcuda\.so\.1: expected an NVIDIA driver on this machine, got none \(.+\)"
    for call in (
        launcher().device_count,
        launcher().compute_capability,
        lambda: launcher().check_arch("sm_90"),
        lambda: launcher().load(SM_90, "sm_90"),
    ):
        with pytest.raises(DeviceError, match=f"^{sentence}$"):
            call()


def with_program_headers(at: int, size: int = 56) -> bytes:
    """SM_90 with one program header, at that place of the file."""
    image = bytearray(SM_90)
    struct.pack_into("<Q", image, 32, at)
    struct.pack_into("<HH", image, 54, size, 1)
    return bytes(image)


CHANGED = SM_90[:66] + b"?" + SM_90[67:]
CUT = SM_90[:-1]
DIGEST = hashlib.sha256(SM_90).hexdigest()


@pytest.mark.parametrize(
    ("image", "arch", "sha256", "sentence"),
    [
        (b"", "sm_90", None, "image: expected a cubin (64-bit ELF), got something else"),
        (b"PTX" * 99, "sm_90", None, "image: expected a cubin (64-bit ELF), got something else"),
        (SM_90[:40], "sm_90", None,
         "image: expected a whole cubin, got 40 bytes, which end before its header"),
        (CUT, "sm_90", None,
         "image: expected a whole cubin, got 131 bytes, which end before its section headers"),
        (SM_90[:104] + b"\xff" * 8 + SM_90[112:], "sm_90", None,
         "image: expected a whole cubin, got 132 bytes, which end before its sections"),
        (with_program_headers(77), "sm_90", None,
         "image: expected a whole cubin, got 132 bytes, which end before its program headers"),
        (with_program_headers(64, 32), "sm_90", None,
         "image: expected program headers of 56 bytes, got 32"),
        (cubin(0, machine=62), "sm_90", None,
         "image: expected a cubin (ELF machine 190), got ELF machine 62"),
        (CHANGED, "sm_90", DIGEST, f"image: expected SHA-256 {DIGEST[:16]}, got "
         f"{hashlib.sha256(CHANGED).hexdigest()[:16]}: it was changed"),
        (SM_80, "sm_90", None, "image: expected a cubin for sm_90, got one for sm_80"),
        (SM_90A, "sm_80", None, "image: expected a cubin for sm_80, got one for sm_90"),
        (SM_90, "hopper", None, 'arch: expected a name such as sm_90 or sm_90a, got "hopper"'),
        (SM_90, "sm_90x", None, 'arch: expected a name such as sm_90 or sm_90a, got "sm_90x"'),
        (SM_90, "sm_9", None, 'arch: expected a name such as sm_90 or sm_90a, got "sm_9"'),
        (SM_90, "sm_90", "12", "sha256: expected 64 hexadecimal digits, got '12'"),
    ],
    ids=["empty", "ptx", "header", "cut", "sections", "program-headers",
         "program-header", "machine", "changed", "older", "newer", "arch-name",
         "arch-suffix", "arch-number", "hash"],
)  # fmt: skip
def test_a_damaged_or_other_image_is_refused(
    image: bytes, arch: str, sha256: str | None, sentence: str
) -> None:
    with pytest.raises(KernelError) as refusal:
        launcher().load(image, arch, sha256=sha256)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 119, 120, 128, 1000])
def test_hashes_are_sha256(size: int) -> None:
    image = bytes(range(251)) * 4
    image = image[:size]
    with pytest.raises(KernelError, match=hashlib.sha256(image).hexdigest()[:16]):
        launcher().load(image, "sm_90", sha256="00" * 32)
    with pytest.raises(KernelError, match="expected a cubin"):
        launcher().load(image, "sm_90", sha256=hashlib.sha256(image).hexdigest())


def refusal(entry: str, frame: bytes | None, *more: Any) -> str:
    message = ctypes.create_string_buffer(300)
    function = getattr(launcher().dll, f"kvg_cuda_{entry}")
    assert function(frame, *more, message, ctypes.c_size_t(300)) == cuda_native.REFUSED
    return message.value.decode()


@pytest.mark.parametrize(
    ("entry", "what", "packing"),
    [("load", "image", IMAGE), ("describe", "device", DEVICE), ("launch", "launch", LAUNCH)],
)
def test_versions_and_sizes_of_structs_are_checked(
    entry: str, what: str, packing: struct.Struct
) -> None:
    more = (ctypes.byref(ctypes.c_uint64()),) if entry == "load" else ()
    tail = bytes(packing.size - 8)
    assert refusal(entry, struct.pack("II", 7, packing.size) + tail, *more) == (
        f"{what}: expected ABI version {VERSION} of this library, got 7 from its caller"
    )
    assert refusal(entry, struct.pack("II", VERSION, 8), *more) == (
        f"{what}: expected a struct of at least {packing.size} bytes, got 8"
    )
    assert refusal(entry, None, *more) == f"{what}: expected a struct, got a null pointer"


def test_a_longer_struct_of_a_newer_caller_is_taken() -> None:
    frame = struct.pack("II", VERSION, LAUNCH.size + 8) + bytes(LAUNCH.size)
    assert refusal("launch", frame) == "function: expected a name, got none"


def test_a_cluster_of_blocks_is_refused() -> None:
    name = ctypes.create_string_buffer(b"k")
    given = (VERSION, LAUNCH.size, 1, ctypes.addressof(name), 0, 0, 2, 1, 1)
    frame = LAUNCH.pack(*given, 2, 1, 1, 4, 0, 0)
    assert refusal("launch", frame) == "k: cluster: dim 0: expected 0 or 1, got 2"


def test_a_short_message_buffer_is_not_overrun() -> None:
    message = ctypes.create_string_buffer(b"x" * 16, 16)
    assert launcher().dll.kvg_cuda_launch(None, message, ctypes.c_size_t(8)) != 0
    assert message.raw == b"launch:\0" + b"x" * 8


def test_another_abi_version_is_refused_on_load() -> None:
    with pytest.raises(KernelError, match=r"expected ABI version 9 of this kvgraph .*, got 3;"):
        Launcher(abi_version=9)


def test_numbers_are_those_of_the_header() -> None:
    assert f"#define KVG_LAUNCH_ABI_VERSION {VERSION}\n" in HEADER
    for name, kind in {"POINTER": "*", "INT32": "i32", "INT64": "i64", "FLOAT32": "fp32"}.items():
        assert f"KVG_ARGUMENT_{name} = {cuda_native.KINDS[kind][0]}," in HEADER
    assert f"KVG_REFUSED = {cuda_native.REFUSED}," in HEADER


def test_nothing_of_cuda_is_linked() -> None:
    assert b"libcuda.so.1" in library_path("cuda").read_bytes()  # a string, to be dlopened
    if shutil.which("readelf"):
        done = subprocess.run(
            ["readelf", "-d", str(library_path("cuda"))], capture_output=True, text=True, check=True
        )
        needed = [line for line in done.stdout.splitlines() if "NEEDED" in line]
        assert needed
        assert not any("cuda" in line for line in needed)


# ---- images of a real assembler, and a real driver --------------------------------------------

PTX = """
.version 8.7
.target {arch}
.address_size 64
.visible .entry add(.param .u64 x, .param .u32 n, .param .f32 by, .param .u64 g, .param .u64 p)
{{
  .reg .u64 %a<3>; .reg .u32 %i<3>; .reg .f32 %f<3>; .reg .pred %q;
  ld.param.u64 %a0, [x]; ld.param.u32 %i0, [n]; ld.param.f32 %f0, [by];
  mov.u32 %i1, %tid.x;
  setp.ge.u32 %q, %i1, %i0;
  @%q ret;
  mul.wide.u32 %a1, %i1, 4;
  add.u64 %a0, %a0, %a1;
  ld.global.f32 %f1, [%a0];
  add.f32 %f1, %f1, %f0;
  st.global.f32 [%a0], %f1;
  ret;
}}
"""


def assembled(folder: Path, arch: str) -> bytes:
    ours = Path(sysconfig.get_path("purelib"), "triton/backends/nvidia/bin/ptxas")
    ptxas = str(ours) if ours.exists() else shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas, of Triton or of a toolkit")
    (folder / "add.ptx").write_text(PTX.format(arch=arch))
    command = [ptxas, f"-arch={arch}", "add.ptx", "-o", f"{arch}.cubin"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / f"{arch}.cubin").read_bytes()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_cubins_of_ptxas_are_read(tmp_path: Path, arch: str) -> None:
    image = assembled(tmp_path, arch)
    with pytest.raises(KernelError, match=f"expected a cubin for sm_75, got one for {arch[:-1]}"):
        launcher().load(image, "sm_75")
    with pytest.raises(KernelError, match="expected a whole cubin"):
        launcher().load(image[: len(image) // 2], arch)


@pytest.mark.cuda
def test_a_kernel_runs_on_a_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    cuda = launcher()
    major, minor = cuda.compute_capability()
    image = assembled(tmp_path, f"sm_{major}{minor}")
    x = torch.arange(64, dtype=torch.float32, device="cuda")
    module: Module = cuda.load(image, f"sm_{major}{minor}")
    kernel = cuda.kernel(
        module, "add", ["*fp32:16", "i32", "fp32"], num_warps=2, shared_bytes=64 * 1024
    )
    stream = torch.cuda.current_stream().cuda_stream
    cuda.launch(kernel, (1,), [x.data_ptr(), 40, 0.5], stream)
    expected = torch.arange(64, dtype=torch.float32)
    expected[:40] += 0.5
    assert torch.equal(x.cpu(), expected)
