"""An exported program of a user's own, made ready for plain `torch.onnx.export`.

Decision: a program of its own, over the same weights, so that the torch form stays usable next to
it. Nothing is traced again, but for writes in place that `without_writes` cannot replace.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from torch.export import ExportedProgram, ModuleCallEntry
from torch.fx import Graph

from kvgraph.compiler.copies import expand_copies
from kvgraph.compiler.functional import without_writes
from kvgraph.compiler.passes import PassOptions, PassReport
from kvgraph.compiler.passes.lists import LOWER_CACHES, run_passes
from kvgraph.compiler.passes.parameters import name_outputs


@dataclass
class Lowering:
    """A program alone, as passes look at it and change it."""

    program: ExportedProgram
    passes: list[PassReport] = field(default_factory=list)
    options = PassOptions(is_padded=False, is_packed=False)

    @property
    def graph(self) -> Graph:
        graph: Graph = self.program.graph
        return graph

    def changed(self, step: str) -> None:
        """Nothing is dumped."""


def lower_caches(program: ExportedProgram) -> ExportedProgram:
    """As `kvgraph.onnx.lower_caches`."""
    lowered = without_writes(_copy(program))
    expand_copies(lowered.graph)
    run_passes(Lowering(lowered), LOWER_CACHES)
    name_outputs(lowered)
    lowered.graph.lint()
    lowered.graph_module.recompile()
    return lowered


def _copy(program: ExportedProgram) -> ExportedProgram:
    """A program with a graph and a signature of its own, over the same weights."""
    graph_module = copy.deepcopy(program.graph_module)
    for mine, node in zip(graph_module.graph.nodes, program.graph.nodes, strict=True):
        mine.name = node.name  # a copy avoids names of Python's, such as input
    first, *others = program.module_call_graph
    return ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[ModuleCallEntry(first.fqn, copy.copy(first.signature)), *others],
        constants=program.constants,
        verifiers=program.verifiers,
    )
