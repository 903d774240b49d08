"""kvgraph's ops have no backward pass: a call that would lose a gradient is refused.

The check is the ops' kernel of torch's Autograd key, since kernels below it cannot see in
`torch.func` and `torch.compile` that a gradient is wanted. Under `torch.inference_mode()` torch
does not call it, and it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import DispatchKeySet
from torch._guards import TracingContext, detect_fake_mode
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from kvgraph.errors import UnsupportedError

BELOW = torch._C._after_autograd_keyset


def refuse_gradients(library: torch.library.Library, name: str) -> None:
    """Make the defined op `name` refuse inputs that require gradients, and dual numbers; also mark
    the inputs that it writes as changed.

    torch.export may trace a program with such inputs: the program is refused when it runs.
    """
    op = getattr(getattr(torch.ops, library.ns), name).default
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    written = [i for i, one in enumerate(arguments) if one.alias_info and one.alias_info.is_write]

    def call(keyset: DispatchKeySet, *args: torch.Tensor | None, **attributes: float) -> object:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            _require_no_gradients(name, names, args)
        found = op.redispatch(keyset & BELOW, *args, **attributes)
        # A backward pass over the pool's old content is then refused, as for torch's own ops.
        increment_version([x for i, x in enumerate(args) if i in written and x is not None])
        return found

    library.impl(name, call, "Autograd", with_keyset=True)


def _require_no_gradients(
    op: str, names: Sequence[str], args: Sequence[torch.Tensor | None]
) -> None:
    for name, value in zip(names, args, strict=False):
        if value is not None and _has_gradient(value) and not _is_exported(value):
            raise UnsupportedError(
                f"{op}: {name}: expected a tensor without a gradient, since the op has no backward "
                "pass, got one that requires it; call it under torch.inference_mode() or "
                "torch.no_grad()"
            )


def _has_gradient(tensor: torch.Tensor) -> bool:
    reverse = tensor.requires_grad and torch.is_grad_enabled()
    return reverse or forward_ad.unpack_dual(tensor).tangent is not None


def _is_exported(tensor: torch.Tensor) -> bool:
    """Whether the call is traced for export, and not for torch.compile, which runs it at once."""
    if torch.compiler.is_exporting():
        return True
    return detect_fake_mode([tensor]) is not None and TracingContext.try_get() is None
