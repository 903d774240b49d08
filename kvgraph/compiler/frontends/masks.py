"""Find the mask that a model asks transformers for: causal, or causal with a window or chunks.

transformers calls the registered mask function with `mask_function(batch, head, query, key)`, which
says whether a query sees a key. Here it is called with real positions, and the model gets an
`AskedMask` in place of a tensor; attention takes the window from it. Only the cache ops separate
the rows of a batch, so transformers' own detection of packed rows is switched off.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from kvgraph.compiler.refusals import Reason
from kvgraph.errors import UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_KEYS = 1 << 17
"""Most keys for which a mask is evaluated at some queries, unless its window is larger."""


@dataclass(frozen=True)
class AskedMask:
    """A mask in which query i sees key j if and only if `i - window < j <= i`.

    `window`: None: a query sees all keys up to its own position.
    `chunked`: query i sees key j iff `j <= i` and both are in one chunk of `window` positions.
    """

    window: int | None
    chunked: bool = False
    why: str = ""
    """Why no kernel has this mask; empty if one does. The error is raised only when attention uses
    the mask, because models ask for masks that none of their layers takes."""


def register(transformers: ModuleType, name: str) -> None:
    """Register `asked_mask` for models with attention implementation `name`."""
    transformers.AttentionMaskInterface.register(name, asked_mask)


def asked_mask(
    *,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    attention_mask: torch.Tensor | None = None,
    config: PretrainedConfig | None = None,
    **_: object,
) -> AskedMask:
    """The mask of `mask_function`; transformers calls this when a model asks for a mask."""
    try:
        if attention_mask is not None and not _ones.get().has(attention_mask):
            raise UnsupportedError(Reason.PADDING.said())
        return _asked(mask_function, local_size, config)
    except UnsupportedError as error:
        return AskedMask(None, why=str(error))


def _asked(
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None,
    config: PretrainedConfig | None,
) -> AskedMask:
    limit = min(getattr(config, "max_position_embeddings", None) or MOST_KEYS, MOST_KEYS)
    length = max(limit, 2 * (local_size or 1) + 2)
    try:
        mask = _read(mask_function, length)
    except UnsupportedError:
        raise
    except Exception as error:
        reraise_if_signalled(error)
        why = Reason.UNREADABLE_MASK.said(name=_name(mask_function))
        raise UnsupportedError(why) from error
    if mask.window is None and local_size is not None and local_size < length:
        raise UnsupportedError(Reason.LOST_WINDOW.said(size=local_size))
    return mask


@contextlib.contextmanager
def ragged_rows() -> Iterator[None]:
    """Make transformers build masks for ragged rows while this context is active.

    It does not look for packed rows in position ids. Chunks begin at a row's first token, because
    no row has padding on its left.
    """
    from transformers import masking_utils

    ones = _Ones()
    token = _ones.set(ones)
    chunks = masking_utils.chunked_causal_mask_function

    def unpadded(chunk_size: int, _: torch.Tensor) -> Callable[..., torch.Tensor]:
        with _disable_current_modes():
            return chunks(chunk_size, torch.zeros(1, dtype=torch.long))  # type: ignore[no-any-return]

    try:
        packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
        chunked = mock.patch.object(masking_utils, "chunked_causal_mask_function", unpadded)
        with packed, chunked, ones:
            yield
    finally:
        _ones.reset(token)


class _Ones(TorchFunctionMode):
    """A torch mode that records tensors made by torch.ones, and casts of them.

    A padding mask of ones masks nothing.
    """

    CASTS = (torch.Tensor.to, torch.Tensor.bool, torch.Tensor.long, torch.Tensor.float)

    def __init__(self) -> None:
        super().__init__()
        self._known: list[torch.Tensor] = []

    def has(self, tensor: torch.Tensor) -> bool:
        return any(tensor is one for one in self._known)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        is_cast = func in self.CASTS and self.has(args[0])
        if is_cast or func in (torch.ones, torch.ones_like):
            self._known.append(made)
        return made


_ones: ContextVar[_Ones] = ContextVar("ones", default=_Ones())  # noqa: B039


def _read(mask_function: Callable[..., torch.Tensor], length: int) -> AskedMask:
    """The AskedMask that equals `mask_function` over `length` positions, tested at some queries.

    UnsupportedError if the mask is neither causal, nor a sliding window, nor chunks.
    """
    with _disable_current_modes(), torch.no_grad():
        key_K = torch.arange(length)
        size = _first_without(mask_function, length)
        edges = {0, 1, 2, 3, *range(size - 2, size + 3), *range(2 * size - 2, 2 * size + 3)}
        edges |= {(1 << i) - 1 for i in range(length.bit_length())} | {length - 1}
        query_Q = torch.tensor(sorted(edge for edge in edges if 0 <= edge < length))
        seen_QK = _visible(mask_function, query_Q, key_K)
        distance_QK = query_Q[:, None] - key_K
        if bool((seen_QK & (distance_QK < 0)).any()):
            raise UnsupportedError(Reason.NOT_CAUSAL.said())
        sliding_QK = (distance_QK >= 0) & (distance_QK < size)
        if bool((seen_QK == sliding_QK).all()):
            return AskedMask(size if size < length else None)
        chunk_QK = (distance_QK >= 0) & (key_K >= (query_Q - query_Q % size)[:, None])
        if bool((seen_QK == chunk_QK).all()):
            return AskedMask(size, chunked=True)
    raise UnsupportedError(Reason.OTHER_MASK.said(name=_name(mask_function)))


def _first_without(mask_function: Callable[..., torch.Tensor], length: int) -> int:
    """The first position that does not see position 0; `length` if all do."""
    first = torch.zeros(1, dtype=torch.long)

    def is_blind(query: int) -> bool:
        return not bool(_visible(mask_function, torch.tensor([query]), first).item())

    return bisect_left(range(1, length), True, key=is_blind) + 1


def _visible(
    mask_function: Callable[..., torch.Tensor], query_Q: torch.Tensor, key_K: torch.Tensor
) -> torch.Tensor:
    """`[Q, K]`: whether each query sees each key, in batch item 0 and head 0."""
    zero = torch.zeros(1, 1, dtype=torch.long)
    seen: torch.Tensor = mask_function(zero, zero, query_Q[:, None], key_K[None])
    return seen.expand(len(query_Q), len(key_K))


def _name(mask_function: Callable[..., torch.Tensor]) -> str:
    return getattr(mask_function, "__qualname__", repr(mask_function))
