"""The ops in torch: opcheck, fakes, and what the adapter itself refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgraph.errors import KernelError
from kvgraph.ops import SPECS, torch_ops

S, L, K, N, D = 4, 2, 2, 4, 16


def arguments(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    pool = torch.zeros(6, 2, L, S, K, D)
    q, k, v = (torch.randn(5, heads, D) for heads in (N, K, K))
    index = (
        torch.tensor([0, 3, 5], dtype=torch.int32),
        torch.tensor([0, 6], dtype=torch.int32),
        torch.tensor([[4, 5], [0, 2]], dtype=torch.int32),
    )
    most = torch.tensor([[3, 8]], dtype=torch.int32)
    if name == "store_kv":
        return (pool, k, v, *index), {"layer": 1}
    if name == "paged_attention":
        return (q, pool, *index, most), {"layer": 1, "scale": 0.25}
    return (q, pool, *index, most, k, v), {"layer": 1, "scale": 0.25, "window": 3}


@pytest.mark.parametrize("name", [spec.name for spec in SPECS])
@pytest.mark.filterwarnings("ignore")
def test_opcheck(name: str) -> None:
    args, kwargs = arguments(name)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.kvgraph, name).default, args, kwargs, test_utils=tests)


def test_update_and_attend_is_store_then_attention() -> None:
    args, kwargs = arguments("update_and_attend")
    together = torch_ops.update_and_attend(*args, **kwargs)
    pool = torch.zeros_like(args[1])
    torch_ops.store_kv(pool, *args[6:8], *args[2:5], layer=1)
    apart = torch_ops.paged_attention(args[0], pool, *args[2:6], **kwargs)
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(args[1], pool)


def test_transposed_activations_are_taken_a_strided_pool_is_not() -> None:
    args, kwargs = arguments("update_and_attend")
    expected = torch_ops.update_and_attend(*args, **kwargs)
    q = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(torch_ops.update_and_attend(q, *args[1:], **kwargs), expected)
    strided = torch.zeros(6, 2, L, S, D, K).transpose(4, 5)
    with pytest.raises(KernelError, match="kv_blocks: expected a contiguous buffer"):
        torch_ops.update_and_attend(args[0], strided, *args[2:], **kwargs)
