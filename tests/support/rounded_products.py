"""Models of transformers whose products round their inputs as kernels for CPUs do.

A number in the middle of two that it may be rounded to becomes either: which one depends on the
order of the sums before it. One such number in bfloat16 changes logits by 1e-2 of their spread, so
a reference has to follow its choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

Logits = npt.NDArray[np.float32]
Rounding = Callable[[torch.Tensor], torch.Tensor]
Place = tuple[int, int]
"""Number of an input of products in a run, and index of a number in it."""

PRODUCTS = (torch.nn.functional.linear, torch.Tensor.__matmul__, torch.Tensor.matmul)
MIDDLE = 2e-6
"""Largest difference of the distances to two numbers, over the largest magnitude of the row."""
SAME = 1e-5
"""Largest distance of logits that are rounded alike, over their norm."""


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Integers of -127 to 127 in each row, times a scale of the row."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale.clamp(min=1e-30)).round() * scale


class Roundings(NamedTuple):
    """What a product makes of its weight (None: keeps it) and of its input."""

    weight: Rounding | None
    x: Rounding


PLAIN = Roundings(to_bfloat16, to_bfloat16)
GROUPS = Roundings(None, to_bfloat16)
ROWS = Roundings(None, to_int8)
INTO_INT8 = Roundings(to_int8, to_int8)


class Reference:
    """A checkpoint in float32. `kept`: of a parameter by its name; None: nothing is rounded. The
    table of tokens is in bfloat16 if that holds it, else in float16."""

    def __init__(self, folder: Path, kept: Callable[[str], Roundings | None]) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        self._x_of: dict[int, Rounding] = {}
        table = self._model.get_input_embeddings().weight
        with torch.no_grad():
            is_exact = torch.equal(table, to_bfloat16(table))
            table.copy_(table if is_exact else table.half())
            for name, weight in self._model.named_parameters():
                form = kept(name)
                if form is not None and form.weight is not None:
                    weight.copy_(form.weight(weight))
                if form is not None:
                    self._x_of[_storage(weight)] = form.x

    def nearest(self, tokens: Sequence[int], found: Logits, enough: float) -> Logits:
        """Logits `[tokens, vocab]`. Numbers in the middle of two are rounded as it takes to be
        within `enough` of `found`, if they can be."""
        others: frozenset[Place] = frozenset()
        logits, ties = self._run(tokens, others)
        while (far := apart(found, logits) > enough).any():
            end = int(np.argmax(far)) + 1  # tokens behind the first may be far because of it
            size, changed = self._nearer(tokens, found[:end], others, ties)
            if size >= np.linalg.norm(found[:end] - logits[:end]):
                break
            others = changed
            logits, ties = self._run(tokens, others)
        return logits

    def _nearer(
        self,
        tokens: Sequence[int],
        found: Logits,
        others: frozenset[Place],
        ties: Sequence[Place],
    ) -> tuple[float, frozenset[Place]]:
        """`others`, changed in the place that brings the first logits nearest to `found`, or in one
        that makes them the same. Also their distance then."""
        best = math.inf, others
        for place in ties:
            changed = others ^ {place}
            size = float(np.linalg.norm(found - self._run(tokens, changed)[0][: len(found)]))
            best = min(best, (size, changed), key=lambda each: each[0])
            if size < SAME * np.linalg.norm(found):
                break
        return best

    def _run(
        self, tokens: Sequence[int], others: Collection[Place]
    ) -> tuple[Logits, Sequence[Place]]:
        with torch.no_grad(), _Products(self._x_of, others) as products:
            logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        return logits, [place for _, place in sorted(products.ties)]


def apart(found: Logits, expected: Logits) -> npt.NDArray[np.float32]:
    """`[tokens]`: the largest difference of a token's logits, over their spread."""
    largest: npt.NDArray[np.float32] = np.abs(found - expected).max(-1) / expected.std(-1)
    return largest


class _Products(TorchFunctionMode):
    """Rounds inputs of products with the weights in these storages; at `others` to the number that
    is not the nearest. `ties`: places whose two numbers are equally near, each behind the
    difference of these distances."""

    def __init__(self, x_of: Mapping[int, Rounding], others: Collection[Place]) -> None:
        super().__init__()
        self._x_of, self._others, self._count = x_of, others, 0
        self._last: tuple[object, torch.Tensor | None] = None, None
        self.ties: list[tuple[float, Place]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        rounding = self._x_of.get(_storage(args[1])) if func in PRODUCTS else None
        if rounding is not None:
            if self._last[0] is not args[0]:  # q, k and v share an input, gate and up another
                self._last = args[0], self._rounded(args[0], rounding)
            args = (self._last[1], *args[1:])
        return func(*args, **(kwargs or {}))

    def _rounded(self, x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        nearest = rounding(x)
        other = rounding(2 * x - nearest)
        nearer = (other - x).abs() - (nearest - x).abs()
        share = (nearer / x.abs().amax(-1, keepdim=True)).abs()
        share = share.masked_fill(other == nearest, math.inf).flatten()
        for number in (share < MIDDLE).nonzero()[:, 0].tolist():
            self.ties.append((float(share[number]), (self._count, number)))
        chosen = nearest.clone()
        for count, number in self._others:
            if count == self._count:
                chosen.view(-1)[number] = other.flatten()[number]
        self._count += 1
        return chosen


def _storage(weight: torch.Tensor) -> int:
    return weight.untyped_storage().data_ptr()
