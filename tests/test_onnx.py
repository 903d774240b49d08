"""A module of a user's own through plain torch.onnx.export, in a plain ONNX Runtime session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import kvgraph
import kvgraph.onnx
from kvgraph import ops
from kvgraph.contract.signature import output_name

VOCAB, HEADS, KV_HEADS, HEAD_DIM, PAGE, SLOTS = 32, 4, 2, 16, 4, 9


class Decoder(nn.Module):
    """Every layer of every cache stores and attends; `stores` False: the last layer only reads."""

    def __init__(self, layers: int, caches: int = 1, *, attends: bool = True, stores: bool = True):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HEADS * HEAD_DIM)
        self.qkv = nn.Linear(HEADS * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.layers, self.caches, self.attends, self.stores = layers, caches, attends, stores

    def forward(self, tokens: Any, offsets: Any, logits_indices: Any, *cache: Any) -> torch.Tensor:
        x = self.embed(tokens)
        fields = len(cache) // self.caches
        for i in range(self.layers * self.caches):
            own = cache[i % self.caches * fields :][:fields]
            x = x + self.layer(i // self.caches, x, offsets, *own)
        return x[logits_indices] @ self.embed.weight.T

    def layer(
        self,
        i: int,
        x: Any,
        offsets: Any,
        pool: Any,
        lengths: Any,
        table: Any,
        most: Any,
        *rest: Any,
    ) -> Any:
        q, k, v = self.qkv(x).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM).split((4, 2, 2), 1)
        if self.stores or i < self.layers - 1:
            ops.store_kv(pool, k, v, offsets, lengths, table, *rest, layer=i)
        if not self.attends:
            return x
        out = ops.paged_attention(
            q, pool, offsets, lengths, table, most, *rest, layer=i, scale=0.25, window=5
        )
        return out.flatten(1)


class Meddler(Decoder):
    """One layer; `between` runs behind its store, `after` behind its attention."""

    def __init__(self, between: Any = None, after: Any = None) -> None:
        super().__init__(1)
        self.between, self.after = between, after

    def layer(self, i: int, x: Any, offsets: Any, pool: Any, *index: Any) -> Any:
        lengths, table, most = index
        heads = self.qkv(x).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM).clone()
        q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=i)
        if self.between:
            self.between(heads)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=i, scale=0.25)
        out = out.flatten(1) + k.repeat(1, 2, 1).flatten(1)
        return self.after(out, pool, lengths) if self.after else out


class Rotated(Decoder):
    """One layer whose queries are products with a table of complex numbers."""

    def __init__(self) -> None:
        super().__init__(1)
        angles = torch.outer(torch.arange(32.0), torch.arange(1.0, HEAD_DIM // 2 + 1))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def layer(self, i: int, x: Any, offsets: Any, pool: Any, *index: Any) -> Any:
        lengths, table, most = index
        q, k, v = self.qkv(x).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM).split((4, 2, 2), 1)
        assert isinstance(self.table, torch.Tensor)
        turns = self.table[torch.arange(x.shape[0])].unsqueeze(1)
        pairs = torch.view_as_complex(q.reshape(-1, HEADS, HEAD_DIM // 2, 2)) * turns
        q = torch.view_as_real(pairs).flatten(2)
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=i)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=i, scale=0.25)
        return out.flatten(1)


def keys(heads: torch.Tensor) -> None:
    heads[:, 4:6] *= 3.0


def all_heads(heads: torch.Tensor) -> None:
    heads.mul_(0.5)


def flat(heads: torch.Tensor) -> None:
    heads.view(-1).mul_(0.5)


def params(layers: int, **changes: Any) -> kvgraph.KVCacheParams:
    return kvgraph.KVCacheParams("float32", KV_HEADS, HEAD_DIM, layers, page_size=PAGE, **changes)


TWO = kvgraph.MultiKVCacheParams.from_params({"a": params(1), "b": params(1)})
CACHES: dict[str, tuple[Decoder, Any]] = {
    "two layers": (Decoder(2), params(2)),
    "quantised": (Decoder(2), params(2, quantization=kvgraph.KVCacheQuantization("int8"))),
    "two caches": (Decoder(1, caches=2), TWO),
    "a write behind a store": (Meddler(keys), params(1)),
    "a write into all heads": (Meddler(all_heads), params(1)),
    "a write through a view": (Meddler(flat), params(1)),
    "complex numbers": (Rotated(), params(1)),
}


def exported(
    module: nn.Module, cache: Any
) -> tuple[ExportedProgram, kvgraph.GraphSignature, tuple[Any, ...]]:
    signature = kvgraph.GraphSignature.of(cache.get_symbolic_inputs()[0], VOCAB)
    arguments, shapes = signature.to_torch_export()
    nested = (*shapes[:3], shapes[3:])
    program = torch.export.export(module, arguments, dynamic_shapes=nested)
    return program, signature, nested


def step(signature: kvgraph.GraphSignature, lengths: list[int]) -> list[torch.Tensor]:
    """Inputs of a ragged step over empty rows."""
    rows, total = len(lengths), sum(lengths)
    given = {
        "tokens": np.arange(total) % VOCAB,
        "input_row_offsets": np.cumsum([0, *lengths]),
        "logits_indices": np.arange(total),
        "cache_lengths": np.zeros(rows),
        "lookup_table": np.arange(rows * 2).reshape(rows, 2),
        "max_lengths": np.array([[max(lengths)] * 2]),
    }
    sizes = {d: SLOTS for s in signature.inputs for d in s.symbolic_dims}
    return [
        torch.zeros(s.extents(sizes), dtype=getattr(torch, s.dtype))
        if s.kind == "buffer"
        else torch.from_numpy(given[s.name.rpartition(".")[2]].astype(np.int32))
        for s in signature.inputs
    ]


def run(
    session: ort.InferenceSession, signature: kvgraph.GraphSignature, values: list[torch.Tensor]
) -> np.ndarray:
    """Logits; the pools of `values` are written in place."""
    binding = session.io_binding()
    bound = {
        symbol.name: ort.OrtValue.ortvalue_from_numpy(value.numpy())
        for symbol, value in zip(signature.inputs, values, strict=True)
    }
    for name, value in bound.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("logits")
    for symbol in signature.buffers:
        binding.bind_ortvalue_output(output_name(symbol), bound[symbol.name])
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy()


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.filterwarnings("ignore")
def test_plain_export_and_plain_session(name: str, tmp_path: Path) -> None:
    module, cache = CACHES[name]
    program, signature, shapes = exported(module, cache)
    before = str(program.graph), [*program.state_dict], [*program.constants]
    torch.onnx.export(
        kvgraph.onnx.lower_caches(program),
        f=tmp_path / "model.onnx",
        dynamo=True,
        verbose=False,
        custom_translation_table=kvgraph.onnx.translation_table(),
        dynamic_shapes=shapes,
        input_names=[symbol.name for symbol in signature.inputs],
        output_names=[output_name(symbol) for symbol in signature.outputs],
    )
    assert (str(program.graph), [*program.state_dict], [*program.constants]) == before
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    options = ort.SessionOptions()
    options.register_custom_ops_library(kvgraph.onnx.library_path())
    session = ort.InferenceSession(tmp_path / "model.onnx", options, ["CPUExecutionProvider"])
    mine = [(node.name, tuple(node.shape)) for node in session.get_inputs()]
    assert mine == [(symbol.name, symbol.shape) for symbol in signature.inputs]
    for lengths in ([1], [3, 1, 7]):
        values = step(signature, lengths)
        bound = [value.clone() for value in values]
        with torch.no_grad():
            expected = program.module()(*values)
        np.testing.assert_allclose(run(session, signature, bound), expected.numpy(), atol=1e-4)
        for symbol, a, b in zip(signature.inputs, bound, values, strict=True):
            if symbol.kind == "buffer":
                assert a.any()
                torch.testing.assert_close(a, b, atol=2 if a.dtype is torch.int8 else 1e-5, rtol=0)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.ReLU()), "expected pairs of kvgraph::store_kv and paged_att.*, got none"),
        (Decoder(1, attends=False), "store_kv of layer 0: expected a paged_attention of the same"),
        (Decoder(1, stores=False), "layer 0: expected a store_kv of its new tokens .*, got none"),
    ],
)
def test_programs_that_cannot_be_lowered(module: nn.Module, message: str) -> None:
    if isinstance(module, Decoder):
        program, _, _ = exported(module, params(1))
    else:
        program = torch.export.export(module, (torch.ones(2),))
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        kvgraph.onnx.lower_caches(program)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda x, pool, _: (pool.mul_(0.5), x)[1], "got aten.mul_.Tensor that changes cache_0"),
        (lambda x, pool, _: (pool[0].mul_(0.5), x)[1], "cache ops alone use, got aten.select.int"),
        (
            lambda x, _, lengths: (lengths.add_(1), x)[1],
            "got aten.add_.Tensor that changes cache_1",
        ),
        (lambda x, pool, _: x + pool[0].sum(), "cache ops alone use, got aten.select.int of cach"),
    ],
)
def test_pools_that_are_used_by_others(after: Any, message: str) -> None:
    program, _, _ = exported(Meddler(after=after), params(1))
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        kvgraph.onnx.lower_caches(program)


def test_an_extent_of_a_pool() -> None:
    program, _, _ = exported(Meddler(after=lambda x, pool, _: x * pool.shape[0]), params(1))
    kvgraph.onnx.lower_caches(program)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_a_program_that_is_functional_already() -> None:
    program, _, _ = exported(Decoder(1), params(1))
    with pytest.raises(kvgraph.UnsupportedError, match="expected pools that are inputs, got getit"):
        kvgraph.onnx.lower_caches(program.run_decompositions())
