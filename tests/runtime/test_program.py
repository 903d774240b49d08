"""A program's launches on a GPU: what they plan and refuse, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from kvgraph import KernelError, KVCacheParams
from kvgraph.compiler.passes.fuse_rope import fuse_rope
from kvgraph.compiler.passes.fuse_update_and_attend import FUSED
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.variants import Variant
from kvgraph.ops import torch_fusions
from kvgraph.runtime.artifact import verify
from kvgraph.runtime.sessions.launches import (
    Attention,
    Operands,
    QuantizedLinear,
    RmsNorm,
    SiluMul,
    bounds_of,
)
from kvgraph.runtime.sessions.program import load_program
from kvgraph.runtime.sessions.views import VIEWS
from tests.support.models import layers
from tests.support.programs import PAGE, program_of, step

POSITIONS = 40
EPSILON = {"epsilon": 1e-6}


class Recorder:
    """Launches nothing."""

    device, arch, multiprocessors = torch.device("cpu"), "sm_90", 132

    def __init__(self) -> None:
        self.launched: list[tuple[LaunchPlan, Operands]] = []

    def free_memory(self) -> None: ...

    def require(self, variants: Iterable[Variant]) -> None: ...

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        self.launched.append((plan, operands))

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise NotImplementedError


def test_rope_reaches_every_kernel_and_ends_with_its_table(
    model_folder: Callable[[str], Path],
) -> None:
    program, signature = program_of(model_folder("llama"), "float32")
    assert fuse_rope(program, signature, POSITIONS).applied == layers("llama")
    node = next(n for n in program.graph.nodes if n.target is FUSED)
    gpu = Recorder()
    leaf = KVCacheParams("float32", 2, 16, layers("llama"), page_size=PAGE)
    attention = Attention(node, nn.Module(), gpu, leaf)

    def attend(longest: int) -> None:
        _, offsets, _, pool, lengths, table, most = step(signature, "float32", [2, 1])
        q, k, v = displaced(3, 4, 16), torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)
        most[0, 1] = longest
        cos_sin = program.state_dict["kvgraph.cos_sin_0"]
        attention.run(bounds_of(most, table), q, pool, offsets, lengths, table, k, v, cos_sin)

    attend(POSITIONS)
    (plan, operands) = gpu.launched[0]
    assert tuple(operands["cos_sin"].shape) == (POSITIONS, 16)
    require_aligned(operands)
    kernels = {one.variant.kernel.name: one.variant for one in plan.launches}
    assert {*kernels} >= {"store_kv", "paged_attention"}
    for name in ("store_kv", "paged_attention"):
        assert kernels[name].constants["ROTARY"] == 16
        assert "cos_sin" in [parameter.name for parameter in kernels[name].parameters]
        assert kernels[name] in attention.variants
    with pytest.raises(KernelError) as error:
        attend(POSITIONS + 1)
    assert str(error.value) == (
        f"update_and_attend: max_lengths: expected contexts of at most the {POSITIONS} positions "
        f"of cos_sin, got {POSITIONS + 1}"
    )


def displaced(*shape: int) -> torch.Tensor:
    """Row-major, at an address that no kernel takes."""
    made = torch.arange(torch.Size(shape).numel() + 1, dtype=torch.float32)[1:].view(shape)
    assert made.is_contiguous()
    assert made.data_ptr() % 16
    return made


def require_aligned(operands: Operands) -> None:
    assert not {name: x for name, x in operands.items() if x.data_ptr() % 16}


def test_columns_of_one_row_are_copied_to_where_kernels_take_them() -> None:
    """They count as contiguous wherever they start."""
    gpu, both = Recorder(), torch.arange(12.0).view(1, 12)
    gate, up = both[:, :6], both[:, 6:]
    graph = torch.fx.Graph()
    given = [graph.placeholder(name) for name in ("gate", "up", "weight")]
    for node, value in zip(given, (gate, up, torch.ones(6)), strict=True):
        node.meta["val"] = value
    product = graph.call_function(torch_fusions.silu_mul.default, tuple(given[:2]))
    norm = graph.call_function(torch_fusions.rms_norm.default, (given[1], given[2]), EPSILON)
    SiluMul(product, nn.Module(), gpu).run(gate, up)
    RmsNorm(norm, nn.Module(), gpu).run(up, torch.ones(6))
    for _, operands in gpu.launched:
        require_aligned(operands)
    assert torch.equal(gpu.launched[0][1]["up"], up)
    assert gpu.launched[0][1]["gate"] is gate, "what starts where kernels take it is not copied"
    assert torch.equal(gpu.launched[1][1]["x"], up)


def test_a_weight_is_copied_once_to_where_kernels_take_it() -> None:
    gpu, module, graph = Recorder(), nn.Module(), torch.fx.Graph()
    module.register_buffer("weight", displaced(6))
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    x.meta["val"], weight.meta["val"] = torch.zeros(2, 6), module.weight
    norm = RmsNorm(
        graph.call_function(torch_fusions.rms_norm.default, (x, weight), EPSILON), module, gpu
    )
    for rows in (2, 3):
        norm.run(torch.zeros(rows, 6))
    (_, first), (_, second) = gpu.launched
    require_aligned(first)
    assert first["weight"] is second["weight"]
    assert torch.equal(first["weight"], module.weight)


def test_outputs_that_are_left_out_are_empty() -> None:
    gpu, graph = Recorder(), torch.fx.Graph()
    x, weight, scales = (graph.placeholder(name) for name in ("x", "weight", "scales"))
    x.meta["val"] = torch.zeros(1, 3, 32)
    weight.meta["val"] = torch.zeros(1, 32, 64, dtype=torch.int8)
    scales.meta["val"] = torch.zeros(64)
    node = graph.call_function(
        torch_fusions.quantized_linear.default,
        (x, weight, scales),
        {"out_features": 48, "out_features_1": 16, "bits": 8},
    )
    given = [n.meta["val"] for n in (x, weight, scales)]
    outs = QuantizedLinear(node, nn.Module(), gpu).run(*given)
    assert [tuple(out.shape) for out in outs] == [(1, 3, 48), (1, 3, 16), (0, 0)]
    (_, operands) = gpu.launched[0]
    assert operands["out"] is outs[0]
    assert operands["out_1"] is outs[1]


def test_what_is_the_same_in_every_layer_is_made_once(compiled: Callable[..., Path]) -> None:
    """Between two launches Python runs, and the device may wait for it."""
    pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    artifact, gpu = verify(compiled("tiny-llama", "torch", target="cuda:sm_90")), Recorder()
    program = load_program(artifact, gpu)
    ours = [n for n in program.graph.nodes if "kvgraph" in getattr(n.target, "__module__", "")]
    assert [n.target for n in ours].count(bounds_of) == 1
    assert not [n for n in ours for given in n.all_input_nodes if given.op == "get_attr"]
    assert not [n for n in program.graph.nodes if n.target in VIEWS], "each is one reshape"

    dtype = artifact.manifest.dtype
    program(*step(artifact.signature, dtype, [2, 1]))
    attended = [operands for _, operands in gpu.launched if "lookup_table" in operands]
    count = artifact.params().leaves.popitem()[1].num_layers
    assert len(attended) == count > 1
    assert len({id(operands["lookup_table"]) for operands in attended}) == 1
    assert {operands["q"].shape for operands in attended} == {attended[0]["out"].shape}
    plans = [plan for plan, operands in gpu.launched if "lookup_table" in operands]
    layers = [
        dict(zip([p.name for p in one.variant.parameters], one.arguments, strict=True))["layer"]
        for plan in plans
        for one in plan.launches[:1]
    ]
    assert layers == list(range(count))
