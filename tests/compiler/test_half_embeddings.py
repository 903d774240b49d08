"""Which tables get 16 bits next to packed weights, on both levels, and which dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import kvgraph
from kvgraph import ops
from kvgraph.compiler.passes.half_embeddings import half_embeddings
from kvgraph.compiler.passes.parameters import held
from kvgraph.contract.safetensors import read_layout
from tests.support import gguf_files
from tests.support.models import make_model
from tests.support.programs import packed_by


class Tables(nn.Module):
    """A table that is only gathered from, twice, and one that is a matrix too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.only, self.both = nn.Embedding(48, 32, padding_idx=0), nn.Embedding(48, 32)

    def forward(self, tokens: Any) -> Any:
        x = self.only(tokens) + self.only(tokens + 1) + self.both(tokens)
        return x @ self.both.weight.T


OF_TOKENS = kvgraph.GraphSignature(
    (kvgraph.TensorType("tokens", "int64", ("total_seq_len",), kvgraph.virtual_devices("cpu")[0]),),
    (),
)


def test_tables_that_are_only_gathered_from_get_16_bits() -> None:
    module, tokens = Tables(), torch.arange(40)
    program = torch.export.export(module, (tokens,))
    expected = module(tokens)
    report = packed_by(half_embeddings, program, OF_TOKENS)
    assert report.applied == 1
    assert [why.partition(":")[2] for why in report.unmatched] == [
        " expected no use but as a table, got numpy_t"
    ]
    lookups = [n for n in program.graph.nodes if n.target is torch.ops.aten.embedding.default]
    dtypes = [found[1].dtype for n in lookups if (found := held(program, n.args[0]))]
    assert dtypes == [torch.float16, torch.float16, torch.float32]
    assert "only.weight" not in program.state_dict
    with torch.no_grad():
        found = program.module()(tokens)
        module.only.weight.copy_(module.only.weight.half())
    assert torch.equal(found, module(tokens))
    assert not torch.equal(found, expected)


class Rows(nn.Module):
    """Rows of tokens and of positions, of parameters and of buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(48, 32), nn.Embedding(64, 32)
        self.register_buffer("fixed", torch.rand(48, 32))
        self.register_buffer("angles", torch.rand(64, 32))
        self.qkv, self.head = nn.Linear(32, 64), nn.Linear(32, 48)

    def forward(self, tokens: Any, offsets: Any, chosen: Any, pool: Any, *index: Any) -> Any:
        lengths, table, most = index
        numbers = torch.arange(tokens.shape[0])
        row = (numbers[:, None] >= offsets[None, 1:]).sum(-1)
        at = numbers - offsets[row] + lengths[row]
        known = torch.where(tokens < 40, tokens, torch.zeros_like(tokens))
        x = self.words(known) + self.places(at) + nn.functional.embedding(tokens, self.fixed)
        x = x + nn.functional.embedding(at, self.angles).cos()
        q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
        return self.head((x + out.reshape(x.shape[0], -1))[chosen.long()])


TABLES = ("words", "places", "fixed", "angles")


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_only_parameters_of_tokens_get_16_bits(backend: str, tmp_path: Path) -> None:
    """Half an angle of a late position is another one."""
    params = kvgraph.KVCacheParams("float32", n_kv_heads=2, head_dim=8, num_layers=1, page_size=4)
    settings: dict[str, Any] = {"params": params, "vocab_size": 48, "max_seq_len": 64}
    manifest = kvgraph.compile(
        Rows(), tmp_path / "out", backend=backend, weights="bf16", **settings
    )
    (entry,) = [entry for entry in manifest.passes if entry.name.startswith("half_")]
    assert entry.applied == 1
    layout = read_layout(tmp_path / "out" / "weights.safetensors")
    tables = {name: x.dtype for name, x in layout.items() if name.partition(".")[0] in TABLES}
    halves = [name.partition(".")[0] for name, dtype in tables.items() if dtype == "F16"]
    assert (halves, len(tables)) == (["words"], len(TABLES)), tables


def stored_table(folder: Path) -> torch.Tensor:
    """The token table of an artifact, or of a checkpoint, as it is stored."""
    with safe_open(folder, "pt") as file:
        (name,) = (name for name in file.keys() if "embed_tokens" in name)  # noqa: SIM118
        return file.get_tensor(name)


@pytest.mark.parametrize("backend", ["onnx", "torch"])
@pytest.mark.parametrize(
    ("dtype", "change", "expected"),
    [
        ("float16", lambda x: x, torch.float16),
        ("bfloat16", lambda x: x, torch.bfloat16),
        ("float32", lambda x: x, torch.float16),
        ("float32", lambda x: x.bfloat16().float(), torch.bfloat16),
        ("float32", lambda x: x + 1e5, torch.bfloat16),
    ],
)
def test_a_table_is_rounded_least(
    backend: str,
    dtype: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    expected: torch.dtype,
    tmp_path: Path,
) -> None:
    folder = make_model("llama", tmp_path / "model", dtype=dtype, tie_word_embeddings=False)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: change(tensors[name])}, path, {"format": "pt"})
    given = stored_table(path)
    kvgraph.compile(folder, tmp_path / "out", backend=backend, weights="int8", check=False)
    found = stored_table(tmp_path / "out" / "weights.safetensors")
    assert (found.dtype, found.shape) == (expected, given.shape)
    assert torch.equal(found, given.to(expected))


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_a_note_tells_the_dtype_of_a_table_in_fewer_bits(backend: str, tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model", tie_word_embeddings=False)
    model = gguf_files.make(folder, tmp_path / "model.gguf", "Q8_0")
    manifest = kvgraph.compile(
        model, tmp_path / "out", backend=backend, weights="stored", check=False
    )
    note = "weights: float16 for 1 token table that the checkpoint has in fewer bits"
    assert note in manifest.notes
