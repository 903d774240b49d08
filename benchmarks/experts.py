"""A mixture of experts over packed weights, alone, and the ways of transformers.

    python -m benchmarks.experts [THREADS]

8 layers of a Qwen3-MoE shape: 1,024 wide, 32 experts
of 512, 4 for a row, which a router without preferences chooses; 1, 8, 32 and 512 rows. Read is what
a step reads at the least: the experts that some row chose, once. Limits: those of `kvgraph bench`,
the rate at which memory is read and the fastest library's for a square product, of float32 where it
is slower in the dtype itself. transformers in float32: `batched_mm`, which an export without this
op computes, and `eager`, a loop over the experts. ONNX Runtime: its MoE and QMoE. A call of ours
from Python takes about 0.1 ms, of ONNX Runtime 0.03. Reference check: the NumPy form. Medians
of REPEATS passes over all layers.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

from kvgraph.bench.limits import read_limits
from kvgraph.compiler.packed_weights import Packed
from kvgraph.ops import EXPERTS, native
from tests.support.packed import pack_each

LAYERS, EXPERTS_COUNT, ACTIVE, WIDTH, INNER = 8, 32, 4, 1024, 512
REPEATS, PAUSE_SECONDS = 5, 0.3
ROWS = (1, 8, 32, 512)
BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8", "int4": "int8"}
Array = np.ndarray[Any, Any]
Layer = Callable[[Array, Array, Array], object]


def ours(bits: int) -> list[Layer]:
    """A call of each layer, after a check of one of them."""
    random = np.random.default_rng(0)

    def draw(*dims: int) -> Array:
        return random.standard_normal(dims, dtype=np.float32) / 32

    made = [(draw(2, INNER, WIDTH), draw(WIDTH, INNER)) for _ in range(EXPERTS_COUNT)]
    up = pack_each([([*w], ()) for w, _ in made], bits)
    down = pack_each([([w], ()) for _, w in made], bits)
    operands = [up.weight, down.weight, *_rest(up), *_rest(down)]
    attributes = {"inner_features": INNER, "up_bits": bits, "down_bits": bits}
    few = draw(4, WIDTH), *choice(4, random)
    found = native.run(EXPERTS, *few, *operands, **attributes)
    expected = EXPERTS.reference(*few, *operands, **attributes)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    tolerance = 1e-4 if bits == 32 else 1e-2  # where inner values round to bfloat16 or int8
    if not error < tolerance:
        raise SystemExit(f"{bits} bits: error {error:.2g}, tolerance {tolerance:g}")
    layers = [[None if a is None else a.copy() for a in operands] for _ in range(LAYERS)]
    return [
        lambda x, ids, weights, w=w: native.run(EXPERTS, x, ids, weights, *w, **attributes)  # type: ignore[misc]
        for w in layers
    ]


def _rest(packed: Packed) -> list[Array | None]:
    return [packed.scales, packed.group_bytes, packed.bias]


def theirs(kind: str) -> list[Layer]:
    """transformers' experts of Qwen3-MoE."""
    from transformers import AutoConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS_COUNT,
        num_experts_per_tok=ACTIVE,
    )
    config._experts_implementation = kind
    layers = []
    for _ in range(LAYERS):
        module = Qwen3MoeExperts(config)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=1 / 32)
        layers.append(module)

    def call(module: torch.nn.Module, x: Array, ids: Array, weights: Array) -> object:
        with torch.inference_mode():
            given = torch.from_numpy(x), torch.from_numpy(ids).long(), torch.from_numpy(weights)
            return module(*given)

    return [
        lambda x, ids, weights, module=module: call(module, x, ids, weights)  # type: ignore[misc]
        for module in layers
    ]


def onnxruntimes(kind: str, threads: int) -> list[Layer]:
    """ONNX Runtime's own ops: MoE in float32; QMoE in int8, a scale for each column, or in int4 in
    blocks of 32 with int8 activations. They choose the experts themselves."""
    random = np.random.default_rng(0)
    attributes: dict[str, Any] = {"k": ACTIVE, "activation_type": "swiglu", "swiglu_fusion": 1}
    shapes = {"up": (EXPERTS_COUNT, 2 * INNER, WIDTH), "down": (EXPERTS_COUNT, WIDTH, INNER)}
    weights: dict[str, Array] = {}
    if kind == "fp32":
        names = ["x", "router", "up", "", "down"]
    else:
        names = ["x", "router", "up", "up_scales", "", "down", "down_scales"]
        attributes |= {"expert_weight_bits": int(kind[-1])}
        attributes |= {"block_size": 32, "accuracy_level": 4} if kind == "int4" else {}
    for name, (count, columns, depth) in shapes.items():
        if kind == "fp32":
            weights[name] = random.standard_normal((count, columns, depth), dtype=np.float32) / 32
            continue
        packed = (count, columns, depth // (2 if kind == "int4" else 1))
        weights[name] = random.integers(0, 256, packed).astype(np.uint8)
        scales = (count, columns, depth // 32) if kind == "int4" else (count, columns)
        weights[f"{name}_scales"] = random.random(scales, dtype=np.float32) / 1000
    op = "MoE" if kind == "fp32" else "QMoE"
    node = helper.make_node(op, names, ["out"], domain="com.microsoft", **attributes)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "experts",
        [
            value("x", TensorProto.FLOAT, ["rows", WIDTH]),
            value("router", TensorProto.FLOAT, ["rows", EXPERTS_COUNT]),
        ],
        [value("out", TensorProto.FLOAT, ["rows", WIDTH])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    sessions = [
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        for _ in range(LAYERS)
    ]

    def call(session: ort.InferenceSession, x: Array, ids: Array, weights: Array) -> object:
        router = np.zeros((len(x), EXPERTS_COUNT), np.float32)
        np.put_along_axis(router, ids.astype(np.int64), weights + 1, 1)
        return session.run(None, {"x": x, "router": router})

    return [
        lambda x, ids, weights, session=session: call(session, x, ids, weights)  # type: ignore[misc]
        for session in sessions
    ]


def choice(rows: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Experts of each row, and their weights."""
    chosen = [random.permutation(EXPERTS_COUNT)[:ACTIVE] for _ in range(rows)]
    return np.stack(chosen).astype(np.int32), random.random((rows, ACTIVE), dtype=np.float32)


def measure(layers: list[Layer], rows: int) -> tuple[float, float]:
    """Seconds of a layer, and how many experts some row chose."""
    random = np.random.default_rng(1)
    x = random.standard_normal((rows, WIDTH), dtype=np.float32)
    seconds, used = [], []
    for repeat in range(REPEATS + 1):
        chosen = [choice(rows, random) for _ in layers]
        start = time.perf_counter()
        for layer, (ids, weights) in zip(layers, chosen, strict=True):
            layer(x, ids, weights)
        if repeat:
            seconds.append((time.perf_counter() - start) / LAYERS)
            used += [len(np.unique(ids)) for ids, _ in chosen]
    return statistics.median(seconds), float(np.mean(used))


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    native.set_num_threads(threads)
    before = read_limits(threads)
    fp32 = before.gflops("float32") or 0.0
    products = {name: max(before.gflops(DTYPES[name]) or 0.0, fp32) for name in BITS}
    print(f"{threads} threads; memory is read at {before.read_gbs:.1f} GB/s; GFLOP/s: {products}")
    print("rows  experts                ms of a layer     GB/s  of reading   GFLOP/s  of product")
    engines: dict[str, Callable[[], list[Layer]]] = {
        f"ours {name}": lambda bits=bits: ours(bits)  # type: ignore[misc]
        for name, bits in BITS.items()
    }
    for kind in ("batched_mm", "eager"):
        engines[f"{kind} fp32"] = lambda kind=kind: theirs(kind)  # type: ignore[misc]
    for kind in ("fp32", "int8", "int4"):
        engines[f"onnxruntime {kind}"] = lambda kind=kind: onnxruntimes(kind, threads)  # type: ignore[misc]
    for name, make in engines.items():
        layers = make()
        for rows in ROWS:
            if name.startswith("batched_mm") and rows > ROWS[1]:
                continue  # it copies gigabytes
            time.sleep(PAUSE_SECONDS)
            seconds, used = measure(layers, rows)
            bits = BITS[name.split()[1]] + (1 / 8 if name.endswith("int4") else 0)
            moved = used * 3 * WIDTH * INNER * bits / 8 / seconds / 1e9
            flops = 2 * rows * ACTIVE * 3 * WIDTH * INNER / seconds / 1e9
            product = products[name.split()[1]]
            print(
                f"{rows:4}  {name:22} {seconds * 1e3:13.3f} {moved:8.1f} "
                f"{moved / before.read_gbs:11.0%} {flops:9.0f} {flops / product:11.0%}"
            )
    print(f"after: memory is read at {read_limits(threads).read_gbs:.1f} GB/s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else len(os.sched_getaffinity(0)))
