"""Values of fake parameters, read from the checkpoint where they are used and given back after.

At any time no more is in memory than the parameters of one module, or of one operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from kvgraph.compiler.checkpoint import Checkpoint, Share


class Streamed:
    """`names`: those of a module's parameters -> those under which the checkpoint has them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        shares: Mapping[str, tuple[Share, torch.Tensor]] = {},
    ) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._shares = shares

    def cut(self, shares: Mapping[str, Share], module: nn.Module) -> Streamed:
        """The same for a rank that has these `shares` of the parameters of `module`."""
        whole = dict(module.named_parameters(remove_duplicate=False))
        parts = {name: (share, whole[name]) for name, share in shares.items()}
        return Streamed(self._checkpoint, self._names, parts)

    def read(self, name: str, fake: torch.Tensor) -> torch.Tensor:
        """The first rows of a stored tensor, as many as `fake` has, in its dtype; of one that is
        cut, the share of the first rows that the whole parameter has.

        ModelError for a number that is not finite.
        """
        if name in self._shares:
            share, whole = self._shares[name]
            return share.of(self._rows(name, whole)).contiguous()
        return self._rows(name, fake)

    def _rows(self, name: str, fake: torch.Tensor) -> torch.Tensor:
        out = torch.empty(fake.shape, dtype=fake.dtype)
        filled, rows = 0, out.shape[0] if out.dim() else 1
        for piece in self._checkpoint.pieces(self._names[name], fake.dtype):
            part = piece[: rows - filled]
            out.view(rows, *out.shape[1:])[filled : filled + len(part)] = part
            filled += len(part)
            if filled == rows:
                break
        return out

    @contextlib.contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Each part of `module` has its own parameters' values while its forward pass runs."""
        hooks: list[RemovableHandle] = []
        for path, part in module.named_modules():
            fakes: dict[str, torch.Tensor] = {
                k: p for k, p in part._parameters.items() if isinstance(p, FakeTensor)
            }
            if fakes:
                hooks += self._hooks(path, part, fakes)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(
        self, path: str, part: nn.Module, fakes: dict[str, torch.Tensor]
    ) -> list[RemovableHandle]:
        prefix = f"{path}." if path else ""

        def fill(*_: object) -> None:
            for key, fake in fakes.items():
                value = self.read(prefix + key, fake)
                part._parameters[key] = nn.Parameter(value, requires_grad=False)

        def empty(*_: object) -> None:
            part._parameters.update(fakes)  # type: ignore[arg-type]

        return [part.register_forward_pre_hook(fill), part.register_forward_hook(empty)]
