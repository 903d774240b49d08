"""Prepare a user's own exported program for plain `torch.onnx.export`.

Decision: the result is a copy over the same weights, so the user's program stays usable. Nothing is
traced again, except for in-place writes that `without_writes` cannot replace call by call.
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
    """A program as passes see and change it, without a model or a cache plan."""

    program: ExportedProgram
    passes: list[PassReport] = field(default_factory=list)
    options = PassOptions(is_padded=False, is_packed=False)

    @property
    def graph(self) -> Graph:
        graph: Graph = self.program.graph
        return graph

    def changed(self, step: str) -> None:
        """Do nothing: no graphs are dumped here."""


def lower_caches(program: ExportedProgram) -> ExportedProgram:
    """Copy `program` with cache ops in ONNX's form; see `kvgraph.onnx.lower_caches`."""
    lowered = without_writes(_copy(program))
    expand_copies(lowered.graph)
    run_passes(Lowering(lowered), LOWER_CACHES)
    name_outputs(lowered)
    lowered.graph.lint()
    lowered.graph_module.recompile()
    return lowered


def _copy(program: ExportedProgram) -> ExportedProgram:
    """A copy of `program` with its own graph and signature, which shares the weights."""
    graph_module = copy.deepcopy(program.graph_module)
    for mine, node in zip(graph_module.graph.nodes, program.graph.nodes, strict=True):
        mine.name = node.name  # deepcopy renames nodes with names of Python builtins, as `input`
    first, *others = program.module_call_graph
    return ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=dict(program.state_dict),
        range_constraints=program.range_constraints,
        module_call_graph=[ModuleCallEntry(first.fqn, copy.copy(first.signature)), *others],
        constants=dict(program.constants),
        verifiers=program.verifiers,
    )
