"""The state of a compile between its export and its files, which passes read and change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes import PassOptions, PassReport
from kvgraph.compiler.weights import Weights
from kvgraph.contract.dtypes import ACTIVATIONS
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.contract.signature import GraphSignature

if TYPE_CHECKING:
    import onnx
    import onnx_ir
    from torch.export import ExportedProgram
    from torch.fx import Graph


@dataclass
class Traced:
    """A model as one program over `signature`; passes and backends change the program in place."""

    model: Model
    signature: GraphSignature
    plan: CachePlan
    program: ExportedProgram
    digest: bytes
    """The 32-byte digest of the program as it was exported."""
    passes: list[PassReport] = field(default_factory=list)
    bits: int | None = None
    """Bits of packed weights (16, 8, 4 or AS_STORED); None: weights keep the model's dtype."""
    archs: Sequence[str] = ()
    """GPU architectures for which the artifact has kernels; the same for all ranks."""
    onnx_model: onnx_ir.Model | None = None
    """The ONNX graph that a backend made of the program; None before that."""
    onnx_proto: onnx.ModelProto | None = None
    """The ONNX graph as the protobuf that is written; None before that."""
    dump: Callable[[str, Traced], None] | None = None
    """Function to call after each step that changed the graph, with its name and this Traced."""

    @cached_property
    def weights(self) -> Weights:
        """The values of the program's parameters, or their sources."""
        return Weights(self.model.checkpoint)

    @property
    def kinds(self) -> set[str]:
        """Floating dtypes that the program computes in, and the model's own."""
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        results = [each for node in nodes for each in tree_leaves(node.meta.get("val"))]
        made = {each.dtype for each in results if isinstance(each, torch.Tensor)}
        return {name for name in ACTIVATIONS if getattr(torch, name) in made} | {self.model.dtype}

    @property
    def pool_kinds(self) -> list[str]:
        return [leaf.pool_dtype for leaf in self.plan.params.leaves.values()]

    @property
    def options(self) -> PassOptions:
        is_padded = self.plan.strategy is KVCacheStrategy.PADDED
        return PassOptions(is_padded, self.bits is not None, self.plan.params.n_shards)

    @property
    def graph(self) -> Graph:
        graph: Graph = self.program.graph
        return graph

    @property
    def positions(self) -> int:
        """Most positions (tokens) of a request."""
        return self.model.max_seq_len

    @property
    def onnx_graph(self) -> onnx.GraphProto | None:
        return None if self.onnx_proto is None else self.onnx_proto.graph

    def changed(self, step: str) -> None:
        """Dump the graph after `step`, if dumps were asked for."""
        if self.dump is not None:
            self.dump(step, self)
