"""Values of fake parameters, read from the checkpoint where they are used and given back after.

At any time no more is in memory than the parameters of one module, or of one operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.model import Model


class Streamed:
    """Of a module whose parameters `checkpoint` has by their names in it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, name: str, fake: torch.Tensor) -> torch.Tensor:
        """A tensor in the dtype of `fake`. ModelError for a number that is not finite."""
        return self._checkpoint.read(name, fake.dtype)

    @contextlib.contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Each part of `module` has its own parameters' values while it is called; an operator
        that meets a parameter elsewhere, as in a method of the part, reads it for itself."""
        hooks: list[RemovableHandle] = []
        for path, part in module.named_modules():
            fakes: dict[str, torch.Tensor] = {
                k: p for k, p in part._parameters.items() if isinstance(p, FakeTensor)
            }
            if fakes:
                hooks += self._hooks(path, part, fakes)
        try:
            with _Elsewhere(self, module):
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


class _Elsewhere(TorchFunctionMode):
    """Operators get the values of fake parameters.

    Without it the result would be fake, and a fake number that is added in place to a real one
    changes nothing, without an error.
    """

    METADATA = frozenset(
        getattr(torch.Tensor, name).__get__ for name in ("dtype", "shape", "device")
    )

    def __init__(self, streamed: Streamed, module: nn.Module) -> None:
        super().__init__()
        self._streamed = streamed
        self._names = {id(p): name for name, p in module.named_parameters()}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func not in self.METADATA:
            args, kwargs = tree_map_only(FakeTensor, self._value, (args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _value(self, given: torch.Tensor) -> torch.Tensor:
        name = self._names.get(id(given))
        return given if name is None else self._streamed.read(name, given)


def streamed_of(model: Model) -> Streamed | None:
    """Of a model whose parameters are in its checkpoint."""
    return None if model.checkpoint is None else Streamed(model.checkpoint)


@contextlib.contextmanager
def with_values(model: Model) -> Iterator[None]:
    """Within it the model's module has values, wherever they are."""
    streamed = streamed_of(model)
    with streamed.within(model.module) if streamed else contextlib.nullcontext():
        yield
