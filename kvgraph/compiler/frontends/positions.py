"""Give real positions to parts of a model that number a step's tokens from 0.

transformers' models get `position_ids`. Some parts count from 0 all the same, because they expect
one sequence: attention (Llama 4 scales its queries so), and position embeddings (BART). In these
parts a range as long as the step's tokens means positions. In other parts it may have another
purpose, and stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode


def embeddings(model: nn.Module) -> list[nn.Module]:
    """Embedding modules of `model` with a forward of their own, which may compute positions."""
    plain = nn.Embedding.forward
    found = (part for part in model.modules() if isinstance(part, nn.Embedding))
    return [part for part in found if type(part).forward is not plain]


@contextlib.contextmanager
def numbered(parts: Sequence[nn.Module], positions_T: torch.Tensor) -> Iterator[None]:
    """Replace ranges over all tokens that `parts` make by `positions_T` while it is active."""
    mode = _Numbered(positions_T)
    hooks = [module.register_forward_pre_hook(mode.enter) for module in parts]
    hooks += [module.register_forward_hook(mode.leave) for module in parts]
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Numbered(TorchFunctionMode):
    def __init__(self, positions_T: torch.Tensor) -> None:
        super().__init__()
        self._positions_T = positions_T
        self._is_within = False

    def enter(self, *_: object) -> None:
        self._is_within = True

    def leave(self, *_: object) -> None:
        self._is_within = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        is_range = self._is_within and func is torch.arange and args[:-1] in ((), (0,))
        if not is_range or not isinstance(made, torch.Tensor):
            return made
        is_whole = statically_known_true(made.shape[0] == self._positions_T.shape[0])
        return self._positions_T.to(made.dtype) if is_whole else made
