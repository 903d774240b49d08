"""What a plan reserves for a step, against what is alive in exported programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.described import ModelSizes
from kvgraph.compiler.passes.pack_experts import pack_experts
from kvgraph.compiler.reserve import EXPERTS_BYTES, reserve_of
from kvgraph.compiler.step_memory import STEP, sizes
from kvgraph.contract.dims import NUM_LOGITS, TOTAL_SEQ_LEN
from kvgraph.contract.signature import GraphSignature
from tests.support.models import sizes_of
from tests.support.programs import packed_by, program_of

VIEWS = {"alias", "expand", "permute", "reshape", "select", "slice", "squeeze", "transpose"} | {
    "unsqueeze",
    "view",
}


def peak(program: ExportedProgram, signature: GraphSignature) -> int:
    """Most bytes of values that are alive at once; a view keeps what it is of."""
    nbytes = {each.node: each.nbytes for each in sizes(program, signature)}
    nodes = list(program.graph.nodes)
    last: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        for used in node.all_input_nodes:
            last[_owner(used)] = i
    gone: dict[int, list[Node]] = {}
    for node, i in last.items():
        gone.setdefault(i, []).append(node)
    return max(_alive(nodes, nbytes, gone))


def _alive(
    nodes: list[Node], nbytes: dict[Node, int], gone: dict[int, list[Node]]
) -> Iterator[int]:
    alive = 0
    for i, node in enumerate(nodes):
        alive += nbytes.get(node, 0) if _owner(node) is node else 0
        yield alive
        alive -= sum(nbytes.get(each, 0) for each in gone.get(i, []))


def _owner(node: Node) -> Node:
    while isinstance(node.target, torch._ops.OpOverload) and (
        node.target._schema.name.partition("::")[2] in VIEWS
    ):
        node = node.all_input_nodes[0]
    return node


def reserved(model: ModelSizes, *, on_cpu: bool = False) -> int:
    tokens, rows = STEP[TOTAL_SEQ_LEN], STEP[NUM_LOGITS]
    return reserve_of(model, "float32", tokens=tokens, rows=rows, ranks=1, on_cpu=on_cpu).nbytes


DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "apertus")


@pytest.mark.parametrize("name", DENSE)
def test_the_reserve_holds_what_is_alive(name: str, model_folder: Callable[[str], Path]) -> None:
    """Before passes fuse anything; and it is not many times that."""
    alive = peak(*program_of(model_folder(name), "float32"))
    most = reserved(sizes_of(model_folder(name)))
    assert alive <= most <= 3 * alive


def test_experts_have_a_scratch_of_their_own(model_folder: Callable[[str], Path]) -> None:
    program, signature = program_of(model_folder("gpt_oss"), "float32")
    packed_by(pack_experts, program, 8)
    model = sizes_of(model_folder("gpt_oss"))
    assert peak(program, signature) <= reserved(model)
    assert reserved(model, on_cpu=True) == reserved(model) + EXPERTS_BYTES


def test_ranks_hold_their_part_of_the_logits_and_the_whole(
    model_folder: Callable[[str], Path],
) -> None:
    model = sizes_of(model_folder("llama"), 2)
    made = reserve_of(model, "float32", tokens=10, rows=3, ranks=2, on_cpu=True)
    assert (made.logits_per_row, made.values_per_token) == (160 + 80, 2 * 64 + 4 * 64)
    assert made.nbytes == 4 * (10 * made.values_per_token + 3 * made.logits_per_row)
