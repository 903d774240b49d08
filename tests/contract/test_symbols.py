"""Symbols: names, dims, and the three emitters of one table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from kvgraph import KVCacheParams, ops, virtual_devices
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import BindingError

PARAMS = KVCacheParams("bfloat16", n_kv_heads=4, head_dim=64, num_layers=3, page_size=16)


@pytest.fixture
def signature() -> GraphSignature:
    return GraphSignature.of(PARAMS.get_symbolic_inputs()[0], vocab_size=100)


def test_a_record_is_flat() -> None:
    record = PARAMS.get_symbolic_inputs()[0]
    names = ["kv_blocks", "cache_lengths", "lookup_table", "max_lengths"]
    assert [s.name for s in record] == names
    assert len(record) == 4
    assert record[0] is record.kv_blocks
    assert record.kv_blocks.shape == ("num_page_slots", 2, 3, 16, 4, 64)
    assert record.kv_blocks.kind == "buffer"
    assert str(record.max_lengths.device) == "host"


def test_replicas_prefix_batch_dims_and_shards_share_them() -> None:
    devices = virtual_devices("cuda:sm_90", 4)
    params = KVCacheParams("float32", 4, 64, 3, devices=tuple(devices), data_parallel_degree=2)
    batches = [record.cache_lengths.shape for record in params.get_symbolic_inputs()]
    assert batches == [("replica_0_batch_size",)] * 2 + [("replica_1_batch_size",)] * 2
    assert [str(r.kv_blocks.device) for r in params.get_symbolic_inputs()] == [
        f"cuda:{i}" for i in range(4)
    ]


def test_a_graph_is_made_of_one_record() -> None:
    devices = tuple(virtual_devices("cuda:sm_90", 2))
    params = KVCacheParams("float32", 4, 64, 3, devices=devices, data_parallel_degree=2)
    replicas = params.get_symbolic_inputs()
    with pytest.raises(BindingError, match=r"cache_lengths: expected .* got replica_0_batch_size;"):
        GraphSignature.of(replicas[0], 100)
    with pytest.raises(
        BindingError, match=r"cache: expected .*get_symbolic_inputs\(\)\[0\] is, got P"
    ):
        GraphSignature.of(replicas, 100)  # type: ignore[arg-type]
    for vocab_size in (0, -3, 3.5, True):
        with pytest.raises(BindingError, match=r"^vocab_size: expected "):
            GraphSignature.of(PARAMS.get_symbolic_inputs()[0], vocab_size)  # type: ignore[arg-type]


class Attend(nn.Module):
    """Takes the inputs of a signature one by one, or the cache's as one record."""

    def forward(
        self, tokens: Any, input_row_offsets: Any, logits_indices: Any, *cache: Any
    ) -> torch.Tensor:
        kv_blocks, cache_lengths, lookup_table, max_lengths = cache[0] if len(cache) == 1 else cache
        q = tokens[:, None, None].expand(-1, 4, 64).to(kv_blocks.dtype)
        index = (input_row_offsets, cache_lengths, lookup_table)
        ops.store_kv(kv_blocks, q, q, *index, layer=2)
        out = ops.paged_attention(q, kv_blocks, *index, max_lengths, layer=2, scale=1.0)
        return out[logits_indices.long()]


def test_torch_export_takes_what_is_emitted(signature: GraphSignature) -> None:
    arguments, shapes = signature.to_torch_export()
    assert all(isinstance(t, torch._subclasses.FakeTensor) for t in arguments)
    assert arguments[3].dtype == torch.bfloat16
    extents = [n for t in arguments for n in t.shape[:1]]
    assert len(set(extents)) >= 5, "dims of equal extents could be taken for one"
    nested = (*shapes[:3], shapes[3:])  # *cache is one argument
    program = torch.export.export(Attend(), arguments, dynamic_shapes=nested)
    names = [s.name for s in signature.inputs[3:]]
    assert program.graph_signature.user_inputs[:3] == tuple(s.name for s in signature.inputs[:3])
    rows = {dict(zip(names, shapes[3:], strict=True))[name][0].__name__ for name in names[1:3]}
    assert rows == {"batch_size"}


def test_a_record_is_an_argument_too(signature: GraphSignature) -> None:
    arguments, shapes = signature.to_torch_export()
    record = PARAMS.get_symbolic_inputs()[0]
    cache = pytree.tree_unflatten(arguments[3:], pytree.tree_structure(record))
    assert cache.kv_blocks is arguments[3]
    program = torch.export.export(
        Attend(), (*arguments[:3], cache), dynamic_shapes=(*shapes[:3], ([*shapes[3:]],))
    )
    values = (torch.zeros(3, 2, 3, 16, 4, 64, dtype=torch.bfloat16), [0], [[1]], [[3, 3]])
    values = [torch.as_tensor(v, dtype=getattr(v, "dtype", torch.int32)) for v in values]
    cache = pytree.tree_unflatten(values, pytree.tree_structure(record))
    tokens, offsets, last = (torch.tensor(v, dtype=torch.int32) for v in ([1, 1, 1], [0, 3], [2]))
    assert program.module()(tokens, offsets, last, cache).eq(1).all()


def test_onnx_value_infos(signature: GraphSignature) -> None:
    inputs, outputs = signature.to_onnx()
    pool = inputs[3].type.tensor_type
    assert pool.elem_type == onnx.TensorProto.BFLOAT16
    dims = [d.dim_param or d.dim_value for d in pool.shape.dim]
    assert dims == ["num_page_slots", 2, 3, 16, 4, 64]
    assert [o.name for o in outputs] == ["logits", "kv_blocks_out"]


SIZES = {
    "total_seq_len": 1,
    "batch_size": 1,
    "num_logits": 1,
    "num_page_slots": 2,
    "max_num_pages": 1,
    "num_steps": 1,
}


def test_tensorrt_profile(signature: GraphSignature) -> None:
    high = SIZES | {"batch_size": 64, "total_seq_len": 512, "max_num_pages": 8}
    profile = signature.to_tensorrt_profile(SIZES, SIZES | {"batch_size": 8}, high)
    assert profile["input_row_offsets"] == ((2,), (9,), (65,))
    assert profile["lookup_table"] == ((1, 1), (8, 1), (64, 8))
    message = (
        r"input_row_offsets: dim 0 \(batch_size \+ 1\) expected min <= opt <= max, got 2, 9, 2"
    )
    with pytest.raises(BindingError, match=message):
        signature.to_tensorrt_profile(SIZES, SIZES | {"batch_size": 8}, SIZES)
    with pytest.raises(BindingError, match="tokens: expected an extent for dim 'total_seq_len'"):
        signature.to_tensorrt_profile({}, SIZES, SIZES)
    for extent in (-5, 5.5, True):
        with pytest.raises(BindingError, match=r"^opt: num_page_slots: expected "):
            signature.to_tensorrt_profile(SIZES, SIZES | {"num_page_slots": extent}, high)  # type: ignore[arg-type]
    assert set(SIZES) == {dim for symbol in signature.inputs for dim in symbol.symbolic_dims}
    derived = SIZES | {"batch_size + 1": 99}  # follows batch_size, whatever is said of it
    assert (
        signature.to_tensorrt_profile(derived, derived, derived)["input_row_offsets"] == ((2,),) * 3
    )


def test_binding_gives_one_extent_per_dim(signature: GraphSignature) -> None:
    sizes: dict[str, int] = {}
    signature.inputs[4].bind("int32", (3,), sizes)
    signature.inputs[1].bind("int32", (4,), sizes)
    assert sizes == {"batch_size": 3}
    with pytest.raises(BindingError, match=r"lookup_table: dim 0 \(batch_size\) expected 3, got 2"):
        signature.inputs[5].bind("int32", (2, 7), sizes)
    with pytest.raises(
        BindingError, match=r"^input_row_offsets: dim 0 \(batch_size \+ 1\) expected 1, got 0 in"
    ):
        signature.inputs[1].bind("int32", (0,), {})
    with pytest.raises(BindingError, match="tokens: expected dtype int32, got int64"):
        signature.inputs[0].bind("int64", (3,), sizes)
    with pytest.raises(BindingError, match=r"tokens: expected rank 1 .*, got shape \[3, 1\]"):
        signature.inputs[0].bind("int32", (3, 1), sizes)
    with pytest.raises(BindingError, match=r"kv_blocks: dim 1 \(2\) expected 2, got 1"):
        signature.inputs[3].bind("bfloat16", (9, 1, 3, 16, 4, 64), sizes)


def test_a_buffer_says_so() -> None:
    """In a refusal two sides that differ in nothing else are told apart."""
    pool = PARAMS.get_symbolic_inputs()[0].kv_blocks  # type: ignore[union-attr]
    assert str(pool).endswith(" on cpu:0 (buffer)")
    assert str(replace(pool, kind="tensor")) == str(pool).removesuffix(" (buffer)")


@pytest.mark.parametrize(
    ("extent", "said"),
    [(-4, ">= 0, got -4"), (4.0, "an integer >= 0, got float 4.0"), ("4", "an integer >= 0, got")],
)
def test_extents_are_whole_numbers(extent: Any, said: str) -> None:
    pool = PARAMS.get_symbolic_inputs()[0].kv_blocks  # type: ignore[union-attr]
    with pytest.raises(BindingError, match=f"^kv_blocks: num_page_slots: expected {said}"):
        pool.extents({"num_page_slots": extent})
