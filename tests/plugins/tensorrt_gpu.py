"""The conformance matrix through TensorRT's plugins on a GPU, by a host of our own.

HOST=host.so python -m tests.plugins.tensorrt_gpu [--device cpu] [PART ...]
"""

from __future__ import annotations

import sys

import torch

from kvgraph.kernels import aot
from kvgraph.kernels.record import pack_images, pack_kernels
from tests.plugins.gpu_matrix import main
from tests.plugins.tensorrt_host import RUNTIME, Plugin, mask
from tests.support import conformance
from tests.support.conformance import Case
from tests.support.matrix import array, shape_of, tensor


def plugin_of(case: Case, arch: str, given: list[str]) -> Plugin:
    """UnsupportedError where no compiled kernel supports the case."""
    shape = shape_of(case)
    made = aot.compile_attention(shape, arch)
    return Plugin.of(
        case.op,
        conformance.attributes(case)
        | {
            "inputs": mask(case.op, given),
            "kernels": pack_kernels(shape, {arch: made}),
            "images": pack_images(kernel.cubin for kernel in made),
        },
        RUNTIME,
    )


def run_case(case: Case, arch: str, device: str) -> None:
    operands = conformance.build(case)
    dtypes = {n: str(a.dtype) for n, a in operands.inputs.items() if a is not None}
    given = {n: tensor(a, device) for n, a in operands.inputs.items() if a is not None}
    mine = plugin_of(case, arch, list(given)).attach()
    out = None
    addresses = {name: t.data_ptr() for name, t in given.items()}
    if case.op != "store_kv":
        total, width = sum(row[1] for row in case.rows), case.v_head_dim or case.head_dim
        out = torch.full((total, case.heads, width), torch.nan, dtype=getattr(torch, case.dtype))
        out = out.to(device)
        addresses["to out"] = out.data_ptr()
    for name in ("kv_blocks", "kv_scales"):
        if name in operands.spec.mutated and name in given:
            addresses[f"to {name}"] = given[name].data_ptr()
    described = {name: (dtypes[name], tuple(t.shape)) for name, t in given.items()}
    workspace = torch.empty(mine.workspace(described) + 1, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    refusal = mine.enqueue(described, addresses, workspace.data_ptr(), stream)
    assert not refusal, refusal
    if device == "cpu":
        return
    torch.cuda.synchronize()
    for name in operands.spec.mutated & given.keys():
        operands.inputs[name] = array(given[name], dtypes[name])
    conformance.check(case, None if out is None else array(out, case.dtype), operands)


if __name__ == "__main__":
    sys.exit(main(run_case))
