"""Run a torch callable (a module or an exported program) over a cache in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvgraph.compiler.check.compare import Logits, Tokens
from kvgraph.contract.devices import Device
from kvgraph.contract.dims import TensorType, ceildiv
from kvgraph.contract.inputs import KVCacheInputs, ModelInputs
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.signature import GraphSignature
from kvgraph.contract.trees import MultiKVCacheParams, params_from_layout
from kvgraph.kv.continuous import ContinuousBatchingKVCacheManager
from kvgraph.kv.forward import Chunk, all_logits
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.ops.torch_arrays import tensor_over

Params = KVCacheParams | MultiKVCacheParams


def logits_of(
    step: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    signature: GraphSignature,
    params: Params,
    rows: Sequence[Tokens],
    *,
    chunk: Chunk,
    last_only: bool = False,
) -> list[Logits]:
    """Logits of every token, one `[len(row), vocab]` array for each row; all rows run together.

    `last_only`: those of each row's last token, which are the only ones that steps ask for.
    `step` takes the signature's inputs as tensors in their order. If its result is a tuple, the
    first entry is the logits. A padded cache takes one row after the other.
    """
    together = params.cache_strategy is not KVCacheStrategy.PADDED
    found: list[Logits] = []
    for group in [rows] if together else [[row] for row in rows]:
        kv = host_manager(params, len(group), max(map(len, group)))
        found += all_logits(kv, group, _run(step, signature), chunk=chunk, last_only=last_only)
    return found


def host_manager(params: Params, rows: int, longest: int) -> KVCacheManager:
    """A cache manager of the same layout with pools in host memory."""
    devices = [Device("cpu")]
    own = params_from_layout(params.layout_dict(), devices=devices)
    if isinstance(own, KVCacheParams) and own.cache_strategy is not KVCacheStrategy.PAGED:
        continuous = own.cache_strategy is KVCacheStrategy.CONTINUOUS
        kind = ContinuousBatchingKVCacheManager if continuous else PaddedKVCacheManager
        return kind(own, rows, longest, own.num_layers, devices, None)
    pages = rows * ceildiv(longest, own.page_size)
    return PagedKVCacheManager(own, None, pages, max_batch_size=rows, max_seq_len=longest)


def _run(
    step: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], signature: GraphSignature
) -> Callable[[ModelInputs, KVCacheInputs], Logits]:
    def run(inputs: ModelInputs, kv: KVCacheInputs) -> Logits:
        values = [inputs.tokens, inputs.input_row_offsets, inputs.logits_indices, *kv.flatten()]
        with torch.no_grad():
            result = step(*map(_tensor, signature.inputs, values))
        logits: torch.Tensor = result[0] if isinstance(result, tuple | list) else result
        found: Logits = logits.float().numpy()
        return found

    return run


def _tensor(symbol: TensorType, value: Any) -> torch.Tensor:
    return tensor_over(getattr(value, "handle", value), symbol.dtype)
