"""Tokens that meet outside of the cache ops: found by following each operator, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kvgraph
from kvgraph import ops
from kvgraph.compiler.export import export
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.functional import without_writes
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes.labels import TOKENS, everything, join, nothing, own
from kvgraph.compiler.passes.require_tokens_apart import require_tokens_apart
from kvgraph.contract.signature import GraphSignature
from tests.support.models import make_model

PARAMS = kvgraph.KVCacheParams("float32", n_kv_heads=2, head_dim=8, num_layers=1, page_size=4)
SIGNATURE = GraphSignature.of(PARAMS.get_symbolic_inputs()[0], 32)
Step = Callable[..., Any]


class Decoder(nn.Module):
    """One layer; `before` and `after` are what a user puts around its attention."""

    def __init__(self, before: Step, after: Step = lambda _, x, at: x[at.long()]) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.embed = nn.Embedding(32, 32)
        self.qkv = nn.Linear(32, 64)
        self.register_buffer("state", torch.zeros(2, 32))

    def forward(self, tokens: Any, offsets: Any, at: Any, pool: Any, *index: Any) -> torch.Tensor:
        lengths, table, most = index
        x = self.before(self, self.embed(tokens))
        q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
        return self.after(self, x + out.reshape(x.shape[0], -1), at) @ self.embed.weight.T


def follow(before: Step, *after: Step) -> int:
    model = Model(Decoder(before, *after), "Decoder", (), 32, 64, "float32")
    program = export(model, SIGNATURE, return_buffers=False)
    return require_tokens_apart(program, SIGNATURE).applied


def follow_traced(before: Step) -> int:
    model = Model(Decoder(before), "Decoder", (), 32, 64, "float32")
    program = without_writes(export(model, SIGNATURE, return_buffers=False))
    return require_tokens_apart(program, SIGNATURE).applied


def experts(decoder: Decoder, x: torch.Tensor) -> torch.Tensor:
    """Each token's two best of four; their weights are gathered by what the router says."""
    weights, chosen = x[:, :4].softmax(-1).topk(2, -1)
    table = decoder.embed.weight.expand(4, 32, 32)
    rows = torch.arange(x.shape[0])[:, None].expand(-1, 2).reshape(-1)
    out = torch.bmm(table[chosen.reshape(-1)], x[rows][:, :, None])[..., 0]
    return (out * weights.reshape(-1, 1)).view(x.shape[0], 2, 32).sum(1)


def halves(_: Any, x: torch.Tensor) -> torch.Tensor:
    """A write in place into a part of a value that is read by another name later."""
    whole = x.clone()
    first, second = whole.chunk(2, -1)
    first.mul_(second)
    return torch.cat([second, whole[:, :16]], -1)


def set_where(_: Any, x: torch.Tensor) -> torch.Tensor:
    whole = x.clone()
    whole[whole > 0.3] = 0.1
    whole[x[:, 0] > 0.3] = 0.2
    return whole


def set_columns(_: Any, x: torch.Tensor) -> torch.Tensor:
    whole = x.clone()
    whole[:, torch.tensor([0, 3])] += x[:, :2]
    return whole


def written_over(_: Any, x: torch.Tensor) -> torch.Tensor:
    whole = x.clone()
    whole[:, -1] = 0.5
    return whole


def set_rows(_: Any, x: torch.Tensor) -> torch.Tensor:
    whole = x.clone()
    whole[torch.zeros(x.shape[0], dtype=torch.long)] = x
    return whole


def set_in_order(_: Any, x: torch.Tensor) -> torch.Tensor:
    """As many numbers as the mask has places: where each goes depends on all tokens before."""
    return x.index_put([x > 0.3], x.flatten()[: x.shape[0]])


APART: dict[str, Step] = {
    "norm": lambda d, x: functional.layer_norm(x, (32,)) * torch.rsqrt(x.pow(2).mean(-1, True)),
    "index of its own": lambda d, x: x + x[torch.arange(x.shape[0])],
    "heads and back": lambda d, x: (
        x.view(-1, 4, 8).transpose(0, 1).flip(-1).permute(1, 0, 2).flatten(1)
    ),
    "einsum": lambda d, x: torch.einsum("td,ed->te", x, d.embed.weight),
    "experts": experts,
    "router": lambda d, x: x * torch.zeros_like(x).scatter_(1, x.topk(4, -1).indices, 1.0),
    "write in place": lambda d, x: x.clone().mul_(2).clamp_(-1, 1),
    "write to a part": halves,
    "padding of features": lambda d, x: functional.pad(x[:, :24], (0, 8)),
    "mask of its own": set_where,
    "columns by index": set_columns,
    "complex": lambda d, x: torch.complex(x, x.cos()).abs() + torch.polar(x, x).abs(),
    "counts that are a tensor": lambda d, x: x.repeat_interleave(
        torch.ones(32).long(), 1, output_size=32
    ),
    "norm of groups": lambda d, x: functional.group_norm(x, 4).relu(),
    "softmax of features": lambda d, x: x.softmax(-1).cumsum(-1).sort(-1).values,
}

MIXED: dict[str, Step] = {
    "norm of groups over tokens": lambda d, x: functional.group_norm(x[None], 1)[0],
    "previous token": lambda d, x: x + torch.roll(x, 1, 0),
    "shifted": lambda d, x: torch.roll(x, 1, 0),
    "padded shift": lambda d, x: x + functional.pad(x, (0, 0, 1, 0))[:-1],
    "mean": lambda d, x: x - x.mean(0),
    "norm over tokens": lambda d, x: functional.layer_norm(x.T, (x.shape[0],)).T,
    "softmax over tokens": lambda d, x: x.softmax(0),
    "attention of its own": lambda d, x: (x @ x.T).softmax(-1) @ x,
    "einsum": lambda d, x: torch.einsum("ts,sd->td", torch.einsum("td,sd->ts", x, x), x),
    "constant product": lambda d, x: torch.ones(x.shape[0], x.shape[0]) @ x,
    "cumsum": lambda d, x: x.cumsum(0),
    "sort": lambda d, x: x.sort(0).values,
    "order by content": lambda d, x: x[x[:, 0].argsort()],
    "first token": lambda d, x: x + x[torch.zeros(x.shape[0], dtype=torch.long)],
    "largest of all": lambda d, x: x / x.abs().max(),
    "convolution": lambda d, x: (
        functional.conv1d(x.T[None], torch.ones(32, 1, 3), padding=1, groups=32)[0].T
    ),
    "merged and summed": lambda d, x: x.reshape(-1, 2).cumsum(0).reshape(-1, 32),
    "scattered": lambda d, x: x + torch.zeros_like(x).scatter_add(0, x.argsort(0), x),
    "rows by index": set_rows,
    "numbers by a mask": set_in_order,
    "flipped": lambda d, x: x.flip(0),
    "weight over tokens": lambda d, x: functional.layer_norm(x, (32,), x.mean(0)),
    "bias over tokens": lambda d, x: functional.layer_norm(x, (32,), None, x.mean(0)),
    "native norm": lambda d, x: torch.native_layer_norm(x, [32], x.mean(0), None, 1e-5)[0],
    "rms weight over tokens": lambda d, x: functional.rms_norm(x, (32,), x.mean(0)),
    "group weight over tokens": lambda d, x: functional.group_norm(x, 4, x.mean(0)),
    "number of some": lambda d, x: x * torch.nonzero(x[:, 0] > 0).shape[0],
    "ones of some": lambda d, x: x * torch.ones_like(x[x > 0]).sum(),
}


@pytest.mark.parametrize("name", APART)
def test_tokens_that_stay_apart(name: str) -> None:
    assert follow(APART[name]) == 3, "a store, an attention and the logits"


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_tokens_that_are_mixed(name: str, is_traced: bool) -> None:
    """`is_traced`: without in-place writes, as a compile follows it."""
    with pytest.raises(
        kvgraph.UnsupportedError, match=r"k of store_kv in layer 0 to depend on its"
    ):
        (follow_traced if is_traced else follow)(MIXED[name])


def by_index(count: int) -> Step:
    def shifted(_: Any, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[0])
        return x[torch.where(at >= count, at - count, at)]

    return shifted


SHIFTS: dict[str, Callable[[int], Step]] = {
    "pad": lambda n: lambda d, x: functional.pad(x, (0, 0, n, 0))[: x.shape[0]],
    "pad behind": lambda n: lambda d, x: functional.pad(x, (0, 0, 0, n))[n:],
    "concatenation": lambda n: lambda d, x: torch.cat([torch.zeros(n, 32), x])[: x.shape[0]],
    "roll": lambda n: lambda d, x: torch.roll(x, n, 0),
    "index": by_index,
    "remainder": lambda n: lambda d, x: x[torch.arange(x.shape[0]) % n],
    "least": lambda n: lambda d, x: x[(torch.arange(x.shape[0]) - n).clamp(min=0)],
}


@pytest.mark.parametrize("count", [3, 8, 400, 2048])
@pytest.mark.parametrize("shift", SHIFTS)
def test_a_shift_of_any_length(shift: str, count: int) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match=r"got other tokens through"):
        follow(SHIFTS[shift](count))


def pad(x: torch.Tensor, count: int) -> torch.Tensor:
    return functional.pad(x, (0, 0, count, 0))[: x.shape[0]]


def behind(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([torch.zeros(count, 32), x])[: x.shape[0]]


def flat(x: torch.Tensor, count: int) -> torch.Tensor:
    moved = functional.pad(x.reshape(-1), (32 * count, 0))
    return moved[: x.shape[0] * 32].view(-1, 32)


def where(x: torch.Tensor, moves: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    at = torch.arange(x.shape[0])
    return x[torch.where(moves(at), at - 1, at)]


HIDDEN_SHIFTS: dict[str, Step] = {
    "two": lambda d, x: x + pad(pad(x, 800), 800),
    "two of other lengths": lambda d, x: x + pad(pad(x, 400), 5000),
    "three by one": lambda d, x: x + pad(pad(pad(x, 1), 1), 1),
    "two joined": lambda d, x: x + behind(behind(x, 400), 400),
    "as many as a short step": lambda d, x: x + x.roll(1, 0).roll(2, 0),
    "flat": lambda d, x: x + flat(x, 400),
    "flat and far": lambda d, x: x + flat(x, 20_000),
    "far": lambda d, x: x + pad(x, 20_000),
    "far in parts": lambda d, x: torch.cat([x[:, 16:], pad(pad(x, 6000), 6000)[:, :16]], -1),
    "far index": lambda d, x: functional.pad(x, (0, 0, 0, 12_000))[
        torch.arange(x.shape[0]) + 6000 + 6000
    ],
    "rest of the step": lambda d, x: x.roll(x.shape[0] % 3, 0),
    "behind the short step": lambda d, x: x.roll(x.shape[0] - 3, 0),
    "quotients": lambda d, x: where(x, lambda at: at // 50 // 50 > 0),
    "squares": lambda d, x: where(x, lambda at: at**2 > 10**6),
    "from a far place on": lambda d, x: where(x, lambda at: at >= 20_000),
    "behind a table": lambda d, x: (
        x + torch.arange(600.0)[torch.arange(x.shape[0]) ^ 512][:, None] + pad(pad(x, 800), 800)
    ),
}


@pytest.mark.parametrize("name", HIDDEN_SHIFTS)
def test_shifts_that_no_number_of_the_program_tells(name: str) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match=r"got other tokens through"):
        follow(HIDDEN_SHIFTS[name])


def test_a_constant_part_that_is_taken_back() -> None:
    """Along a dim that does not grow, a part without tokens is no shift."""
    assert follow(lambda d, x: x + torch.stack([x, torch.zeros_like(x)], -1)[..., 1]) == 3
    assert follow_traced(written_over) == 3


def test_numbers_that_move_no_token() -> None:
    """Sizes of features, and a table of positions that ends: longer steps have no place in it."""
    table = torch.arange(600.0)
    assert follow(lambda d, x: x + table[torch.arange(x.shape[0]) ^ 512][:, None]) == 3
    assert follow(lambda d, x: torch.cat([x[:, 20:], x[:, :20]], -1)) == 3


def test_an_operator_that_is_not_known_is_said_to_be() -> None:
    said = "not known to keep tokens apart: convolution in the module.*; write it with other"
    with pytest.raises(kvgraph.UnsupportedError, match=said):
        follow(MIXED["convolution"])


def test_an_index_that_no_step_of_three_tokens_has() -> None:
    table = torch.arange(64)
    assert follow(lambda d, x: x + table.to(x)[torch.arange(x.shape[0]) ^ 4][:, None]) == 3


@pytest.mark.parametrize(
    "after",
    [
        lambda _, x, at: torch.roll(x, 1, 0)[at.long()],
        lambda _, x, at: x[(at.long() - 1).clamp(min=0)],
        lambda _, x, at: x[at.long()] + x.amax(0),
        lambda _, x, at: x[torch.arange(at.shape[0])],
    ],
)
def test_logits_of_other_tokens(after: Step) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match="each row of logits to depend on its own"):
        follow(lambda _, x: x, after)


@pytest.mark.parametrize(
    "keep",
    [
        lambda d, x: (d.state[0].copy_(x[0]), x)[1],
        lambda d, x: (d.state.copy_(x.sum(0).expand(2, 32)), x)[1],
    ],
)
def test_tokens_kept_for_the_next_step(keep: Step) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match="state, which the next step reads, to depe"):
        follow(keep)


def test_labels_of_a_value_of_any_size() -> None:
    """A model's widths cost nothing: these could not be looked at element by element."""
    wide = [TOKENS, 1 << 30, 1 << 30]
    tokens = own(wide)
    assert not tokens.is_mixed
    assert not tokens.is_empty
    assert nothing(wide).is_empty
    assert everything(wide).is_mixed
    assert not nothing([0, 1 << 30]).is_mixed
    by_token = tokens.joined([1, 2])
    assert by_token.low.flatten().tolist() == by_token.high.flatten().tolist() == [0, 1, 2]
    over_tokens = tokens.joined([0]).compact()
    assert [list(x.shape) for x in over_tokens] == [[1, *wide[1:]]] * 2
    assert [int(x[0, 0, 0]) for x in over_tokens] == [0, TOKENS - 1]
    assert [int(x) for x in join([tokens.whole(), nothing(())])] == [0, TOKENS - 1]


def test_operator_module_and_line_are_named(tmp_path: Path) -> None:
    with pytest.raises(kvgraph.UnsupportedError) as refused:
        kvgraph.compile(
            Decoder(lambda _, x: x + torch.roll(x, 1, 0)),
            tmp_path / "out",
            params=PARAMS,
            vocab_size=32,
            max_seq_len=64,
        )
    assert str(refused.value).startswith(
        "tokens: expected k of store_kv in layer 0 to depend on its own token alone, got other "
        f"tokens through index_select in the module (Decoder) at {__file__}:"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cache", ["paged", "continuous", "padded"])
def test_llama_whose_attention_adds_the_previous_token(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def leaky(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed = hidden_states + torch.roll(hidden_states, 1, 1)
        return forward(self, mixed, *args, **kwargs)

    folder = make_model("llama", tmp_path / "model", num_hidden_layers=1)
    huggingface.load(folder, "float32")
    monkeypatch.setattr(LlamaAttention, "forward", leaky)
    with pytest.raises(
        kvgraph.UnsupportedError, match=r"index_select in .*layers\.0\.self_attn \(LlamaAtt"
    ):
        kvgraph.compile(folder, tmp_path / "out", cache=cache)
    assert not (tmp_path / "out").exists()
