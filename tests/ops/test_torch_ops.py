"""The ops in torch: opcheck, fakes, and what the adapter itself refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from kvgraph.errors import KernelError, UnsupportedError
from kvgraph.ops import RMS_NORM, SILU_MUL, SPECS, OpSpec, torch_fusions, torch_ops

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


FUSED: list[tuple[OpSpec, list[tuple[int, ...]], dict[str, Any]]] = [
    (RMS_NORM, [(2, 5, D), (D,)], {"epsilon": 1e-5}),
    (RMS_NORM, [(5, D), (D,), (5, D)], {"epsilon": 0.1, "weight_offset": 1.0}),
    (RMS_NORM, [(5, D), (D,), (5, D)], {"epsilon": 1e-5, "round_first": True}),
    (SILU_MUL, [(2, 5, D), (2, 5, D)], {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("spec", "shapes", "attributes"), FUSED)
def test_fusions_are_their_references(
    spec: OpSpec, shapes: list[tuple[int, ...]], attributes: dict[str, Any], dtype: torch.dtype
) -> None:
    """The result, and the residual stream that becomes the sum."""
    torch.manual_seed(0)
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    arrays = [tensor.numpy().copy() for tensor in given]
    op = getattr(torch.ops.kvgraph, spec.name)
    torch.library.opcheck(
        op.default, tuple(given), attributes, test_utils=("test_schema", "test_faketensor")
    )
    found = op(*given, **attributes)
    expected = spec.reference(*arrays, **attributes)
    for mine, theirs in zip([found, *given], [expected, *arrays], strict=True):
        torch.testing.assert_close(mine, torch.from_numpy(theirs))


@pytest.mark.parametrize(
    ("spec", "shapes", "sentence"),
    [
        (RMS_NORM, [(5, D), (D + 1,)], "rms_norm: weight: dim width: expected 16 as x has it"),
        (RMS_NORM, [(5, D), (D,), (4, D)], "rms_norm: residual: dim leading 0: expected 5 as x"),
        (RMS_NORM, [(5, D), (1, D)], "rms_norm: weight: expected rank 1, got 2"),
        (SILU_MUL, [(2, 5, D), (5, D)], "silu_mul: up: dim leading 0: expected 2 as gate has it"),
    ],
)
def test_fusions_that_do_not_fit_are_refused_where_they_are_traced(
    spec: OpSpec, shapes: list[tuple[int, ...]], sentence: str
) -> None:
    given = [torch.empty(shape, device="meta") for shape in shapes]
    attributes = {a.name: 1e-5 for a in spec.attributes if a.default is None}
    with pytest.raises(KernelError, match=sentence):
        getattr(torch.ops.kvgraph, spec.name)(*given, **attributes)


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


class Store(nn.Module):
    """Stores x as V and projected as K, the first `skip` keys left out."""

    def __init__(self, skip: int = 0) -> None:
        super().__init__()
        self.project = nn.Linear(D, D)
        self.skip = skip

    def forward(self, pool: Any, x: Any, *index: Any) -> Any:
        torch_ops.store_kv(pool, self.project(x)[self.skip :], x, *index, layer=1)
        return pool


def exported(module: nn.Module) -> Any:
    """With gradients wanted of the module's parameters, as a user's own export has them."""
    (pool, x, _, *index), _ = arguments("store_kv")
    b, t = Dim("batch", min=1, max=64), Dim("tokens", min=2, max=1024)
    shapes = ({0: b + 1}, {0: b}, {0: b, 1: Dim("width", min=1)})
    dynamic = ({0: Dim("slots", min=1)}, {0: t}, shapes)
    return torch.export.export(module, (pool, x, *index), dynamic_shapes=dynamic)


def test_a_trace_leaves_rows_and_tokens_symbolic() -> None:
    program = exported(Store())
    index = [torch.tensor(x, dtype=torch.int32) for x in ([0, 7], [0], [[1, 0]])]
    with torch.no_grad():
        pool = program.module()(torch.zeros(3, 2, L, S, K, D), torch.ones(7, K, D), *index)
    assert pool[:, 1, 1].sum((1, 2, 3)).tolist() == [3 * K * D, 4 * K * D, 0]


def test_a_trace_refuses_symbolic_dims_that_never_agree() -> None:
    message = r"store_kv: v: dim total_seq_len: expected (\w+) - 1 as k has it, got \1"
    with pytest.raises(KernelError, match=message):
        exported(Store(skip=1))


def test_a_trace_refuses_a_strided_pool() -> None:
    args, _ = arguments("store_kv")
    pool = torch.empty(6, 2, L, S, D, K, device="meta").transpose(4, 5)
    meta = [argument.to("meta") for argument in args[1:]]
    with pytest.raises(KernelError, match=r"kv_blocks: expected a contiguous .* strides \(\d+, "):
        torch_ops.store_kv(pool, *meta, layer=0)


def attend(q: torch.Tensor) -> torch.Tensor:
    (_, *rest), kwargs = arguments("paged_attention")
    out: torch.Tensor = torch_ops.paged_attention(q, *rest, **kwargs)
    return out.sum()


def dual(q: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return attend(torch.autograd.forward_ad.make_dual(q, q))


WANT_GRADIENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "backward": lambda q: attend(q.requires_grad_()),
    "func.grad": lambda q: torch.func.grad(attend)(q),
    "func.vjp": lambda q: torch.func.vjp(attend, q),
    "func.jvp": lambda q: torch.func.jvp(attend, (q,), (q,)),
    "func.jvp without grad": lambda q: torch.no_grad()(torch.func.jvp)(attend, (q,), (q,)),
    "dual numbers": dual,
    "linear": lambda q: torch_ops.linear(
        q.requires_grad_(), q.to(torch.int8), out_features=1, bits=8
    ),
    "rms_norm": lambda x: torch_fusions.rms_norm(x, x[0, 0].requires_grad_(), epsilon=1e-6),
    "silu_mul": lambda x: torch_fusions.silu_mul(x, x.clone().requires_grad_()),
    "fused_experts": lambda x: torch_fusions.fused_experts(
        x[0], x[0].to(torch.int32), x[0], x[0].requires_grad_(), x[0]
    ),
}


@pytest.mark.parametrize("name", WANT_GRADIENTS)
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_refused_and_not_lost(name: str) -> None:
    q = torch.randn(5, N, D)
    with pytest.raises(UnsupportedError, match=r"(q|x|weight|up): expected .*, got one that requ"):
        WANT_GRADIENTS[name](q)


@pytest.mark.filterwarnings("ignore")
def test_gradients_are_refused_by_a_compiled_function_too() -> None:
    compiled = torch.compile(attend, backend="aot_eager")
    with pytest.raises(RuntimeError, match="q: expected a tensor without a gradient"):
        compiled(torch.randn(5, N, D, requires_grad=True))


def test_a_backward_pass_over_what_a_pool_held_before_is_refused() -> None:
    (pool, *args), attributes = arguments("store_kv")
    weight = torch.ones_like(pool, requires_grad=True)
    loss = (pool * weight).sum()
    with torch.no_grad():
        torch_ops.store_kv(pool, *args, **attributes)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("left", [0, 2, 3])
def test_a_tensor_without_values_beside_others_is_refused(left: int) -> None:
    args, attributes = arguments("store_kv")
    given = [x.to("meta") if i == left else x for i, x in enumerate(args)]
    with pytest.raises(KernelError, match=r"expected a tensor on cpu, as \w+ is, got one on meta"):
        torch_ops.store_kv(*given, **attributes)
    torch_ops.store_kv(*(x.to("meta") for x in args), **attributes)


def test_parameters_are_taken_where_no_gradient_is_wanted() -> None:
    q = torch.randn(5, N, D, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert attend(q).isfinite()
            assert torch.compile(attend, backend="aot_eager")(q).isfinite()
