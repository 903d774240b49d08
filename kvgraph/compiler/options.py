"""What compile and plan decide alike from the options that they are given."""

from __future__ import annotations

from kvgraph.contract.backends import Backend, Support
from kvgraph.contract.devices import Target
from kvgraph.errors import UnsupportedError
from kvgraph.ops._linear import WEIGHT_BITS


def check_weights(weights: str | None, target: Target, backend: Backend, dtype: str | None) -> None:
    """UnsupportedError for weights that a graph for the target, or activations of `dtype`, cannot
    have."""
    known = ["fp32", *WEIGHT_BITS]
    if weights is None:
        return
    if weights not in known:
        raise UnsupportedError(f"weights: expected one of {known}, got {weights!r}")
    if target.kind != "cpu":
        raise UnsupportedError(
            f"weights: expected none for target {target.kind}, whose weights have the activations' "
            f"--dtype, got {weights!r}"
        )
    if "weight_bits" not in backend.targets[target.kind].options:
        raise UnsupportedError(
            f"weights: expected none for backend {backend.name}, which packs none, got {weights!r}"
        )
    if dtype not in (None, "float32"):
        raise UnsupportedError(
            f"dtype: expected float32 activations with weights {weights!r}, got {dtype!r}"
        )


def default_weights(stored_dtype: str, support: Support) -> str:
    """What linear layers keep under float32 activations by default."""
    packs = "weight_bits" in support.options
    return "bf16" if packs and stored_dtype == "bfloat16" else "fp32"
