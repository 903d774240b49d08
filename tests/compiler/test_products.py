"""Products with weights that are stored transposed become packed linear layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import kvgraph
from kvgraph.compiler.passes.pack_linear import PACKED, pack_linear
from kvgraph.compiler.passes.quantize_linear import QUANTIZED, quantize_linear
from kvgraph.compiler.plan import plan_deployment
from kvgraph.compiler.values import Converted, Turned
from kvgraph.contract.safetensors import read_layout
from tests.support.models import greedy_tokens, make_model, randomize_vectors
from tests.support.programs import packed_by

PASSES = {PACKED: (pack_linear, 32, torch.float32), QUANTIZED: (quantize_linear, 8, torch.bfloat16)}
Compute = Callable[["Products", torch.Tensor], torch.Tensor]


class Products(nn.Module):
    """A weight `[inputs, outputs]`, a square one, a bias and a table, which `compute` uses."""

    def __init__(self, compute: Compute, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.compute = compute
        self.w, self.square = nn.Parameter(torch.randn(64, 48)), nn.Parameter(torch.randn(64, 64))
        self.b, self.stack = nn.Parameter(torch.randn(48)), nn.Parameter(torch.randn(5, 64, 48))
        self.heads, self.out = (
            nn.Parameter(torch.randn(64, 3, 16)),
            nn.Parameter(torch.randn(4, 16, 64)),
        )
        self.row, self.five = nn.Parameter(torch.randn(1, 48)), nn.Parameter(torch.randn(5))
        self.thin = nn.Parameter(torch.randn(64, 48, 1))
        self.register_buffer("fixed", torch.randn(64, 48))
        self.to(dtype)

    def forward(self, x: Any) -> Any:
        return self.compute(self, x)


linear, einsum = nn.functional.linear, torch.einsum

# Name -> computation, and numbers of nodes and of stored weights that it becomes.
TAKEN: dict[str, tuple[Compute, int, int]] = {
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), 1, 1),
    "mm": (lambda m, x: torch.mm(x, m.w), 1, 1),
    "matmul and a bias": (lambda m, x: m.b + x @ m.w, 1, 1),
    "three dims": (lambda m, x: (x[None] @ m.w + m.b)[0], 1, 1),
    "a constant": (lambda m, x: x @ m.fixed, 1, 1),
    "a computed addend": (lambda m, x: x @ m.w + x[:, :48], 1, 1),
    "the product is used too": (lambda m, x: (p := x @ m.w) + (p + m.b).relu(), 1, 1),
    "linear of a transpose": (lambda m, x: linear(x, m.w.T, m.b), 1, 1),
    "back by T": (lambda m, x: x @ m.w @ m.w.T, 2, 2),
    "back by t": (lambda m, x: x @ m.w @ m.w.t(), 2, 2),
    "back by mT": (lambda m, x: x @ m.w @ m.w.mT, 2, 2),
    "back by transpose": (lambda m, x: x @ m.w @ m.w.transpose(0, 1), 2, 2),
    "back by permute": (lambda m, x: x @ m.w @ m.w.permute(1, 0), 2, 2),
    "both ways": (lambda m, x: (x @ m.square).relu() @ m.square.T, 2, 2),
    "twice": (lambda m, x: (x @ m.square).relu() @ m.square, 2, 1),
    "three of one input": (lambda m, x: (x @ m.w) * (x @ m.w + m.b) + x @ m.fixed, 1, 1),
    "at the left": (lambda m, x: m.w.T @ x.T, 1, 1),
    "einsum": (lambda m, x: einsum("th,hd->td", x, m.w) + m.b, 1, 1),
    "einsum of a transpose": (lambda m, x: einsum("th,dh->td", x, m.w.T), 1, 1),
    "einsum of a linear layer": (lambda m, x: einsum("ti,oi->to", x, m.square), 1, 1),
    "einsum, weight first": (lambda m, x: einsum("hd,th->td", m.w, x), 1, 1),
    "einsum, result turned": (lambda m, x: einsum("th,hd->dt", x, m.w), 1, 1),
    "einsum without result": (lambda m, x: einsum("th,hz", x, m.w), 1, 1),
    "einsum, three dims": (lambda m, x: einsum("bth,hd -> btd", x[None], m.w)[0], 1, 1),
    "einsum, ellipsis": (lambda m, x: einsum("...h,hnd->...nd", x, m.heads), 1, 1),
    "einsum to heads": (lambda m, x: einsum("th,hnd->tnd", x, m.heads), 1, 1),
    "einsum to heads, turned": (lambda m, x: einsum("th,hnd->ntd", x, m.heads), 1, 1),
    "einsum of heads": (lambda m, x: einsum("tnd,ndh->th", x.view(-1, 4, 16), m.out), 1, 1),
    "einsum of turned heads": (lambda m, x: einsum("tdn,ndh->th", x.view(-1, 16, 4), m.out), 1, 1),
    "einsum, a dim of one": (
        lambda m, x: einsum("bdk,dok->bo", x[..., None], m.thin),
        1,
        1,
    ),
    "behind two views": (lambda m, x: x @ m.heads.permute(1, 2, 0).reshape(48, 64).t(), 1, 1),
    "tensordot": (lambda m, x: torch.tensordot(x, m.w, dims=1), 1, 1),
    "tensordot of heads": (lambda m, x: torch.tensordot(x.view(-1, 4, 16), m.out, 2), 1, 1),
    "tensordot, weight first": (lambda m, x: torch.tensordot(m.heads, x, ([0], [1])), 1, 1),
    "heads as a matrix": (lambda m, x: x @ m.heads.reshape(64, 48), 1, 1),
    "heads as a layer": (lambda m, x: linear(x, m.out.flatten(0, 1), None), 1, 1),
    "heads in turn": (lambda m, x: linear(x, m.heads.permute(2, 1, 0).reshape(48, 64)), 1, 1),
    "behind many operators": (lambda m, x: reduce(torch.add, [1] * 1200, x) @ m.w, 1, 1),
    "also a table": (lambda m, x: x @ m.w + m.w[:5], 1, 1),
}

STAY: dict[str, tuple[Compute, str]] = {
    "a factor": (lambda m, x: torch.addmm(m.b, x, m.w, beta=2), "a sum without factors"),
    "a bias of columns at the left": (
        lambda m, x: torch.addmm(m.five, m.w.T, x.T),
        "rows at the left",
    ),
    "a broadcast dim": (lambda m, x: einsum("bi,io->bo", x[:, :1], m.w), "equal dims"),
    "a broadcast dim of the weight": (
        lambda m, x: torch.tensordot(x, m.row, ([1], [0])),
        "equal dims",
    ),
    "a computed bias": (lambda m, x: torch.addmm(x[:, :48], x, m.w), "a bias of the model"),
    "a stack": (lambda m, x: x @ m.stack, "a matrix, got 3 dims"),
    "a computed weight": (lambda m, x: x @ (m.w * 2), "a weight of the model, got a computed one"),
    "a product of weights": (lambda m, x: x + (m.w @ m.w.T)[:5], "rows and a weight"),
    "a sum over rows": (lambda m, x: einsum("th,hd->d", x, m.w), "a result with all dims"),
    "a shared dim": (lambda m, x: einsum("th,hd->thd", x, m.w), "a result with all dims"),
    "a vector": (lambda m, x: einsum("th,h->t", x, m.square[0]), "a weight of the model"),
    "a diagonal": (lambda m, x: einsum("th,hh->t", x, m.square), "a product"),
    "three factors": (lambda m, x: einsum("th,hd,d->td", x, m.w, m.b), "two operands, got 3"),
}


@pytest.mark.parametrize("op", PASSES)
@pytest.mark.parametrize("name", TAKEN)
def test_a_product_becomes_a_packed_layer(name: str, op: Any) -> None:
    compute, nodes, weights = TAKEN[name]
    rewrite, bits, dtype = PASSES[op]
    module, x = Products(compute, dtype), torch.randn(5, 64, dtype=dtype)
    program = torch.export.export(module, (x,))
    report = packed_by(rewrite, program, bits)
    assert report.unmatched == []
    assert sum(node.target is op for node in program.graph.nodes) == nodes
    assert sum(key.endswith(".packed") for key in program.state_dict) == weights
    assert ("w" in program.state_dict) == (name == "also a table")
    with torch.no_grad():
        found, expected = program.module()(x).float(), module(x).float()
    assert (found - expected).norm() < (1e-5 if bits == 32 else 0.03) * expected.norm()


@pytest.mark.parametrize("name", STAY)
def test_another_product_stays(name: str) -> None:
    compute, why = STAY[name]
    module, x = Products(compute, torch.float32), torch.randn(5, 64)
    program = torch.export.export(module, (x,))
    report = packed_by(pack_linear, program, 8)
    assert report.applied == 0
    assert report.unmatched
    assert all(f"expected {why}" in each for each in report.unmatched)
    with torch.no_grad():
        assert torch.equal(program.module()(x), module(x))


def test_the_transpose_of_a_source_is_read_in_rows() -> None:
    stored = torch.arange(12.0).reshape(3, 4)
    turned = Turned(Converted("a", (3, 4), torch.float32, lambda: stored, bits=8))
    assert (turned.shape, turned.bits, turned.form) == ((4, 3), 8, None)
    assert torch.equal(turned.open()(1, 3), stored.T[1:3])
    assert torch.equal(turned.read(), stored.T)


@pytest.mark.parametrize("backend", ["onnx", "torch"])
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_gpt2(weights: str, backend: str, tmp_path: Path) -> None:
    """Compile's own check compares the logits with the model's."""
    folder, out = make_model("gpt2", tmp_path / "model"), tmp_path / "out"
    randomize_vectors(folder)
    manifest = kvgraph.compile(folder, out, backend=backend, weights=weights, page_size=16)
    assert manifest.ops["kvgraph.linear"] == 4 * 2 + 1
    held = read_layout(out / "weights.safetensors")
    assert not [name for name in held if name.endswith(("c_fc.weight", "c_proj.weight"))]
    if weights == "bf16":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        prompt = [3 + 7 * i % 150 for i in range(60)]
        greedy = kvgraph.SamplingParams(max_new_tokens=4, ignore_eos=True)
        with kvgraph.Engine(out, num_pages=32) as engine:
            (done,) = engine.generate([prompt], greedy)
        assert done.token_ids == greedy_tokens(model, prompt, 4)


@pytest.mark.parametrize(
    ("target", "weights"), [("cpu", "int8"), ("cpu", "int4"), ("cuda:sm_80", "int8")]
)
def test_a_plan_counts_gpt2_as_it_is_stored(target: str, weights: str, tmp_path: Path) -> None:
    folder, out = make_model("gpt2", tmp_path / "model"), tmp_path / "out"
    options: dict[str, Any] = {"target": target, "weights": weights}
    kvgraph.compile(folder, out, backend="torch", page_size=16, check=False, **options)
    held = read_layout(out / "weights.safetensors")
    given = {"memory": 1 << 30, "max_seq_len": None, "max_batch_size": 4}
    made = plan_deployment(folder, dtype=None, cache_dtype=None, **options, **given)
    nbytes = sum(at.nbytes for at in held.values())
    if target == "cpu":  # a plan counts all tables in bfloat16, that of positions too
        nbytes -= next(at.nbytes for name, at in held.items() if name.endswith("wpe.weight")) // 2
    assert made.weights == pytest.approx(nbytes, rel=0.05)
