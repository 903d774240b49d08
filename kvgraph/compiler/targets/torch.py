"""Backend `torch`: write an AOTInductor package with weights that are bound at load time.

Decisions: kvgraph's ops stay calls of the registered ops (in place on the pool; the package
re-inplaces them), so one package serves every pool size. Weights are stored once, by name, in
`weights.safetensors`. Inductor's package is not reproducible byte for byte (it holds a compiled
library); the manifest lists it. No autotuned templates are used: Inductor's C++ GEMM would keep
each weight a second time, packed, as a constant of the package that has no name in the checkpoint.
With freezing, which excludes late binding, autotuning itself chose oneDNN's product (64 x 512 x
1,024 in float32, torch 2.13: 0.15 ms, the template 0.38). `--weights` packs weights once instead.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from kvgraph.compiler.export import lowering
from kvgraph.compiler.passes.lists import PASSES, run_passes
from kvgraph.compiler.targets import Lowered
from kvgraph.compiler.targets.weights import add_table, dense_in_place, save_weights
from kvgraph.compiler.traced import Traced
from kvgraph.contract.file_names import PROGRAM_NAME
from kvgraph.contract.files import NO_ROOM
from kvgraph.errors import UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

INDUCTOR = {"aot_inductor.package_constants_in_so": False}

PORTABLE_X86 = {"cpp.march": "x86-64-v3", "cpp.simdlen": 256}
"""Inductor settings with which target `cpu` runs on any AVX2 machine, not only on this one."""


def lower(
    traced: Traced,
    folder: Path,
    *,
    weight_bits: int | None = None,
) -> Lowered:
    """Write `model.pt2` and `weights.safetensors` into `folder`. Needs a C++ compiler.

    `weight_bits`: bits of packed weights (16, 8, 4 or AS_STORED), with embedding tables in
    bfloat16; None: all keep the model's dtype.
    """
    program, traced.bits = traced.program, weight_bits
    run_passes(traced, PASSES["cpu", "torch"].program)
    program.graph_module.recompile()
    ops = count_ops(program)
    traced.weights.fill(program)
    _bind_late(program)
    save_weights(program, folder)
    _package(program, folder / PROGRAM_NAME)
    add_table(program, folder / PROGRAM_NAME)
    return Lowered(
        ops=ops,
        passes=traced.passes,
        nondeterministic_files=[PROGRAM_NAME],
    )


def count_ops(program: ExportedProgram) -> dict[str, int]:
    """Number of calls of each op in the program, without torch.export's own assertions."""
    counts = Counter(
        str(node.target).removesuffix(".default")
        for node in program.graph.nodes
        if node.op == "call_function"
    )
    return {name: n for name, n in sorted(counts.items()) if "_assert_" not in name}


def _bind_late(program: ExportedProgram) -> None:
    """Prepare weights to be bound at load time.

    They become row-major as in the file, because AOTInductor compiles strides in. Plain tensors of
    a module become buffers, because it binds only parameters and buffers by name.
    """
    dense_in_place(program)
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False


def _package(program: ExportedProgram, path: Path) -> None:
    settings = INDUCTOR | (PORTABLE_X86 if platform.machine() == "x86_64" else {})
    with lowering(), torch.no_grad():
        try:
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=settings
            )
        except Exception as error:
            reraise_if_signalled(error)
            raise UnsupportedError(f"backend torch: {_why(error)}") from error
    _strip(path)


def _why(error: Exception) -> str:
    """Reason of a failed compile in one line: its first line, and the compiler's first error."""
    text = str(error).strip() or type(error).__name__
    for full in map(os.strerror, NO_ROOM):
        if full in text:
            # gettempdir() is another folder once no file fits into that of TMPDIR.
            folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
            return (
                f"expected room for the C++ compiler in the temporary folder {folder}, got "
                f"{full!r}; set TMPDIR to another folder"
            )
    first, *rest = text.splitlines()
    said = next((f": {line.strip()}" for line in rest if "error:" in line), "")
    return f"AOTInductor failed: {first}{said}"


def _strip(package: Path) -> None:
    """Remove generated sources and debug sections, which contain paths of this machine."""
    stripped = package.with_suffix(".stripped")
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(stripped, "w") as new:
        for entry in old.infolist():
            if entry.filename.endswith(".cpp"):
                continue
            data = old.read(entry)
            if entry.filename.endswith(".so"):
                data = _without_debug(data)
            new.writestr(zipfile.ZipInfo(entry.filename, (1980, 1, 1, 0, 0, 0)), data)
    stripped.replace(package)


def _without_debug(library: bytes) -> bytes:
    """The library without debug sections; unchanged if binutils' `strip` is not installed."""
    if shutil.which("strip") is None:
        return library
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.so"
        path.write_bytes(library)
        subprocess.run(["strip", "--strip-debug", str(path)], check=True)
        return path.read_bytes()
