"""What only logits read runs for the rows that logits are asked of, and gives the same logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional

import kvgraph
from kvgraph import ops
from kvgraph.compiler.export import export
from kvgraph.compiler.functional import without_writes
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes import select_rows_early as early
from kvgraph.compiler.passes.require_tokens_apart import require_tokens_apart
from kvgraph.compiler.passes.select_rows_early import select_rows_early
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import UnsupportedError
from tests.support.models import EXPERTS, LATENT, make_model
from tests.support.programs import program_of, step

aten = torch.ops.aten
PARAMS = kvgraph.KVCacheParams("float32", n_kv_heads=2, head_dim=8, num_layers=1, page_size=16)
SIGNATURE = GraphSignature.of(PARAMS.get_symbolic_inputs()[0], 32)
LENGTHS = [5, 1, 9]
ASKED: tuple[list[int], ...] = ([4, 5, 14], [0], list(range(15)), [14, 3, 3, 7, 0], [])
ARCHITECTURES = [
    *("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "phi", "gpt2"),
    *("qwen3_moe", "glm4_moe", "cohere2", "olmo2", "deepseek_v3"),
]
Rows = torch.Tensor
After = Callable[[Any, Rows, Rows], Rows]


class Decoder(nn.Module):
    """One layer; `after` is what a user does behind its attention, up to the rows it returns."""

    def __init__(self, after: After) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.after = after
        self.embed = nn.Embedding(32, 32)
        self.qkv, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 48), nn.Linear(48, 32)
        self.register_buffer("table", torch.randn(64, 32))

    def forward(self, tokens: Rows, offsets: Rows, at: Rows, pool: Rows, *index: Any) -> Rows:
        lengths, table, most = index
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
        return self.after(self, x + out.reshape(x.shape[0], -1), at.long()) @ self.embed.weight.T


def mlp(d: Decoder, x: Rows) -> Rows:
    return x + d.down(functional.silu(d.up(functional.rms_norm(x, (32,)))))


def experts(d: Decoder, x: Rows) -> Rows:
    """Two of four experts of each token, by rows that are counted from the token."""
    weights, chosen = x[:, :4].softmax(-1).topk(2, -1)
    table = d.embed.weight.expand(4, 32, 32)
    out = torch.bmm(table[chosen.reshape(-1)], x.repeat_interleave(2, 0)[:, :, None])[..., 0]
    return (out * weights.reshape(-1, 1)).view(x.shape[0], 2, 32).sum(1)


def best_groups(_: Decoder, x: Rows) -> Rows:
    """A mask that is written in place, as routers do."""
    mask = torch.zeros_like(x).scatter_(1, x.topk(3, -1).indices, 1.0)
    return x * mask


def flat_experts(d: Decoder, x: Rows) -> Rows:
    weights, chosen = x.topk(2)
    rows = d.embed.weight[chosen.flatten() % 32] * weights.flatten()[:, None]
    return rows.view(x.shape[0], 2, 32).sum(1)


def ones(x: Rows) -> Rows:
    """`[n, n]`: 1 for each pair of a row and one before it."""
    places = torch.arange(x.shape[0])
    return (places[:, None] >= places[None]).float()


def place(x: Rows) -> Rows:
    """The place of each token, counted in a way in which rows meet."""
    return ones(x).long().sum(1) - 1


def in_place(d: Decoder, x: Rows) -> Rows:
    y = d.down(d.up(x))
    y[:, :4] = 0.5
    return y.mul_(2)


MOVED: dict[str, After] = {
    "an MLP": lambda d, x, at: mlp(d, x)[at],
    "two layers": lambda d, x, at: mlp(d, mlp(d, x))[at],
    "heads": lambda d, x, at: (
        x.view(-1, 4, 8).transpose(0, 1).tanh().transpose(0, 1).flatten(1)[at]
    ),
    "a batch": lambda d, x, at: mlp(d, x[None])[:, at][0],
    "experts": lambda d, x, at: experts(d, x)[at],
    "a mask written in place": lambda d, x, at: best_groups(d, mlp(d, x))[at],
    "values written in place": lambda d, x, at: in_place(d, x)[at],
    "selected before": lambda d, x, at: mlp(d, x[at]),
    "taken twice": lambda d, x, at: (lambda y: y[at] + y[at] * 2)(mlp(d, x)),
    "a view by the number of tokens": lambda d, x, at: (
        d.up(x).view(x.shape[0], 3, 16).sum(1)[at].repeat(1, 2)
    ),
    "flat experts": lambda d, x, at: flat_experts(d, mlp(d, x))[at],
    "heads first": lambda d, x, at: (
        x.view(-1, 4, 8)
        .transpose(0, 1)
        .tanh()[:, at]
        .view(-1, 8)
        .view(4, -1, 8)
        .sum(0)
        .repeat(1, 4)
    ),
    "expanded rows behind a view": lambda d, x, at: (
        x.tanh()[:, None].expand(-1, 4, 32)[at].view(-1, 128).view(-1, 4, 32).sum(1)
    ),
    "places in a request": lambda d, x, at: (mlp(d, x) + 3 * d.table[place(x)])[at],
    "places that are summed": lambda d, x, at: (mlp(d, x) + ones(x) @ torch.ones_like(x))[at],
    "places that are sorted": lambda d, x, at: (
        mlp(d, x) + torch.arange(x.shape[0]).sort(descending=True)[1][:, None]
    )[at],
    "places that share a softmax": lambda d, x, at: (mlp(d, x) * torch.ones_like(x).softmax(0))[at],
    "places that are added": lambda d, x, at: (mlp(d, x) + d.table[torch.arange(x.shape[0])])[at],
    "places that are counted": lambda d, x, at: (
        mlp(d, x)[at] * (torch.arange(x.shape[0])[:, None] * mlp(d, x))[at]
    ),
    "places of ones": lambda d, x, at: (mlp(d, x) * torch.ones_like(x).cumsum(0))[at],
}
"""Each row of the result is a function of its own row, and of that row's place."""

STAYS: dict[str, After] = {
    "one row or more": lambda d, x, at: mlp(d, x)[:, None].squeeze()[at],
    "a slice that is all": lambda d, x, at: torch.slice_scatter(mlp(d, x), x.tanh())[at],
    "rows found by their number": lambda d, x, at: mlp(d, x)[torch.arange(x.shape[0])][at],
    "a row set by its number": lambda d, x, at: x.tanh().select_scatter(d.table[0], 0, 0)[at],
    "a row put first": lambda d, x, at: torch.cat([d.table[:1], mlp(d, x)[1:]])[at],
    "the number of tokens": lambda d, x, at: (x * x.shape[0])[at],
    "other rows too": lambda d, x, at: (lambda y: y[at] + 0 * y.sum())(mlp(d, x)),
    "other indices": lambda d, x, at: mlp(d, x)[at + 0],
}


def exported(after: After) -> ExportedProgram:
    model = Model(Decoder(after), "Decoder", (), 32, 64, "float32")
    return without_writes(export(model, SIGNATURE, return_buffers=False))


def logits(program: ExportedProgram, signature: GraphSignature, asked: list[int]) -> Rows:
    given = step(signature, "float32", LENGTHS)
    given[0] %= 32
    given[2] = torch.tensor(asked, dtype=torch.int32)
    with torch.no_grad():
        found: Rows = program.module(check_guards=False)(*given)[0]
    return found


def all_logits(program: ExportedProgram, signature: GraphSignature) -> list[Rows]:
    return [logits(program, signature, asked) for asked in ASKED]


def rows_behind_attention(program: ExportedProgram) -> set[str]:
    """The extents of rows that products behind the last cache op have."""
    nodes = list(program.graph.nodes)
    last = max(at for at, node in enumerate(nodes) if "kvgraph" in str(node.target))
    products = [node for node in nodes[last:] if node.target is aten.linear.default]
    return {str(node.meta["val"].shape[-2]) for node in products}


@pytest.mark.parametrize("name", MOVED)
def test_runs_over_fewer_rows(name: str) -> None:
    program = exported(MOVED[name])
    require_tokens_apart(program, SIGNATURE) if "places" not in name else None
    before = all_logits(program, SIGNATURE)
    report = select_rows_early(program, SIGNATURE)
    assert report.applied > 0
    assert report.unmatched == []
    asked = next(n for n in program.graph.nodes if n.name == program.graph_signature.user_inputs[2])
    assert rows_behind_attention(program) <= {str(asked.meta["val"].shape[0])}
    for found, expected in zip(all_logits(program, SIGNATURE), before, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", STAYS)
def test_stays(name: str) -> None:
    program = exported(STAYS[name])
    before, text = all_logits(program, SIGNATURE), str(program.graph)
    report = select_rows_early(program, SIGNATURE)
    assert report.applied == 0
    assert str(program.graph) == text
    for found, expected in zip(all_logits(program, SIGNATURE), before, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_result_that_is_the_selection_itself_keeps_its_name() -> None:
    class Bare(Decoder):
        def forward(self, *given: Any) -> Rows:
            tokens, offsets, at, pool, lengths, table, most = given
            x = self.embed(tokens)
            q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
            ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
            out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
            return out.reshape(x.shape[0], -1).tanh()[at.long()]

    model = Model(Bare(lambda d, x, at: x), "Bare", (), 32, 64, "float32")
    program = export(model, SIGNATURE, return_buffers=False)
    before = all_logits(program, SIGNATURE)
    assert select_rows_early(program, SIGNATURE).applied == 2
    for found, expected in zip(all_logits(program, SIGNATURE), before, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fails", [True, False])
def test_an_operator_that_cannot_run_changes_nothing(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails over fewer rows, or it returns another number of them."""

    def call(node: Any, operand: Any) -> object:
        if node.target is not aten.tanh.default or operand is early.noted:
            return run(node, operand)
        if fails:
            raise RuntimeError("no kernel\nand more lines")
        return node.meta["val"]

    run = early._call
    monkeypatch.setattr(early, "_call", call)
    program = exported(lambda d, x, at: mlp(d, x.tanh())[at])
    text = str(program.graph)
    report = select_rows_early(program, SIGNATURE)
    (why,) = report.unmatched
    assert why.startswith("tanh: no kernel" if fails else "tanh: expected rows of ['s")
    assert "\n" not in why
    assert report.applied == 0
    assert str(program.graph) == text


def test_an_operator_with_an_extent_that_cannot_run_is_named() -> None:
    """Over all rows it runs, with the extent that it had."""

    def rows(d: Any, x: Any, at: Any) -> Any:
        y = x.view(-1, 4, 8).transpose(0, 1)
        return y.transpose(0, 1).view(x.shape[0], 32).tanh()[at] + 0 * y.sum()

    report = select_rows_early(exported(rows), SIGNATURE)
    assert (report.applied, len(report.unmatched)) == (0, 1), report.unmatched


def test_an_operator_that_cannot_run_at_all_stops_the_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under the tracing mode of another thread: that is no reason of the model's."""

    def call(node: Any, operand: Any) -> object:
        if node.target is aten.tanh.default:
            raise RuntimeError("s0 is not tracked with proxy")
        return run(node, operand)

    run = early._call
    monkeypatch.setattr(early, "_call", call)
    program = exported(lambda d, x, at: mlp(d, x.tanh())[at])
    with pytest.raises(UnsupportedError, match=r"early: tanh: .* got s0 is not tracked with proxy"):
        select_rows_early(program, SIGNATURE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decoders(name: str, tmp_path: Path) -> None:
    options = LATENT | EXPERTS if name == "deepseek_v3" else {}
    program, signature = program_of(make_model(name, tmp_path / name, **options), "float32")
    before = all_logits(program, signature)
    report = select_rows_early(program, signature)
    assert report.unmatched == []
    assert report.applied > 10
    assert len(rows_behind_attention(program)) == 1
    for found, expected in zip(all_logits(program, signature), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
