"""Values that move before a rotary embedding: views are looked at as the model writes them."""

from __future__ import annotations

import pytest
import torch

from tests.compiler.test_fuse_rope import Own, fuse
from tests.support.programs import logits, own_program, step


class Merged(Own):
    """A view that takes how a permuted value lies: its heads and their elements are one dim."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1) * 1.5
        return super().rotate(y.transpose(0, 1).view(x.shape[0], -1).view(x.shape), cos, sin)


def test_a_view_of_what_does_not_lie_in_order() -> None:
    program, signature = own_program(Merged())
    expected = logits(program.module(), step(signature, "float32", [5, 1, 20]))
    assert fuse(program, signature).applied == 1
    found = logits(program.module(), step(signature, "float32", [5, 1, 20]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class Bits(Own):
    """Numbers that are read as numbers of another type."""

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().cos_sin(positions.float().view(torch.int32))


def test_numbers_that_are_read_as_another_type_are_named() -> None:
    program, signature = own_program(Bits())
    (why,) = fuse(program, signature).unmatched
    assert "q: view_1: expected elements that stay whole" in why


class Doubled(Own):
    """Positions that are added to themselves: each term counts as often as it occurs."""

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().cos_sin(positions + positions)


class Again(Own):
    """A term that is added and taken away again."""

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().cos_sin(positions - positions + positions)


@pytest.mark.parametrize("module", [Doubled, Again])
def test_each_term_of_a_position_counts(module: type[Own]) -> None:
    program, signature = own_program(module())
    expected = logits(program.module(), step(signature, "float32", [5, 1, 20]))
    assert fuse(program, signature).applied == 1
    found = logits(program.module(), step(signature, "float32", [5, 1, 20]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
