"""Run a module with fake parameters: values are read from the checkpoint at use and freed after.

At any time, memory holds the parameters of one module or of one operator at most.
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
    """Reads parameters of a module from `checkpoint`, which has them by the module's own names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, name: str, fake: torch.Tensor) -> torch.Tensor:
        """The values of parameter `name` in the dtype of `fake`.

        ModelError for a number that is not finite.
        """
        return self._checkpoint.read(name, fake.dtype)

    @contextlib.contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Give parts of `module` their values while this context is active.

        Each part has its own parameters' values while it is called. An operator that gets a fake
        parameter outside such a call, as in another method of the part, reads it itself.
        """
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
    """A torch mode that replaces fake parameters by their values in each operator's arguments.

    Without it the operator's result would be fake. A fake tensor that is added in place to a real
    one changes nothing, and raises no error.
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
    """The Streamed for the model's checkpoint; None if the model has none."""
    return None if model.checkpoint is None else Streamed(model.checkpoint)


@contextlib.contextmanager
def with_values(model: Model) -> Iterator[None]:
    """Give the model's module its values while this context is active.

    They come from the checkpoint, or are in the module already.
    """
    streamed = streamed_of(model)
    with streamed.within(model.module) if streamed else contextlib.nullcontext():
        yield
