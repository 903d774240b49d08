"""Ahead-of-time compile of kernel variants to cubins, on a machine that needs no GPU and no CUDA.

The same variant, architecture and tools give the same bytes. It cannot be used in a process with
Triton's interpreter (TRITON_INTERPRET=1), whose functions cannot be compiled.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvgraph.contract.loading import require_package
from kvgraph.errors import KernelError
from kvgraph.kernels import sass, shapes, variants
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.kernels.variants import Constant, Parameter, Variant
from kvgraph.progress import task
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, CompiledKernel

HIDDEN_POINTERS = ("global_scratch", "profile_scratch")
"""Parameters after a kernel's own in its launch ABI; kvgraph's kernels use neither: pass null."""

MOST_REGISTERS, SPILL_STEP = 255, 16
"""Most registers of a thread; and how many more a kernel that spills gets than the assembler chose.
"""

ASYNCHRONOUS = "wgmma.mma_async"
"""PTX instruction of a product that reads registers until the program waits for it."""

REGISTERS, REGISTER_UNIT = 65536, 8
"""Registers of a multiprocessor, all of which one block may take; and the unit in which a thread
gets registers."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a multiprocessor that a cubin uses. Spills and stack are bytes per thread."""

    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    stack: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and the data for its launch: blocks of 32 * num_warps threads, `resources.shared`
    bytes of dynamic shared memory, and `variant.parameters`, then HIDDEN_POINTERS, as arguments."""

    variant: Variant
    arch: str
    entry: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    resources: Resources
    seconds: float = field(compare=False)

    @property
    def file_name(self) -> str:
        return f"{self.variant.name}.cubin"

    @property
    def ptx_name(self) -> str:
        return f"{self.variant.name}.ptx.gz"

    def packed_ptx(self) -> bytes:
        """The PTX of the cubin, without comments, gzipped; the same bytes each time."""
        text = re.sub(r"[ \t]*//[^\n]*", "", self.ptx)
        return gzip.compress(re.sub(r"\n\s*\n+", "\n", text).encode(), 9, mtime=0)

    def metadata(self) -> dict[str, Any]:
        """Entry of kernels.json: plain values, the same for the same cubin."""
        variant, used = self.variant, self.resources
        return {
            "kernel": variant.kernel.name,
            "role": variant.role,
            "arch": self.arch,
            "file": self.file_name,
            "ptx": self.ptx_name,
            "sha256": hashlib.sha256(self.cubin).hexdigest(),
            "entry": self.entry,
            "dtype": variant.dtype,
            "pool_dtype": variant.pool_dtype,
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            "absent": sorted(variant.absent),
            "shared": used.shared,
            "parameters": [[p.name, p.type] for p in variant.parameters],
            "hidden_pointers": list(HIDDEN_POINTERS),
            "alignment": variants.ALIGNMENT,
            "constants": dict(sorted(variant.constants.items())),
            "registers": used.registers,
            "spill_stores": used.spill_stores,
            "spill_loads": used.spill_loads,
            "stack": used.stack,
        }


EXACTLY_ALIKE = (variants.MERGE_PARTS.name,)
"""Kernels in which several threads store the same value. With fused products a sum over lanes could
differ in its last bit between lanes, so that the result would depend on the last store."""


def all_attention_variants(shape: AttentionShape, arch: str) -> list[Variant]:
    """Every kernel that store_kv, paged_attention and update_and_attend of `shape` launch.

    UnsupportedError names the value that no kernel supports (architecture, head_dim, page_size,
    granularity, heads), with the supported values.
    """
    shape.check()
    shapes.check_arch(shape.cache, arch)
    store = variants.store_variant(shape)
    return [store, *variants.attention_variants(shape, arch)]


def compile_attention(shape: AttentionShape, arch: str) -> list[Compiled]:
    """Compile `all_attention_variants`; unsupported shapes are refused before any compile."""
    return compile_all(all_attention_variants(shape, arch), arch)


def compile_all(variants: Iterable[Variant], arch: str) -> list[Compiled]:
    """Compile each distinct variant once, in the given order."""
    distinct = {variant.name: variant for variant in variants}
    made = []
    with task(f"kernels for {arch}", len(distinct), "kernels") as advance:
        for variant in distinct.values():
            made.append(compile_variant(variant, arch))
            advance(1)
    return made


def compile_variant(variant: Variant, arch: str) -> Compiled:
    """Compile one variant; KernelError if Triton or its assembler fails, or if the kernel needs
    more than `arch` has."""
    capability = shapes.capability(arch)
    install = "pip install 'kvgraph[cuda]'"
    triton = require_package("triton", "needed to compile CUDA kernels", install)
    if triton.knobs.runtime.interpret:
        raise KernelError("ahead-of-time compile: TRITON_INTERPRET is set for this process")
    from triton.backends.compiler import GPUTarget

    start = time.perf_counter()
    compiled, used = _without_spills(triton, variant, arch, GPUTarget("cuda", capability, 32))
    seconds = time.perf_counter() - start
    metadata = compiled.metadata
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
        raise KernelError(f"{variant.name} for {arch}: expected no scratch memory, got some")
    if metadata.shared > shapes.SHARED_MEMORY[arch]:
        raise KernelError(
            f"{variant.name} for {arch}: expected at most {shapes.SHARED_MEMORY[arch]} bytes of "
            f"shared memory, got {metadata.shared}"
        )
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    if ASYNCHRONOUS in ptx:
        sass.require_kept(cubin, _disassembler(triton), f"{variant.name} for {arch}")
    return Compiled(variant, arch, metadata.name, cubin, ptx, used, seconds)


def _disassembler(triton: ModuleType) -> str:
    try:
        return str(triton.knobs.nvidia.cuobjdump.path)
    except RuntimeError as error:
        raise KernelError(
            f"Triton {triton.__version__}: expected its cuobjdump, which shows what products read, "
            f"got {error}; install Triton again"
        ) from error


def _without_spills(
    triton: ModuleType, variant: Variant, arch: str, target: GPUTarget
) -> tuple[CompiledKernel, Resources]:
    """Compile with the assembler's choice of registers. If that spills, to fit more blocks on a
    multiprocessor, compile again with more registers, at most as many as a block can have."""
    threads = 32 * variant.num_warps
    most = min(MOST_REGISTERS, REGISTERS // threads // REGISTER_UNIT * REGISTER_UNIT)
    asked = 0
    compiled, used = _compile(triton, variant, arch, target, None)
    while used.spill_stores > 0 and asked < used.registers + SPILL_STEP <= most:
        asked = used.registers + SPILL_STEP
        compiled, used = _compile(triton, variant, arch, target, asked)
    return compiled, used


def _compile(
    triton: ModuleType, variant: Variant, arch: str, target: GPUTarget, max_registers: int | None
) -> tuple[CompiledKernel, Resources]:
    options: dict[str, int] = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.kernel.name not in EXACTLY_ALIKE,
    }
    if max_registers:
        options["maxnreg"] = max_registers
    with _hermetic(triton) as log:
        try:
            compiled = triton.compile(_source(variant), target=target, options=options)
        except Exception as error:  # Triton's own errors share no base class
            reraise_if_signalled(error)
            raise KernelError(f"{variant.name} for {arch}: {_said(error)}") from error
    return compiled, _resources(log.getvalue(), compiled.metadata.shared)


def _said(error: BaseException) -> str:
    """First lines of the innermost error; Triton wraps an error once per call that it compiles."""
    while error.__cause__ is not None and not str(error).startswith("PTXAS"):
        error = error.__cause__
    return "\n".join(str(error).splitlines()[:6])


def _source(variant: Variant) -> ASTSource:
    from triton.compiler import ASTSource

    jit = variant.kernel.function()
    types = {p.name: p for p in variant.parameters}
    constants: dict[str, Constant] = {**dict.fromkeys(variant.absent), **variant.constants}
    signature = {name: types[name].type if name in types else "constexpr" for name in jit.arg_names}
    positions = {name: (index,) for index, name in enumerate(jit.arg_names)}
    return ASTSource(
        fn=jit,
        signature=signature,
        constexprs={positions[name]: value for name, value in constants.items()},
        attrs={positions[p.name]: _aligned(p) for p in types.values() if p.aligned},
    )


def _aligned(parameter: Parameter) -> list[list[object]]:
    return [["tt.divisibility", variants.ALIGNMENT]]


@contextlib.contextmanager
def _hermetic(triton: ModuleType) -> Iterator[io.StringIO]:
    """Run Triton with its own cache, one assembler for every architecture, and no source lines.

    Yields the assembler's log. The assembler is CUDA 12's from Triton's wheel: its cubins load in
    every driver since CUDA 12, while a newer assembler's need newer drivers.
    """
    knobs, log = triton.knobs, io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for group in (knobs.cache, knobs.compilation, knobs.nvidia):
            stack.enter_context(group.scope())
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.compilation.disable_line_info = True
        knobs.nvidia.dump_ptxas_log = True
        knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path
        stack.enter_context(contextlib.redirect_stdout(log))
        yield log


def _resources(log: str, shared: int) -> Resources:
    """Resources from the log of ptxas -v."""

    def count(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match[1]) if match else -1

    return Resources(
        registers=count(r"Used (\d+) registers"),
        shared=shared,
        spill_stores=count(r"(\d+) bytes spill stores"),
        spill_loads=count(r"(\d+) bytes spill loads"),
        stack=count(r"(\d+) bytes stack frame"),
    )
