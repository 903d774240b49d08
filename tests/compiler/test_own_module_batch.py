"""A module of a user's own in a larger batch: its rows must not depend on the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import kvgraph
from kvgraph import ops
from kvgraph.compiler.check.rows import chunk_of, rows_of
from kvgraph.compiler.passes import PassReport, fold_constants
from kvgraph.ops import torch_ops
from tests.compiler.test_own_module import PARAMS, VOCAB, Decoder, compile_module


class OfSizes(Decoder):
    """Its logits depend on numbers of the batch."""

    def __init__(self, number: str) -> None:
        super().__init__()
        self.number = number

    def forward(self, *inputs: Any) -> torch.Tensor:
        tokens, offsets, _, _, lengths, _, most = inputs
        found = {
            "rows": torch.full((), lengths.shape[0]) > 6,
            "tokens": torch.full((), tokens.shape[0]) > 100,
            "offsets": offsets[-1] > 100,
            "lengths": lengths[0] > 100,
            "longest": most[0, 1] > 100,
        }[self.number]
        logits = super().forward(*inputs)
        return logits * torch.where(found, torch.linspace(-1, 1, VOCAB), torch.ones(VOCAB))


NUMBERS = ["rows", "tokens", "offsets", "lengths", "longest"]


@pytest.mark.parametrize(
    ("number", "backend"), [*((number, "onnx") for number in NUMBERS), ("rows", "torch")]
)
def test_what_depends_on_the_batch_is_refused(number: str, backend: str, tmp_path: Path) -> None:
    with pytest.raises(kvgraph.CheckError, match="logits in a batch of 9 that they have in one of"):
        compile_module(OfSizes(number), tmp_path / "out", backend=backend, max_seq_len=512)
    assert not (tmp_path / "out").exists()


class OfLogits(Decoder):
    """Its activations depend on how many logits a step asks for."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use

    def forward(self, *inputs: Any) -> torch.Tensor:
        tokens, offsets, at, _, lengths, *_ = inputs
        count, asked = tokens.shape[0], at.shape[0]
        if self.use == "rows":
            places = torch.arange(count)
            rows = (places[:, None] >= offsets[None, :asked]).sum(1) - 1
            position = places - offsets[rows] + lengths[rows]
            factor = torch.cos(position[at.long()][:, None] * torch.linspace(0, 1, VOCAB))
        else:
            factor = asked / count if self.use == "share" else 1 / (count - asked + 1)
        return super().forward(*inputs) * factor


@pytest.mark.parametrize("use", ["share", "rest", "rows"])
def test_what_depends_on_the_number_of_logits_is_refused(use: str, tmp_path: Path) -> None:
    """An engine asks for the last tokens' logits, and for none in the middle of a prompt."""
    said = "where a step asks for last tokens alone that they have where it asks for all tokens"
    with pytest.raises(kvgraph.CheckError, match=said):
        compile_module(OfLogits(use), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Slightly(Decoder):
    """What it computes with the batch is less than weights or pools of few bits explain."""

    def __init__(self, number: str) -> None:
        super().__init__()
        self.number = number

    def forward(self, *inputs: Any) -> torch.Tensor:
        tokens, offsets, _, _, lengths, _, _ = inputs
        ends = (torch.arange(tokens.shape[0])[:, None] == offsets[None, 1:] - 1).any(1)
        found = {
            "rows": torch.full((), lengths.shape[0]) > 6,
            "lengths": lengths.float().mean() > 0,
            "ends": ends[inputs[2].long()][:, None],
        }[self.number]
        return super().forward(*inputs) * torch.where(found, torch.linspace(0.9, 1.1, VOCAB), 1.0)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    ("number", "where"),
    [
        ("rows", "in a batch of 9 that they have in one of 2"),
        ("lengths", "in chunks next to another row that they have alone"),
        ("ends", "in chunks next to another row that they have alone"),
    ],
)
def test_rounded_weights_hide_nothing(
    number: str, where: str, weights: str, tmp_path: Path
) -> None:
    with pytest.raises(kvgraph.CheckError, match=f"have the logits {where}, got others"):
        compile_module(Slightly(number), tmp_path / "out", weights=weights)
    assert not (tmp_path / "out").exists()
    assert compile_module(Decoder(), tmp_path / "out", weights=weights)


def test_rounded_weights_hide_no_pass_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = fold_constants.fold_constants

    def spoiled(program: ExportedProgram) -> PassReport:
        for node in program.graph.nodes:
            if node.target is torch_ops.paged_attention.default:
                node.update_kwarg("scale", 1.1 * node.kwargs["scale"])
        return fold(program)

    monkeypatch.setattr(fold_constants, "fold_constants", spoiled)
    with pytest.raises(
        kvgraph.CheckError, match=r"own forward pass within 0\.001 .* in its program"
    ):
        compile_module(Decoder(), tmp_path / "out", weights="int8")


class Prefilling(Decoder):
    """Asks whether its step has more than one token, or more than one row."""

    def __init__(self, question: str, *, is_equal: bool = False) -> None:
        super().__init__()
        self.question, self.is_equal = question, is_equal

    def forward(self, *inputs: Any) -> torch.Tensor:
        tokens, _, _, _, lengths, _, _ = inputs
        asked = {
            "more tokens": lambda: tokens.shape[0] > 1,
            "one token": lambda: tokens.shape[0] == 1,
            "one row": lambda: lengths.shape[0] == 1,
            "a token of each row": lambda: lengths.shape[0] == tokens.shape[0],
        }[self.question]
        logits = super().forward(*inputs)
        if asked():
            return logits + 0.0 if self.is_equal else logits * torch.linspace(-1, 1, VOCAB)
        return logits


class Mixed(Decoder):
    """A part computes in fewer bits than the module's first parameter has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (
            nn.Linear(*sizes).bfloat16() for sizes in ((VOCAB, 256), (256, VOCAB))
        )

    def forward(self, *inputs: Any) -> torch.Tensor:
        x = self.up(super().forward(*inputs).bfloat16())
        logits: torch.Tensor = self.down(nn.functional.silu(x) * x.cos() * x.sin())
        return logits.float()


def test_activations_of_two_dtypes(tmp_path: Path) -> None:
    """The check's limit is that of the coarser one."""
    assert compile_module(Mixed(), tmp_path / "out", backend="torch")


@pytest.mark.parametrize("check", [False, True])
def test_a_part_in_bfloat16_that_onnxruntime_has_no_kernel_for(tmp_path: Path, check: bool) -> None:
    said = (
        r"linear in up \(Linear\).*: expected float32 for backend onnx on cpu, got an operator on"
    )
    with pytest.raises(kvgraph.UnsupportedError, match=said):
        compile_module(Mixed(), tmp_path / "out", check=check)


class Halved(Decoder):
    """Numbers are rounded to bfloat16, moved and read again: nothing computes in it."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        x = super().forward(*inputs).bfloat16()
        return torch.cat([x[:, 1:], x[:, :1]], -1).flatten(1).float()


def test_numbers_that_are_kept_in_bfloat16(tmp_path: Path) -> None:
    assert compile_module(Halved(), tmp_path / "out")


class Recurrent(Decoder):
    """Torch makes a loop of it, over as many tokens as the trace has."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(VOCAB, VOCAB)

    def forward(self, *inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.gru(super().forward(*inputs))[0]
        return logits


def test_a_size_that_becomes_a_number_is_named(tmp_path: Path) -> None:
    expected = r"dynamic rows and tokens: it is made for num_logits = \d+ alone, at .*self\.gru\("
    with pytest.raises(kvgraph.UnsupportedError, match=expected):
        compile_module(Recurrent(), tmp_path / "out")


QUESTIONS = ["more tokens", "one token", "one row", "a token of each row"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_branch_on_the_size_of_a_step_is_refused(question: str, tmp_path: Path) -> None:
    """A trace takes one branch, which steps of one token would get too."""
    sentence = "it does not do for one token of one row what it does for more"
    with pytest.raises(kvgraph.UnsupportedError, match=sentence):
        compile_module(Prefilling(question), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("question", QUESTIONS)
def test_branches_that_compute_the_same_are_taken(question: str, tmp_path: Path) -> None:
    assert compile_module(Prefilling(question, is_equal=True), tmp_path / "out")


def test_pages_that_are_larger_than_a_pool_of_an_engine(tmp_path: Path) -> None:
    """The check's rows need ten; an engine of its own accord has 1 GiB."""
    params = kvgraph.KVCacheParams("float32", 32, 128, num_layers=32)
    assert 10 * params.bytes_per_page > 1 << 30
    assert compile_module(Wide(), tmp_path / "out", params=params, max_seq_len=512)


class Wide(Decoder):
    """Layer 0 of many."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 3 * 4096)

    def forward(self, tokens: Any, offsets: Any, rows: Any, pool: Any, *index: Any) -> torch.Tensor:
        lengths, table, most = index
        x = self.embed(tokens)
        q, k, v = self.wide(x).view(x.shape[0], -1, 128).split((32, 32, 32), dim=1)
        for layer in range(32):
            ops.store_kv(pool, k, v, offsets, lengths, table, layer=layer)
            out = ops.paged_attention(
                q, pool, offsets, lengths, table, most, layer=layer, scale=0.1
            )
        x = x + out.reshape(x.shape[0], 128, 32).mean(1)
        return x[rows.long()] @ self.embed.weight.T


class Slots(Decoder):
    def forward(self, *inputs: Any) -> torch.Tensor:
        *given, table, most = inputs
        return super().forward(*given, table.unsqueeze(1), most)


def test_a_continuous_cache(tmp_path: Path) -> None:
    params = replace(PARAMS, cache_strategy=kvgraph.KVCacheStrategy.CONTINUOUS)
    assert compile_module(Slots(), tmp_path / "out", params=params)


@pytest.mark.parametrize("longest", [1, 2, 30])
def test_short_contexts_are_checked_too(longest: int, tmp_path: Path) -> None:
    manifest = compile_module(Decoder(), tmp_path / "out", max_seq_len=longest)
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")


@pytest.mark.parametrize("longest", [1, 2, 3, 20, 31, 64, 4096])
def test_the_last_step_of_a_check_has_one_token(longest: int) -> None:
    model: Any = SimpleNamespace(max_seq_len=longest, vocab_size=9)
    rows = rows_of(model)
    chunk = chunk_of(rows)
    left = [len(row) - (len(rows[0]) - 1) // chunk * chunk for row in rows]
    assert max(map(len, rows)) <= longest
    assert left[0] == 1
    assert longest < 3 or left[1] <= 0


class Repeated(Decoder):
    """Finds each token's row by an operator that the ONNX exporter lacks."""

    def forward(self, tokens: Any, offsets: Any, *rest: Any) -> torch.Tensor:
        lengths = offsets[1:] - offsets[:-1]
        rows = torch.repeat_interleave(lengths, lengths, output_size=tokens.shape[0])
        return super().forward(tokens + 0 * rows, offsets, *rest)


def test_an_operator_that_onnx_lacks(tmp_path: Path) -> None:
    message = "exporter has, got one that it has not: .*repeat_interl.*; write it with other oper"
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        compile_module(Repeated(), tmp_path / "out")
