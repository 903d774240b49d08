"""Backend `torch`: an AOTInductor package whose weights are bound late.

Decisions: the kvgraph ops stay calls into the registered ops (in place on the pool; the package
re-inplaces them), so one package serves every pool size. Weights travel once, by name, in
`weights.safetensors`. Inductor's package is not reproducible byte for byte (it holds a compiled
library); the manifest names it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.export import ExportedProgram

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.export import export, symbolic_batch
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes.fuse_update_and_attend import fuse_update_and_attend, require_fused
from kvgraph.compiler.targets import Lowered
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import UnsupportedError

MODEL_NAME, WEIGHTS_NAME = "model.pt2", "weights.safetensors"

INDUCTOR = {"aot_inductor.package_constants_in_so": False}


def lower(model: Model, signature: GraphSignature, plan: CachePlan, folder: Path) -> Lowered:
    """Write `model.pt2` and `weights.safetensors` into `folder`. Needs a C++ compiler."""
    program = export(model, signature, return_buffers=False)
    report = fuse_update_and_attend(program.graph)
    require_fused(program, report, signature, plan)
    program.graph_module.recompile()
    counts = Counter(
        str(node.target).removesuffix(".default")
        for node in program.graph.nodes
        if node.op == "call_function"
    )
    _save_weights(program, folder / WEIGHTS_NAME)
    _package(program, folder / MODEL_NAME)
    return Lowered(
        ops={name: n for name, n in sorted(counts.items()) if "_assert_" not in name},
        passes=[report],
        nondeterministic_files=[MODEL_NAME],
        tools=("torch", "transformers"),
    )


def _save_weights(program: ExportedProgram, path: Path) -> None:
    """Every parameter and buffer once; a tied name points at its owner in the file's metadata."""
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[tuple[int, tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    constants = {k: v for k, v in program.constants.items() if isinstance(v, torch.Tensor)}
    for name, tensor in sorted((program.state_dict | constants).items()):
        owner = owners.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        if owner == name:
            tensors[name] = tensor.detach().contiguous()
        else:
            aliases[name] = owner
    save_file(tensors, path, metadata=aliases or None)


def _package(program: ExportedProgram, path: Path) -> None:
    with symbolic_batch(), torch.no_grad():
        try:
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=INDUCTOR
            )
        except Exception as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            raise UnsupportedError(f"backend torch: AOTInductor failed: {lines[0]}") from error
