"""A manager, its symbols and its values, as a user of the base page writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import kvgraph
from kvgraph import (
    Buffer,
    KVCacheInputs,
    KVCacheInputSymbols,
    KVCacheManager,
    TensorType,
)
from kvgraph.contract.devices import HOST


@dataclass
class OwnSymbols(KVCacheInputSymbols):
    kv_blocks: TensorType
    cache_lengths: TensorType
    lookup_table: TensorType
    max_lengths: TensorType


@dataclass
class OwnInputs(KVCacheInputs):
    blocks: Buffer
    cache_lengths: Buffer
    lookup_table: Buffer
    max_lengths: Buffer


def host(*values: Any) -> Buffer:
    array = np.array(values, np.int32)
    return Buffer("int32", array.shape, HOST, array)


class OwnManager(KVCacheManager):
    """One slot for each sequence, as the page describes it."""

    def fetch(self, batch: Any, num_steps: int = 1) -> Any:
        lengths = [ctx.processed_length for ctx in batch]
        slots = [self.get_req_blocks(ctx.request_id)[0] for ctx in batch]
        maxima = host(*[[1, length] for length in range(num_steps)])
        return [OwnInputs(host(0), host(*lengths), host(*slots), maxima)]

    def input_symbols(self) -> list[OwnSymbols]:
        return [OwnSymbols(*kvgraph.KVCacheParams.get_symbolic_inputs(self.params)[0])]
