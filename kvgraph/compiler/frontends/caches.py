"""The caches that a decoder's attention calls while it is traced: one class per cache kind.

`attend(layer, q, k, v, sinks, reads, **attributes)` stores the new tokens of a model layer and
attends over their rows: q `[T, N, D]`, k `[T, K, D]`, v `[T, K, Dv]` -> `[T, N, Dv]`. If `reads` is
the index of an earlier layer, the layer uses that one's keys and values and stores nothing.
`attributes` are those of `paged_attention`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from kvgraph import ops
from kvgraph.compiler.cache import CachePlan, LayerNeed
from kvgraph.compiler.refusals import Reason
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.errors import UnsupportedError


def make_cache(
    plan: CachePlan, input_row_offsets: torch.Tensor, values: Sequence[torch.Tensor]
) -> PagedCache | PaddedCache:
    """The cache of `plan` over `values`, the graph inputs that follow `logits_indices`."""
    if plan.strategy is KVCacheStrategy.PADDED:
        return PaddedCache(plan, input_row_offsets, values)
    return PagedCache(plan, input_row_offsets, values)


def token_rows(tokens: torch.Tensor, input_row_offsets: torch.Tensor) -> torch.Tensor:
    """`[total_seq_len]`: the row of each new token, without data-dependent shapes.

    The row is the number of offsets at or before the token, minus one. The offsets are not sliced:
    torch.export would decide that a batch has more than one row.
    """
    index_T = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
    return (index_T[:, None] >= input_row_offsets[None]).sum(-1) - 1


class PagedCache:
    """Paged caches by leaf, or a continuous cache, in which a row's only page is its slot."""

    def __init__(
        self, plan: CachePlan, input_row_offsets: torch.Tensor, values: Sequence[torch.Tensor]
    ) -> None:
        self._row_offsets = input_row_offsets
        self._layers = plan.layers
        fields = len(values) // len(plan.leaves)
        self._records = {
            leaf: tuple(values[i * fields : (i + 1) * fields]) for i, leaf in enumerate(plan.leaves)
        }
        self._is_slot = plan.strategy is KVCacheStrategy.CONTINUOUS

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[total_seq_len]`: the position of each new token in its row; equal in all leaves."""
        cache_lengths = next(iter(self._records.values()))[1]
        row_T = token_rows(tokens, self._row_offsets)
        index_T = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
        return index_T - self._row_offsets[row_T] + cache_lengths[row_T]

    def attend(
        self,
        layer: int,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks: torch.Tensor | None,
        reads: int | None,
        **attributes: Any,
    ) -> torch.Tensor:
        place = self._layers[layer]
        kv_blocks, cache_lengths, table, max_lengths, *rest = self._records[place.leaf]
        table = table[:, None] if self._is_slot else table
        scales = rest[0] if rest else None
        index = (self._row_offsets, cache_lengths, table)
        if reads is None:
            ops.store_kv(kv_blocks, k_TKD, v_TKD, *index, scales, layer=place.index)
        out: torch.Tensor = ops.paged_attention(
            q_TND, kv_blocks, *index, max_lengths, scales, sinks, layer=place.index, **attributes
        )
        return out


class PaddedCache:
    """The padded cache in plain torch operators, for export targets without kvgraph's ops.

    Every query is scored against every slot of the rectangle, and all but its row's past is masked.
    This is portable and exact. It is slower than paging by the share of slots of other rows. A head
    of a value that is not finite counts as zeros, since other rows multiply it by a weight of 0.
    Queries that may see it get NaN.
    """

    def __init__(
        self, plan: CachePlan, input_row_offsets: torch.Tensor, values: Sequence[torch.Tensor]
    ) -> None:
        self._layers = plan.layers
        self._row_offsets = input_row_offsets
        self._k_LBSKD, self._v_LBSKD, self._start_pos, _ = values
        self._rows_T = self._positions_T = torch.empty(0)
        self._visible: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        self._rows_T = token_rows(tokens, self._row_offsets)
        index_T = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
        self._positions_T = index_T - self._row_offsets[self._rows_T] + self._start_pos
        return self._positions_T

    def attend(
        self,
        layer: int,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks: torch.Tensor | None,
        reads: int | None,
        *,
        scale: float,
        window: int,
        chunked: int,
        softcap: float,
        **_: object,
    ) -> torch.Tensor:
        layer = self._layers[layer].index
        index = (torch.full_like(self._rows_T, layer), self._rows_T, self._positions_T.long())
        for cache, new in ((self._k_LBSKD, k_TKD), (self._v_LBSKD, v_TKD)):
            if reads is None:
                cache.index_put_(index, new.to(cache.dtype))
        groups = q_TND.shape[1] // k_TKD.shape[1]
        visible_TC, ones_TC = self._visible_slots(window, bool(chunked))  # C = B * S slots
        v_BSKD = self._v_LBSKD[layer]
        is_fine_BSK1 = (v_BSKD - v_BSKD).sum(-1, keepdim=True) == 0  # otherwise NaN
        k_CND = self._slots(self._k_LBSKD[layer], groups, q_TND.dtype)
        v_CND = self._slots(torch.where(is_fine_BSK1, v_BSKD, 0), groups, q_TND.dtype)
        odd_CN1 = self._slots(~is_fine_BSK1, groups, ones_TC.dtype)
        scores_NTC = torch.bmm(q_TND.transpose(0, 1), k_CND.permute(1, 2, 0)).float() * scale
        if softcap:
            scores_NTC = softcap * torch.tanh(scores_NTC / softcap)
        scores_NTC = torch.where(visible_TC, scores_NTC, float("-inf"))
        if sinks is not None:
            sink_NT1 = sinks[:, None, None].expand(-1, q_TND.shape[0], 1)
            scores_NTC = torch.cat([scores_NTC, sink_NT1], -1)
        weights_NTC = scores_NTC.softmax(-1)[..., : k_CND.shape[0]].to(q_TND.dtype)
        out_NTD = torch.bmm(weights_NTC, v_CND.transpose(0, 1))
        is_fine_TN = ones_TC @ odd_CN1[..., 0] == 0
        out_NTD = torch.where(is_fine_TN.transpose(0, 1)[..., None], out_NTD, float("nan"))
        # A copy, so that no later reshape asks whether T is 1.
        return out_NTD.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def _slots(self, cache_BSKD: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """`[B * S, N, D]`: the cache as one list of slots, with kv heads repeated for each query
        head."""
        batch, length, heads, width = cache_BSKD.shape
        cache_CKD = cache_BSKD.view(batch * length, heads, width).to(dtype)
        if groups == 1:
            return cache_CKD
        cache_CKGD = cache_CKD[:, :, None].expand(-1, -1, groups, -1)
        whole_CKGD = cache_CKGD.clone(memory_format=torch.contiguous_format)
        return whole_CKGD.view(batch * length, heads * groups, width)

    def _visible_slots(self, window: int, chunked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, B * S]`, twice: whether a token sees a slot, as bools and as numbers."""
        kind = window, chunked
        if kind not in self._visible:  # masks are the same for all layers of that kind
            visible_TC = self._seen(window, chunked)
            self._visible[kind] = visible_TC, visible_TC.float()
        return self._visible[kind]

    def _seen(self, window: int, chunked: bool) -> torch.Tensor:
        """`[T, B * S]`: whether a slot is in the token's row, not after it, and in its window."""
        _, batch, length, *_ = self._k_LBSKD.shape
        device = self._rows_T.device
        row_BS = torch.arange(batch, device=device)[:, None].expand(batch, length)
        position_BS = torch.arange(length, device=device)[None].expand(batch, length)
        mine_TBS = row_BS[None] == self._rows_T[:, None, None]
        at_T = self._positions_T[:, None, None]
        seen_TBS = mine_TBS & (position_BS[None] <= at_T)
        if window:
            first_T = at_T - at_T % window if chunked else at_T - window + 1
            seen_TBS = seen_TBS & (position_BS[None] >= first_T)
        return seen_TBS.view(self._rows_T.shape[0], batch * length)


class Probe:
    """A stand-in for the cache that records what each layer stores; its attention returns zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerNeed] = {}
        self.calls: Counter[int] = Counter()
        """Number of attention calls by layer."""

    def attend(
        self,
        layer: int,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks: torch.Tensor | None,
        reads: int | None,
        **attributes: Any,
    ) -> torch.Tensor:
        if not attributes["causal"]:
            raise UnsupportedError(Reason.NOT_CAUSAL.said())
        heads, head_dim, v_head_dim = k_TKD.shape[1], k_TKD.shape[2], v_TKD.shape[2]
        window = attributes["window"] or None
        self.calls[layer] += 1
        self.layers[layer] = LayerNeed(heads, head_dim, v_head_dim, window, reads)
        return q_TND.new_zeros(*q_TND.shape[:2], v_head_dim)
