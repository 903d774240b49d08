"""Rotary embeddings go into update_and_attend: equal logits and caches, nothing left, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.fuse_rope import CHECK, TABLE_BYTES, fuse_rope
from kvgraph.compiler.passes.fuse_update_and_attend import FUSED, arguments
from kvgraph.contract.signature import GraphSignature
from kvgraph.ops import UPDATE_AND_ATTEND
from kvgraph.ops._update_and_attend import rotate
from tests.support.models import layers, make_model
from tests.support.programs import (
    HEAD,
    HEADS,
    STEPS,
    OneLayer,
    compare,
    logits,
    own_program,
    program_of,
    step,
)

POSITIONS = 512

HALVES, INTERLEAVED = 0, 1
# Per architecture: tables, rotary_dim, style, what its configuration adds.
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama": (1, 16, HALVES, {}),
    "qwen2": (1, 16, HALVES, {}),
    "qwen3": (1, 16, HALVES, {}),  # norms of q and k before the rotation
    "mistral": (1, 16, HALVES, {}),
    "gemma2": (1, 16, HALVES, {}),
    "gemma3_text": (2, 16, HALVES, {}),
    # yarn: cosines and sines times a factor. A token takes all experts: where rounding makes a
    # router choose another one, all of the token changes, and errors say nothing of the rotation.
    "gpt_oss": (1, 16, HALVES, {"num_experts_per_tok": 4}),
    "phi": (1, 8, HALVES, {"partial_rotary_factor": 0.5}),
    "phi3": (1, 16, HALVES, {}),  # q, k and v are parts of one projection
    "glm": (1, 8, INTERLEAVED, {"partial_rotary_factor": 0.5}),
    "cohere": (1, 16, INTERLEAVED, {}),  # rotated in float32
}
ROTARY = [f"aten.{name}" for name in ("cos", "sin", "neg", "arange", "ge", "bucketize")]


def fuse(program: ExportedProgram, signature: GraphSignature) -> PassReport:
    report = fuse_rope(program, signature, POSITIONS)
    program.graph.lint()
    program.graph_module.recompile()
    return report


def tables(program: ExportedProgram) -> list[torch.Tensor]:
    return [t for name, t in program.state_dict.items() if name.startswith("kvgraph.cos_sin_")]


def calls(program: ExportedProgram) -> Counter[str]:
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    return Counter(str(getattr(n.target, "overloadpacket", n.target)) for n in nodes)


def unused(program: ExportedProgram) -> list[str]:
    """Calls whose results only torch.export's own checks read."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and n.target is not CHECK]
    return [n.name for n in nodes if all(user.target is CHECK for user in n.users)]


@pytest.mark.parametrize("name", CASES)
def test_decoders(name: str, tmp_path: Path) -> None:
    count, rotary, style, settings = CASES[name]
    folder = make_model(name, tmp_path / name, **settings)
    plain, fused = {}, {}
    for dtype in ("float32", "bfloat16"):
        program, signature = program_of(folder, dtype)
        plain[dtype], before = program.module(), calls(program)
        report = fuse(program, signature)
        fused[dtype] = program.module()
        assert (report.applied, report.unmatched) == (layers(name), [])
        assert [tuple(t.shape) for t in tables(program)] == [(POSITIONS, rotary)] * count
        nodes = [n for n in program.graph.nodes if n.target is FUSED]
        given = [arguments(UPDATE_AND_ATTEND, node) for node in nodes]
        assert [g["rope_style"] for g in given] == [style] * layers(name)
        assert len({g["cos_sin"] for g in given}) == count
        found = calls(program)
        assert not [op for op in ROTARY if op in found], found
        assert unused(program) == []
        # Two products and a sum of each of q and k are the least that a rotation takes.
        assert sum(before.values()) - sum(found.values()) >= 2 * 3 * layers(name)
    compare(plain, fused, signature)


def test_the_table_is_the_model_s_own(tmp_path: Path) -> None:
    """Cosines of the pairs, then their sines, times the factor of a scaled embedding."""
    from transformers import AutoModelForCausalLM

    folder = make_model("gpt_oss", tmp_path / "gpt_oss")
    program, signature = program_of(folder, "bfloat16")
    fuse(program, signature)
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(POSITIONS)[None])
    assert float(cos.max()) > 1.05
    assert torch.equal(tables(program)[0], torch.cat([cos[0], sin[0]], -1))


def test_the_same_table_without_the_weights(tmp_path: Path) -> None:
    folder = make_model("gemma3_text", tmp_path / "gemma3")
    loaded, signature = program_of(folder, "bfloat16")
    weightless, _ = program_of(folder, "bfloat16", weightless=True)
    for program in (loaded, weightless):
        assert fuse(program, signature).applied == layers("gemma3_text")
    first, second = tables(loaded), tables(weightless)
    assert not torch.equal(first[0], first[1])  # of windows, and of the whole context
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert str(loaded.graph) == str(weightless.graph)


def test_layers_without_an_embedding_are_named(tmp_path: Path) -> None:
    folder = make_model("smollm3", tmp_path / "smollm3", num_hidden_layers=4)
    program, signature = program_of(folder, "float32")
    report = fuse(program, signature)
    assert report.applied == 3
    assert report.unmatched == [
        "update_and_attend_default_3: q: expected a rotation by the cos and sin of positions, got "
        "aten.linear.default"
    ]


# ---- a module of one's own ----------------------------------------------------------------------


class Own(OneLayer):
    """Written in another way than transformers': pairs of neighbours, heads last."""

    def rows(self, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(index, offsets[1:], right=True)

    def positions(self, index: torch.Tensor, starts: torch.Tensor, past: torch.Tensor) -> Any:
        return past + (index - starts)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rates = 100.0 ** -(torch.arange(0, HEAD, 2) / HEAD)
        angles = 0.5 * positions[:, None] @ rates[None]
        return angles.cos(), angles.sin()

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)

    def turn(self, q: Any, k: Any, positions: Any) -> Any:
        cos, sin = self.cos_sin(positions)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)

    def prepared(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: Any, lengths: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers = torch.arange(q.shape[0])
        row = self.rows(numbers, offsets)
        q, k = self.turn(q, k, self.positions(numbers, offsets[row], lengths[row]))
        return q, k, v


class Halves(Own):
    """Heads before tokens, the whole head at once."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x, cos, sin = x.transpose(0, 1), cos.type_as(x), sin.type_as(x)
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return (x * cos.repeat(1, 2) + turned * sin.repeat(1, 2)).permute(1, 0, 2)


class Backwards(Own):
    """Each of q and k with cosines, and sines of the opposite sign, of its own."""

    def turn(self, q: Any, k: Any, positions: Any) -> Any:
        (cos, sin), (cos_k, sin_k) = self.cos_sin(positions), self.cos_sin(positions)
        return self.rotate(q, cos, -sin), self.rotate(k, cos_k, -sin_k)


@pytest.mark.parametrize(
    ("module", "style"),
    [(Own, INTERLEAVED), (Halves, HALVES), (Backwards, INTERLEAVED)],
)
def test_another_spelling(module: Any, style: int) -> None:
    plain, signature = own_program(module())
    fused, _ = own_program(module())
    assert fuse(fused, signature) == PassReport("fuse_rope", 1)
    (node,) = [n for n in fused.graph.nodes if n.target is FUSED]
    assert arguments(UPDATE_AND_ATTEND, node)["rope_style"] == style
    assert not [op for op in ROTARY if op in calls(fused)]
    for lengths in STEPS:
        first, second = (step(signature, "float32", lengths) for _ in range(2))
        for inputs in (first, second):
            inputs[4] += 7  # rows with tokens in the cache
            inputs[3].zero_()
        got = logits(fused.module(), second)
        torch.testing.assert_close(got, logits(plain.module(), first), rtol=0, atol=1e-5)
    x = np.random.default_rng(0).standard_normal((5, HEADS, HEAD), np.float32)
    at = torch.tensor([0, 3, 4, 100, POSITIONS - 1])
    expected, _ = module().turn(torch.from_numpy(x), torch.from_numpy(x), at)
    turned = rotate(x, tables(fused)[0].numpy(), at.numpy(), style)
    np.testing.assert_allclose(turned, expected, rtol=0, atol=1e-5)


class TwoTables(Own):
    def turn(self, q: Any, k: Any, positions: Any) -> Any:
        other = self.cos_sin(positions * 2)
        return self.rotate(q, *self.cos_sin(positions)), self.rotate(k, *other)


class OnlyQ(Own):
    def turn(self, q: Any, k: Any, positions: Any) -> Any:
        return self.rotate(q, *self.cos_sin(positions)), k


class Twice(Own):
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotate(super().rotate(x, cos, sin), cos, sin)


class Sheared(Own):
    """Both signs are those of a sum."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        swapped = torch.stack((x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
        cos, sin = (y.repeat_interleave(2, -1)[:, None] for y in (cos, sin))
        return x * cos + swapped * sin


class Mirrored(Own):
    """Element i turns with the one as far from the other end."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = torch.cat([x[..., i : i + 1] for i in reversed(range(HEAD))], -1)
        return x * cos.repeat(1, 2)[:, None] + turned * sin.repeat(1, 2)[:, None]


class LastHalf(Own):
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        still, part = x.chunk(2, -1)
        return torch.cat((still, super().rotate(part, cos[:, :2], sin[:, :2])), -1)


class OneHead(Own):
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.cat((super().rotate(x[:, :1], cos, sin), x[:, 1:]), 1)


class NextToken(Own):
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotate(x, torch.cat((cos[1:], cos[:1])), sin)


class Dynamic(Own):
    """Longer steps turn more slowly."""

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().cos_sin(positions / positions.max())


class LongSteps(Own):
    """The number of tokens decides, which no position says."""

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().cos_sin(positions / positions.shape[0])


class Learnt(Own):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.ones(1))

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().cos_sin(positions * self.rate)


class InStep(Own):
    """Positions in the step, not in the row."""

    def positions(self, index: torch.Tensor, starts: torch.Tensor, past: torch.Tensor) -> Any:
        return index


class Uncached(Own):
    def positions(self, index: torch.Tensor, starts: torch.Tensor, past: torch.Tensor) -> Any:
        return index - starts


class WrongRows(Own):
    def rows(self, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(index, offsets[1:-1], right=False)


class Normed(Own):
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(super().rotate(x, cos, sin), dim=-1)


OWN = "expected a function of each token's own position and of constants, got"
NONE = "q: expected a rotation by the cos and sin of positions, got"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (TwoTables, "one table for q and k, got cos_1 and sin_1 (style 1) for q, cos and sin (s"),
        (OnlyQ, "k: expected a rotation by the cos and sin of positions, got aten.linear.default"),
        (Twice, "q: expected one factor of each element, got a product of several"),
        (Sheared, "q: expected a turn in one direction"),
        (Mirrored, "q: expected pairs of halves or of neighbours, got others"),
        (LastHalf, "q: expected the first 4 elements of each head rotated, the others not"),
        (OneHead, "q: expected pairs of halves or of neighbours, got others"),
        (NextToken, "q: expected one row of factors for each token, equal for all heads"),
        (Dynamic, f"q: max_1: {OWN} aten.max.default"),
        (LongSteps, f"q: sym_size_int_2: {OWN} aten.sym_size.int"),
        (Learnt, f"q: p_rate: {OWN} the placeholder p_rate"),
        (InStep, f"q: arange: {OWN} aten.arange.default"),
        (Uncached, f"q: arange: {OWN} aten.arange.default"),
        (WrongRows, OWN),
        (Normed, f"{NONE} aten.div.Tensor"),
    ],
)
def test_what_the_kernel_does_not_compute_is_left_and_named(module: Any, why: str) -> None:
    program, signature = own_program(module())
    graph = str(program.graph)
    report = fuse(program, signature)
    assert report.applied == 0
    assert len(report.unmatched) == 1
    assert why in report.unmatched[0]
    assert (str(program.graph), tables(program)) == (graph, [])


def test_a_table_that_is_too_large_is_not_made() -> None:
    program, signature = own_program(Own())
    positions = TABLE_BYTES // (4 * HEAD) + 1
    report = fuse_rope(program, signature, positions)
    assert report.applied == 0
    assert report.unmatched == [
        f"update_and_attend_default: expected a table of at most {TABLE_BYTES} bytes, got "
        f"{TABLE_BYTES + 4 * HEAD} for {positions} positions of {HEAD} elements"
    ]
