"""A program's modules on a GPU: what they plan and refuse, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvgraph import KernelError, KVCacheParams
from kvgraph.compiler.passes.fuse_rope import fuse_rope
from kvgraph.compiler.passes.fuse_update_and_attend import FUSED
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.variants import Variant
from kvgraph.runtime.sessions.program import Attention, Operands, RmsNorm, SiluMul
from tests.support.models import layers
from tests.support.programs import PAGE, program_of, step

POSITIONS = 40


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
    attention = Attention(
        node, KVCacheParams("float32", 2, 16, layers("llama"), page_size=PAGE), gpu
    )

    def attend(longest: int) -> None:
        _, offsets, _, pool, lengths, table, most = step(signature, "float32", [2, 1])
        q, k, v = displaced(3, 4, 16), torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)
        most[0, 1] = longest
        cos_sin = program.state_dict["kvgraph.cos_sin_0"]
        attention(q, pool, offsets, lengths, table, most, k, v, cos_sin, None, None)

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
    node: Any = SimpleNamespace(
        args=[SimpleNamespace(meta={"val": gate})], kwargs={"epsilon": 1e-6}
    )
    SiluMul(node, gpu)(gate, up)
    RmsNorm(node, gpu)(up, torch.ones(6))
    for _, operands in gpu.launched:
        require_aligned(operands)
    assert torch.equal(gpu.launched[0][1]["up"], up)
    assert gpu.launched[0][1]["gate"] is gate, "what starts where kernels take it is not copied"
    assert torch.equal(gpu.launched[1][1]["x"], up)
