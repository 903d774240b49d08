"""The process that builds the engine of a `torch-tensorrt` artifact with this machine's
torch-tensorrt: `python -m` this module, with a file as argument.

The program gets its weights, and the plugins get kernels from the artifact. TensorRT's session runs
the engine, so torch-tensorrt is not needed afterwards.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraph.compiler.targets.tensorrt.build import Shapes, answer
from kvgraph.compiler.targets.tensorrt.engine import BY_TORCH
from kvgraph.contract.file_names import PROGRAM_NAME
from kvgraph.contract.files import reading
from kvgraph.errors import ArtifactError, UnsupportedError
from kvgraph.kernels.record import image_digests
from kvgraph.rebuild.described import describing

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from kvgraph.compiler.targets.tensorrt.torch_tensorrt import Kernels


@dataclass(frozen=True)
class TorchRequest:
    """The engine to build. `artifact`, `kernels`: folders. `engine`: file to write. `profile`: name
    of an input -> (min, opt, max) shapes."""

    artifact: str
    kernels: str
    engine: str
    profile: Shapes


@dataclass(frozen=True)
class TorchResult:
    """The engine that was built: TensorRT's module and version, and its names of the signature's
    inputs and of the logits. Buffers are no outputs, because they are written in place."""

    module: str
    version: str
    names: dict[str, str]


def main(path: str) -> int:
    return answer(path, TorchRequest, build)


def build(request: TorchRequest) -> TorchResult:
    """Build and write the engine. UnsupportedError with torch-tensorrt's message."""
    import torch

    from kvgraph.compiler.export import lowering
    from kvgraph.compiler.passes.write_in_place import write_in_place
    from kvgraph.compiler.targets.tensorrt import torch_tensorrt as adapter
    from kvgraph.contract.manifest import read_manifest
    from kvgraph.runtime.folder import ArtifactFolder
    from kvgraph.runtime.sessions.opening import opening
    from kvgraph.runtime.sessions.program import read_program

    folder = Path(request.artifact)
    artifact = ArtifactFolder(folder, read_manifest(folder))
    torch_tensorrt = adapter.imported(BY_TORCH)
    converter = adapter.register(kernels=kernels_of(Path(request.kernels)))
    with opening(folder / PROGRAM_NAME, f"torch {torch.__version__}"):
        program = read_program(artifact, torch.device("cpu"))
    write_in_place(program.graph)
    program.graph_module.recompile()
    forget_derived_ranges(program)
    symbols = artifact.signature.inputs
    inputs = [
        torch_tensorrt.Input(
            min_shape=request.profile[symbol.name][0],
            opt_shape=request.profile[symbol.name][1],
            max_shape=request.profile[symbol.name][2],
            dtype=getattr(torch, symbol.dtype),
            name=symbol.name,
        )
        for symbol in symbols
    ]
    convert = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
    try:
        with lowering():
            engine: bytes = convert(
                program,
                arg_inputs=inputs,
                disable_tf32=True,
                require_full_compilation=True,
                min_block_size=1,
            )
    except Exception as error:  # torch-tensorrt raises RuntimeErrors of many kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedError(
            f"{folder}: torch-tensorrt {torch_tensorrt.__version__} cannot build it: {lines[0]}"
        ) from error
    Path(request.engine).write_bytes(engine)
    return TorchResult(
        converter.trt.__name__,
        converter.trt.__version__,
        names_of(program, [symbol.name for symbol in symbols]),
    )


def kernels_of(folder: Path) -> Kernels:
    """Compiled kernels in an artifact's `kernels/` folder, by the shape they are compiled for.

    ArtifactError for a damaged file.
    """
    from kvgraph.compiler.targets.tensorrt.lower import shape_of

    kernels = {}
    with describing(folder) as path:
        with reading(path, ArtifactError):
            described = json.loads(path.read_text(encoding="utf-8"))
        for fields, packed in zip(described["shapes"], described["kernels"], strict=True):
            record = b64decode(packed)
            files = {d: described["images"][d] for d in image_digests(record)}
            images = {d: (path.parent / name).read_bytes() for d, name in files.items()}
            kernels[shape_of(fields)] = (record, images)
    return kernels


def names_of(program: ExportedProgram, inputs: Sequence[str]) -> dict[str, str]:
    """The signature's name -> the engine's name, of each input and of the logits.

    torch-tensorrt names inputs as the program does, and numbers outputs.
    """
    own = program.graph_signature.user_inputs
    return {**dict(zip(inputs, map(str, own), strict=True)), "logits": "output0"}


def forget_derived_ranges(program: ExportedProgram) -> None:
    """Remove ranges of sums, such as batch + 1 offsets, that a loaded program has.

    torch's passes expect ranges of plain symbols only (torch 2.13).
    """
    import sympy  # type: ignore[import-untyped]
    from torch._export.utils import _get_shape_env_from_gm

    shapes: Any = _get_shape_env_from_gm(program.graph_module)
    ranges: dict[Any, Any] = {} if shapes is None else shapes.var_to_range
    for sum_of in [key for key in ranges if not isinstance(key, sympy.Symbol)]:
        del ranges[sum_of]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
