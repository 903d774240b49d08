"""What compile and plan decide alike from the options that they are given."""

from __future__ import annotations

from kvgraph.contract.devices import Target
from kvgraph.errors import UnsupportedError
from kvgraph.ops._linear import WEIGHT_BITS

BACKENDS = {"cpu": ("onnx", "torch"), "cuda": ("torch", "tensorrt", "onnx")}
"""Kind of target -> its backends, the default first."""


def check_weights(weights: str | None, target: Target, dtype: str | None) -> None:
    """UnsupportedError for weights that the target, or activations of `dtype`, cannot have."""
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
    if dtype not in (None, "float32"):
        raise UnsupportedError(
            f"dtype: expected float32 activations beside weights {weights!r}, got {dtype!r}"
        )


def in_float32(target: Target, backend: str, weights: str | None) -> bool:
    """Whether activations are float32 whatever the checkpoint's dtype is."""
    return target.kind == "cpu" and (backend == "onnx" or weights is not None)


def default_weights(stored_dtype: str) -> str:
    """What linear layers keep under float32 activations where nobody says."""
    return "bf16" if stored_dtype == "bfloat16" else "fp32"
