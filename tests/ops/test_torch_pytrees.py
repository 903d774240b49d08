"""Records as pytrees: leaves in the order of the symbols, nested as caches nest, and saved so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import kvgraph.ops.torch_pytrees  # noqa: F401
from kvgraph.contract.inputs import Buffer, KVCacheInputs, KVCacheInputsSequence
from kvgraph.contract.params import KVCacheQuantization, KVCacheStrategy
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.kv.null import NullKVCacheManager
from tests.support.builders import make_params

QUANTIZED = make_params(quantization=KVCacheQuantization("int8", granularity=4))
TREE = MultiKVCacheParams.from_params(
    {"a": make_params(2), "b": MultiKVCacheParams.from_params({"c": make_params(2)})}
)
CACHES: dict[str, Any] = {
    "paged": make_params(),
    "shards": make_params(2),
    "quantised": QUANTIZED,
    "continuous": make_params(cache_strategy=KVCacheStrategy.CONTINUOUS),
    "padded": make_params(cache_strategy=KVCacheStrategy.PADDED),
    "tree": TREE,
}


def described(name: str) -> tuple[list[Any], KVCacheInputs]:
    """Symbols of a cache, and values without memory that bind to them."""
    params = CACHES[name]
    layers = sum(leaf.num_layers for leaf in params.leaves.values())
    manager = NullKVCacheManager(params, 4, 64, layers, params.devices, None, 0, params.page_size)
    inputs: KVCacheInputs = manager.runtime_inputs([[]])
    return manager.get_symbolic_inputs(), inputs


@pytest.mark.parametrize("name", CACHES)
def test_symbols_and_values_iterate_alike(name: str) -> None:
    symbols, inputs = described(name)
    flat = [symbol for record in symbols for symbol in record]
    assert pytree.tree_leaves(symbols) == flat
    assert [value.shape for value in inputs] == [value.shape for value in inputs.flatten()]
    assert len(inputs) == len(flat)
    assert inputs[-1] is inputs.flatten()[-1]
    for record, own in zip(symbols, inputs.inputs, strict=True):
        assert len(record) == len(own)
        assert pytree.tree_leaves(own) == list(own)
        for symbol, value in zip(record, own, strict=True):
            symbol.bind(value.dtype, value.shape, {})


@pytest.mark.parametrize("name", CACHES)
def test_they_come_back_as_they_went(name: str) -> None:
    symbols, inputs = described(name)
    assert pytree.tree_map(lambda symbol: symbol, symbols) == symbols
    for tree in (inputs, KVCacheInputsSequence([inputs, inputs])):
        leaves, spec = pytree.tree_flatten(tree)
        assert all(isinstance(leaf, Buffer) for leaf in leaves)
        back = pytree.tree_unflatten(leaves, spec)
        assert type(back) is type(tree)
        assert all(a is b for a, b in zip(back, tree, strict=True))
        assert spec == pytree.treespec_loads(pytree.treespec_dumps(spec))


def test_paths_name_caches_and_fields() -> None:
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(described("tree")[0])]
    assert paths[:2] == ["[0]['a'].kv_blocks", "[0]['a'].cache_lengths"]
    assert paths[4] == "[0]['b']['c'].kv_blocks"
    assert pytree.keystr(pytree.tree_leaves_with_path(described("shards")[1])[4][0]) == (
        "[1].kv_blocks"
    )


class Lengths(nn.Module):
    def forward(self, cache: Any) -> torch.Tensor:
        return cache.cache_lengths[0] + cache.max_lengths[0, 0]


@pytest.mark.parametrize("of", ["symbols", "values"])
def test_a_program_that_takes_a_record_is_saved_and_loaded(of: str, tmp_path: Path) -> None:
    symbols, inputs = described("paged")
    record = symbols[0] if of == "symbols" else inputs.inputs[0]
    cache = pytree.tree_map(lambda each: torch.ones(2, 2, dtype=torch.int32), record)
    torch.export.save(torch.export.export(Lengths(), (cache,)), tmp_path / "lengths.pt2")
    loaded = torch.export.load(tmp_path / "lengths.pt2")
    assert loaded.module()(cache).tolist() == [2, 2]


PLACEHOLDERS = """
import sys
import kvgraph
import torch
from tests.support.builders import make_params

class Next(torch.nn.Module):
    def forward(self, *values):
        return values[0] + 1

symbols = make_params().get_symbolic_inputs()[0]
arguments, shapes = kvgraph.GraphSignature.of(symbols, 32).to_torch_export()
program = torch.export.export(Next(), arguments, dynamic_shapes=(shapes,))
torch.export.save(program, sys.argv[1])
loaded = torch.export.load(sys.argv[1])
print(len(loaded.example_inputs[0]), type(loaded.example_inputs[0][0]).__name__)
"""


def test_a_program_that_was_exported_over_placeholders_is_loaded_by_safe_types(
    tmp_path: Path,
) -> None:
    """torch warns where it falls back on an unpickler that runs any code."""
    done = subprocess.run(
        [sys.executable, "-c", PLACEHOLDERS, tmp_path / "next.pt2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("7 FakeTensor\n", "")
