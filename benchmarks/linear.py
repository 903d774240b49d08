"""Linear layers over packed weights, alone, and the kernels of ONNX Runtime and torch.

    python -m benchmarks.linear [THREADS]

Ours and ONNX Runtime's are nodes of one graph, as those of an artifact are. As checkpoints store
them: awq, 4 bits in groups of 128 with offsets; mxfp4 and nvfp4, FP4 in groups of 32 and 16;
q8_0, int8 in groups of 32.
24 layers of 2816 x 1024, so that no cache holds the weights; 1, 8, 32 and 512 rows; one engine
after the other, behind a pause, since threads of ONNX Runtime spin on for a while. Limits: those of
`kvgraph bench`, the rate at which memory is read and the fastest library's for a square product.
Reference check: the op's NumPy form. Medians of REPEATS passes over all layers.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

from kvgraph.bench.limits import read_limits
from kvgraph.compiler.packed_weights import Packed, StoredRows
from kvgraph.contract.dtypes import DTYPES
from kvgraph.ops import LINEAR, OPSET_DOMAIN, OPSET_VERSION, native
from kvgraph.ops.packed import E2M1, INT8, INTEGERS, NVFP4, NVFP4_GROUP, Form
from tests.support.packed import keep, pack

LAYERS, N, K = 24, 2816, 1024
REPEATS, PAUSE_SECONDS = 15, 0.3
ROWS = (1, 8, 32, 512)
Array = np.ndarray[Any, Any]
Call = Callable[[], object]
Node = tuple[tuple[str, list[str], str, dict[str, int]], dict[str, Array]]
"""Operator, inputs, domain and attributes; and its weights."""


def packed(form: Form) -> Packed:
    random = np.random.default_rng(0)
    if not form.group:
        return pack([random.standard_normal((N, K), dtype=np.float32)], form.bits)
    numbers = random.integers(0, 16, (N, K)).astype(np.uint8)
    groups = N, K // form.group
    scales = random.uniform(0.01, 0.1, groups).astype(np.float32)
    if form.codes == E2M1:
        scales = random.integers(118, 130, groups).astype(np.uint8)
    if form.codes == NVFP4:
        scales = random.integers(60, 120, groups).astype(np.uint8)
        return keep([StoredRows(numbers, scales, factors=np.full((N, 1), 1e-3, np.float32))], form)
    offsets = random.integers(-8, 9, groups).astype(np.int8) if form.has_offsets else None
    return keep([StoredRows(numbers, scales, offsets)], form)


def ours(form: Form, x: Array, threads: int) -> Call:
    """Our op's nodes in ONNX Runtime, after a check of one of them."""
    first = packed(form)
    operands = [first.weight, first.scales, first.group_bytes]
    few, attributes = x[:4], {"out_features": N, **form.attributes}
    found = native.run(LINEAR, few, *operands, **attributes)
    expected = LINEAR.reference(few, *operands, **attributes)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error < 1e-5:
        raise SystemExit(f"{form}: error {error:.2g}, tolerance 1e-5")

    def layer(i: int) -> Node:
        named = {f"{i}.{n}": a for n, a in enumerate(operands) if a is not None}
        given = [f"{i}.{n}" if f"{i}.{n}" in named else "" for n in range(len(operands))]
        inputs = ["x", *given]
        return (LINEAR.name, inputs, OPSET_DOMAIN, attributes), named

    return in_session(layer, x, threads)


def theirs(kind: str, x: Array, threads: int) -> Call:
    """ONNX Runtime: float32 MatMul, MatMulNBits in blocks of 32, DynamicQuantizeMatMul."""
    random = np.random.default_rng(0)

    def layer(i: int) -> Node:
        inputs = ["x", f"w{i}", f"s{i}"]
        if kind == "fp32":
            weight = random.standard_normal((K, N), dtype=np.float32)
            return ("MatMul", inputs[:2], "", {}), {f"w{i}": weight}
        if kind == "int4":
            stored = random.integers(0, 256, (N, K // 32, 16)).astype(np.uint8)
            scales = random.random((N, K // 32)).astype(np.float32)
            attributes = {"K": K, "N": N, "bits": 4, "block_size": 32, "accuracy_level": 4}
            op = "MatMulNBits", inputs, "com.microsoft", attributes
            return op, {f"w{i}": stored, f"s{i}": scales}
        stored = random.integers(-127, 128, (K, N)).astype(np.int8)
        scales = random.random(N).astype(np.float32)
        op = "DynamicQuantizeMatMul", inputs, "com.microsoft", {}
        return op, {f"w{i}": stored, f"s{i}": scales}

    return in_session(layer, x, threads)


def in_session(layer: Callable[[int], Node], x: Array, threads: int) -> Call:
    """A pass over LAYERS nodes and their weights: `layer(i)` gives those of one."""
    nodes, weights, outputs = [], [], []
    for i in range(LAYERS):
        (op, inputs, domain, attributes), held = layer(i)
        weights += [tensor(name, array) for name, array in held.items()]
        nodes.append(helper.make_node(op, inputs, [f"y{i}"], domain=domain, **attributes))
        nodes.append(helper.make_node("ReduceMax", [f"y{i}"], [f"z{i}"], keepdims=0))
        outputs.append(f"z{i}")
    nodes.append(helper.make_node("Sum", outputs, ["out"]))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "layers",
        [value("x", TensorProto.FLOAT, ["rows", K])],
        [value("out", TensorProto.FLOAT, [])],
        weights,
    )
    versions = {"": 23, "com.microsoft": 1, OPSET_DOMAIN: OPSET_VERSION}
    opsets = [helper.make_opsetid(*each) for each in versions.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.register_custom_ops_library(str(native.library_path("onnxruntime")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "layers.onnx")
        onnx.save(model, path, save_as_external_data=True, location="layers.bin")
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": x})


def tensor(name: str, array: Array) -> TensorProto:
    kind = DTYPES[array.dtype.name].onnx
    return helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True)


def torchs(kind: str, x: Array) -> Call:
    """torch: bfloat16 linear, and oneDNN's int8 product of rows that are quantised already."""
    if kind == "bf16":
        half = torch.from_numpy(x).to(torch.bfloat16)
        weights = [torch.randn(N, K).to(torch.bfloat16) for _ in range(LAYERS)]
        return lambda: [torch.nn.functional.linear(half, w) for w in weights]
    op = torch.ops.onednn
    stored = [
        op.qlinear_prepack(torch.randint(-127, 128, (N, K), dtype=torch.int8), None)
        for _ in range(LAYERS)
    ]
    rows = torch.randint(0, 255, x.shape, dtype=torch.uint8)
    scales, zeros = torch.rand(N), torch.zeros(N, dtype=torch.int32)
    rest = (scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return lambda: [op.qlinear_pointwise(rows, 0.1, 128, w, *rest) for w in stored]


def timed(run: Call) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


FORMS = {"bf16": Form(16), "int8": Form(8), "int4": Form(4)}
FORMS |= {"awq": Form(4, 128, INTEGERS, True), "mxfp4": Form(4, 32, E2M1)}
FORMS["nvfp4"] = Form(4, NVFP4_GROUP, NVFP4)
FORMS["q8_0"] = Form(8, 32, INT8)
BYTES = {"ours bf16": 2, "ours int8": 1, "ours int4": 33 / 64, "torch bf16": 2, "torch int8": 1}
BYTES |= {
    "ours awq": (4 + 40 / 128) / 8,
    "ours mxfp4": 4.25 / 8,
    "ours nvfp4": 4.5 / 8,
    "ours q8_0": 9 / 8,
}
BYTES |= {"onnxruntime fp32": 4, "onnxruntime int8": 1, "onnxruntime int4": 0.625}


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    native.set_num_threads(threads)
    before = read_limits(threads)
    products = {"bf16": before.gflops("bfloat16"), "int8": before.gflops("int8")}
    products |= {"int4": products["int8"], "fp32": before.gflops("float32")}
    products |= dict.fromkeys(("awq", "mxfp4", "nvfp4", "q8_0"), products["bf16"])
    print(f"{threads} threads; memory is read at {before.read_gbs:.1f} GB/s; GFLOP/s: {products}")
    print("rows  kernel             ms of a layer     GB/s  of reading   GFLOP/s  of product")
    for rows in ROWS:
        x = np.random.default_rng(1).standard_normal((rows, K), dtype=np.float32)
        runs = {f"ours {name}": ours(form, x, threads) for name, form in FORMS.items()}
        runs |= {f"torch {kind}": torchs(kind, x) for kind in ("bf16", "int8")}
        for kind in ("fp32", "int8", "int4"):
            runs[f"onnxruntime {kind}"] = theirs(kind, x, threads)
        for name, run in runs.items():
            time.sleep(PAUSE_SECONDS)
            run()
            seconds = statistics.median(timed(run) for _ in range(REPEATS)) / LAYERS
            moved = N * K * BYTES[name] / seconds / 1e9
            flops = 2 * rows * N * K / seconds / 1e9
            product = products[name.split()[1]] or float("nan")
            print(
                f"{rows:4}  {name:18} {seconds * 1e3:13.3f} {moved:8.1f} "
                f"{moved / before.read_gbs:11.0%} {flops:9.0f} {flops / product:11.0%}"
            )
    print(f"after: memory is read at {read_limits(threads).read_gbs:.1f} GB/s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else len(os.sched_getaffinity(0)))
