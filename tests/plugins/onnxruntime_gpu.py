"""The conformance matrix through ONNX Runtime's CUDA ops on a GPU, by a host of our own.

HOST=host.so python -m tests.plugins.onnxruntime_gpu [--device cpu] [PART ...]
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from kvgraph.kernels import aot
from kvgraph.kernels.record import pack_images, pack_kernels
from tests.plugins.gpu_matrix import main
from tests.plugins.onnxruntime_host import Kernel, dll, said
from tests.support import conformance
from tests.support.conformance import Case
from tests.support.matrix import array, shape_of, tensor

SCRATCH_BYTES = 64 << 20
"""More than any case splits its contexts into."""


def kernel_of(case: Case, arch: str) -> Kernel:
    """UnsupportedError where no compiled kernel supports the case."""
    shape = shape_of(case)
    made = aot.compile_attention(shape, arch)
    attributes: dict[str, Any] = dict(conformance.attributes(case))
    attributes["kernels"] = pack_kernels(shape, {arch: made})
    attributes["images"] = pack_images(kernel.cubin for kernel in made)
    kernel = Kernel(case.op, attributes)
    assert kernel, said()
    return kernel


def run_case(case: Case, arch: str, device: str) -> None:
    operands = conformance.build(case)
    inputs = {name: a for name, a in operands.inputs.items() if a is not None}
    dtypes = {name: str(a.dtype) for name, a in inputs.items()}
    bounds = inputs.get("max_lengths")
    given = {name: tensor(a, device) for name, a in inputs.items()}
    kernel = kernel_of(case, arch)
    at = {name: t.data_ptr() for name, t in given.items()}
    total, width = sum(row[1] for row in case.rows), case.v_head_dim or case.head_dim
    out = torch.full((total, case.heads, width), torch.nan, dtype=getattr(torch, case.dtype))
    out = out.to(device)
    at["out"] = out.data_ptr()
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    dll.o_scratch(ctypes.c_size_t(scratch.data_ptr()))
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    described = {name: (dtypes[name], tuple(t.shape)) for name, t in given.items()}
    longest, context = (0, 0) if bounds is None else map(int, bounds[0])
    refusal = kernel.compute(described, (longest, context), at=at, stream=stream)
    assert not refusal, refusal
    if device == "cpu":
        return
    torch.cuda.synchronize()
    kernel.destroy()
    for name in operands.spec.mutated & given.keys():
        operands.inputs[name] = array(given[name], dtypes[name])
    result = None if case.op == "store_kv" else array(out, case.dtype)
    conformance.check(case, result, operands)


if __name__ == "__main__":
    sys.exit(main(run_case))
