"""A graph's whole signature: its inputs and outputs with their binding names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvgraph.contract.devices import LogicalDevice
from kvgraph.contract.dims import NUM_LOGITS, ROW_OFFSETS, TOTAL_SEQ_LEN, TensorType
from kvgraph.contract.symbols import (
    REPLICA,
    ExportArguments,
    KVCacheInputSymbols,
    emit_onnx,
    emit_tensorrt_profile,
    emit_torch_export,
)
from kvgraph.contract.values import require_integer
from kvgraph.errors import BindingError

if TYPE_CHECKING:
    from onnx import ValueInfoProto


OWN_INPUTS = ("tokens", "input_row_offsets", "logits_indices")
"""A graph's own inputs, in binding order; the cache's record follows them."""

LOGITS_INDICES = OWN_INPUTS.index("logits_indices")


class Typed(Protocol):
    """A framework's array, or a Buffer; a dtype's text is its name."""

    @property
    def dtype(self) -> object: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class GraphSignature:
    """Inputs and outputs of the graph of one shard, in binding order.

    Inputs: `tokens` int32 `[total_seq_len]`, `input_row_offsets` int32 `[batch_size + 1]` (row b
    owns tokens `[offsets[b], offsets[b+1])`), `logits_indices` int32 `[num_logits]` (rows of
    `tokens` that get logits), then the cache record. Outputs: `logits` float32
    `[num_logits, vocab]`, then each buffer of the cache, under its input's name and address.
    """

    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]

    @classmethod
    def of(cls, cache: KVCacheInputSymbols, vocab_size: int) -> GraphSignature:
        """Signature over the cache record of one device, from params with one replica.

        BindingError for any other record, and if `vocab_size` is no integer >= 1.
        """
        symbols = tuple(cache)
        vocab_size = require_integer("vocab_size", vocab_size, BindingError, least=1)
        _require_one_record(symbols)
        where: LogicalDevice = symbols[0].device
        own = (
            TensorType("tokens", "int32", (TOTAL_SEQ_LEN,), where),
            TensorType("input_row_offsets", "int32", (ROW_OFFSETS,), where),
            TensorType("logits_indices", "int32", (NUM_LOGITS,), where),
        )
        logits = TensorType("logits", "float32", (NUM_LOGITS, vocab_size), where)
        buffers = tuple(s for s in symbols if s.kind == "buffer")
        return cls(own + symbols, (logits, *buffers))

    @property
    def buffers(self) -> tuple[TensorType, ...]:
        return tuple(s for s in self.inputs if s.kind == "buffer")

    def bind(self, values: Sequence[Typed]) -> dict[str, int]:
        """Check `values` (anything with dtype and shape) position by position.

        Returns the extent of every dim. BindingError names the first value that does not fit.
        """
        if len(values) != len(self.inputs):
            names = [symbol.name for symbol in self.inputs]
            raise BindingError(
                f"values: expected {len(names)}, one for each of {names}, got {len(values)}"
            )
        sizes: dict[str, int] = {}
        for symbol, value in zip(self.inputs, values, strict=True):
            symbol.bind(str(value.dtype), tuple(value.shape), sizes)
        return sizes

    def to_torch_export(self) -> ExportArguments:
        return emit_torch_export(self.inputs)

    def to_onnx(self) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:
        renamed = [s.renamed(output_name(s)) for s in self.outputs]
        return emit_onnx(self.inputs), emit_onnx(renamed)

    def to_tensorrt_profile(
        self, min: Mapping[str, int], opt: Mapping[str, int], max: Mapping[str, int]
    ) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        return emit_tensorrt_profile(self.inputs, min, opt, max)


def _require_one_record(symbols: tuple[object, ...]) -> None:
    for symbol in symbols:
        if not isinstance(symbol, TensorType):
            raise BindingError(
                "cache: expected the record of one device, as get_symbolic_inputs()[0] is, got "
                f"{type(symbol).__name__} in it"
            )
        replicas = [dim for dim in symbol.symbolic_dims if dim.startswith(REPLICA)]
        if replicas:
            raise BindingError(
                f"{symbol.name}: expected dims of a record of one replica, got {replicas[0]}; a "
                "graph is made with data_parallel_degree=1"
            )


def output_name(symbol: TensorType) -> str:
    """Name of an output where names must be unique (ONNX, TensorRT): a buffer's gets `_out`."""
    return f"{symbol.name}_out" if symbol.kind == "buffer" else symbol.name
