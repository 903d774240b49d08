"""GGUF: how a model's own code weighs its experts; a file that says otherwise is refused.

llama.cpp's code has the same rules, and reads none of these fields for most of the architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgraph.compiler.frontends.gguf_file import Metadata

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""llama.cpp's numbers of functions that make weights of experts."""

SAID = {
    SOFTMAX: "the softmax",
    SIGMOID: "the sigmoid",
    SOFTMAX_OF_CHOSEN: "the softmax of the chosen experts",
}
GATE, NORM, GROUPS = "expert_gating_func", "expert_weights_norm", "expert_group_count"


@dataclass(frozen=True)
class Router:
    """The function that makes weights of experts, and whether the weights of a token are divided by
    their sum; None: it would change nothing."""

    gate: int
    has_norm: bool | None


ROUTERS: Mapping[str, Router] = {
    **dict.fromkeys(("llama", "qwen3moe", "qwen3vlmoe", "granitemoe"), Router(SOFTMAX, True)),
    **dict.fromkeys(("ernie4_5-moe", "hunyuan-moe", "gemma4"), Router(SOFTMAX, True)),
    **dict.fromkeys(("qwen2moe", "olmoe"), Router(SOFTMAX, False)),
    "gpt-oss": Router(SOFTMAX_OF_CHOSEN, None),
    "llama4": Router(SIGMOID, False),
    "minimax-m2": Router(SIGMOID, True),
}
"""Architectures whose experts are weighed in one way. Those of others have a configuration for it.
"""


def require_router(given: Metadata) -> None:
    """Raise UnsupportedError if a file names another way to weigh experts than its architecture
    has."""
    router = ROUTERS.get(given.kind)
    if router is None or not given.get("expert_count"):
        return
    require_gate(given, router.gate)
    if router.has_norm is not None:
        given.require(NORM, router.has_norm)
    if given.get(GROUPS) not in (None, 0, 1):
        raise given.refuse(GROUPS, "none, or 1")


def require_gate(given: Metadata, gate: int) -> None:
    """Raise UnsupportedError if a file names another function than `gate`."""
    if given.get(GATE) not in (None, 0, gate):
        raise given.refuse(GATE, f"{gate}, {SAID[gate]}")
