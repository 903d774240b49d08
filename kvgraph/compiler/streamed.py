"""Run a module with fake parameters: values are read from the checkpoint at use and freed after.

At any time, memory holds the parameters of one module or of one operator at most. Of a large token
table or output projection it holds some rows, and of large weights of experts those of one expert.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import embedding, linear
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.model import Model
from kvgraph.compiler.values import Rows

LARGE = 256 << 20
"""Bytes above which the weight of a linear layer, a table or experts is read in pieces."""


class Streamed:
    """Reads parameters of a module from `checkpoint`, which has them by the module's own names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._opened: dict[str, Rows] = {}
        self._whole: dict[str, torch.Tensor] = {}

    def read(self, name: str, fake: torch.Tensor) -> torch.Tensor:
        """The values of parameter `name` in the dtype of `fake`.

        ModelError for a number that is not finite.
        """
        return self._checkpoint.read(name, fake.dtype)

    def linear(
        self, name: str, fake: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of a linear layer with weight `name`, which is read in pieces."""
        out = x.new_empty((*x.shape[:-1], len(fake)))
        for rows, piece in self._pieces(name, fake):
            out[..., rows] = linear(x, piece, None if bias is None else bias[rows])
        return out

    def embedding(self, name: str, fake: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` of the table `name`, which is read in pieces."""
        out = torch.empty((*ids.shape, *fake.shape[1:]), dtype=fake.dtype)
        for rows, piece in self._pieces(name, fake):
            is_here = (ids >= rows.start) & (ids < rows.stop)
            out[is_here] = piece[ids[is_here] - rows.start]
        return out

    def _pieces(self, name: str, fake: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        start = 0
        for piece in self._checkpoint.get(name, fake.dtype).pieces():
            yield slice(start, start + len(piece)), piece
            start += len(piece)

    def entry(self, name: str, fake: torch.Tensor, index: int) -> torch.Tensor:
        """Entry `index` of the first dim of `name`: the weights of one expert."""
        if name not in self._opened:
            self._opened[name] = self._checkpoint.get(name, fake.dtype).open()
        return self._opened[name](index, index + 1)[0]

    def whole(self, name: str, fake: torch.Tensor) -> torch.Tensor:
        """All values of a large stacked weight. They stay until the end of its module's call."""
        if name not in self._whole:
            self._whole[name] = self.read(name, fake)
        return self._whole[name]

    def _forget(self, *_: object) -> None:
        self._opened.clear()
        self._whole.clear()

    @contextlib.contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Give parts of `module` their values while this context is active.

        Each part has its own parameters' values while it is called. An operator that gets a fake
        parameter outside such a call, as in another method of the part, reads it itself.
        """
        hooks: list[RemovableHandle] = []
        for path, part in module.named_modules():
            own = {k: p for k, p in part._parameters.items() if isinstance(p, FakeTensor)}
            is_table = isinstance(part, nn.Linear | nn.Embedding)
            fakes = {
                k: p for k, p in own.items() if not (_is_stacked(p) or (is_table and _is_large(p)))
            }
            if fakes:
                hooks += self._hooks(path, part, fakes)
            if any(map(_is_stacked, own.values())):
                hooks.append(part.register_forward_hook(self._forget))
        try:
            with _Elsewhere(self, module):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._forget()

    def _hooks(
        self, path: str, part: nn.Module, fakes: Mapping[str, torch.Tensor]
    ) -> list[RemovableHandle]:
        prefix = f"{path}." if path else ""

        def fill(*_: object) -> None:
            for key, fake in fakes.items():
                value = self.read(prefix + key, fake)
                part._parameters[key] = nn.Parameter(value, requires_grad=False)

        def empty(*_: object) -> None:
            part._parameters.update(fakes)  # type: ignore[arg-type]

        return [part.register_forward_pre_hook(fill), part.register_forward_hook(empty)]


def _is_large(weight: torch.Tensor) -> bool:
    return weight.numel() * weight.dtype.itemsize > LARGE


def _is_stacked(weight: torch.Tensor) -> bool:
    """Whether a weight is read by entry: large, with a dim of experts before two others."""
    return weight.dim() > 2 and _is_large(weight)


class _Elsewhere(TorchFunctionMode):
    """A torch mode that replaces fake parameters by their values in each operator's arguments.

    Without it the operator's result would be fake. A fake tensor that is added in place to a real
    one changes nothing, and raises no error. Large weights of linear layers and tables never become
    whole, and those of experts only for an operator that needs all experts.
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
            found = self._in_pieces(func, *args, **(kwargs or {}))
            if found is not None:
                return found
            args, kwargs = tree_map_only(FakeTensor, self._value, (args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _in_pieces(self, func: object, *args: object, **named: object) -> torch.Tensor | None:
        """The result of an operator that reads a large weight in pieces; None for others."""
        if func is torch.Tensor.__getitem__:
            return self._entry(*args)
        if func not in (linear, embedding) or len(args) < 2:
            return None
        x, weight, *rest = args
        name = self._names.get(id(weight))
        if name is None or not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)):
            return None
        if not _is_large(weight):
            return None
        if func is linear:
            bias = tree_map_only(FakeTensor, self._value, [*rest, named.get("bias")])[0]
            return self._streamed.linear(name, weight, x, bias)
        is_plain = named.get("max_norm") is None and not rest
        is_known = not ((x < 0) | (x >= len(weight))).any()
        return self._streamed.embedding(name, weight, x) if is_plain and is_known else None

    def _entry(self, stacked: object, index: object) -> torch.Tensor | None:
        """Entry `index` of a large stacked weight, read alone; None for others and for slices."""
        name = self._names.get(id(stacked))
        if name is None or not (isinstance(stacked, torch.Tensor) and _is_stacked(stacked)):
            return None
        if isinstance(index, torch.Tensor) and not index.dim() and not index.is_floating_point():
            index = index.item()
        if type(index) is not int or not 0 <= index < len(stacked):
            return None
        return self._streamed.entry(name, stacked, index)

    def _value(self, given: torch.Tensor) -> torch.Tensor:
        name = self._names.get(id(given))
        if name is None:
            return given
        read = self._streamed.whole if _is_stacked(given) else self._streamed.read
        return read(name, given)


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
