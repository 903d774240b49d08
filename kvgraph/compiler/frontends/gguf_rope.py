"""GGUF: rotary parameters from the fields and tensors of a file, as llama.cpp computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kvgraph.compiler.frontends.gguf_fields import refuse
from kvgraph.compiler.frontends.gguf_file import Metadata
from kvgraph.contract.dims import Array
from kvgraph.contract.plain import JsonObject

ROTARY = "rope_freqs.weight"
LLAMA3 = {
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA4 = LLAMA3 | {"high_freq_factor": 1.0}
"""Numbers of Meta's configurations of Llama 3.1 and Llama 4. A file holds only the factors that
they give, which are compared."""

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

LONG_ROPE = ("phi3",)
"""Architectures that may have LONG and SHORT."""

PROPORTIONAL = ("gemma4",)
"""Architectures whose factors are 1 for pairs that rotate, and STILL for others."""

STILL = 1e30
"""Factor that llama.cpp's converter writes for pairs that do not rotate."""

MSCALE = {"mistral3": 1, "deepseek2": 10}
"""Architectures whose YaRN may have factors of attention of its own -> `mscale_all_dim` of a
configuration, divided by the file's field."""


def is_rotary(kind: str, tensor: str) -> bool:
    """Whether a tensor of architecture `kind` makes rotary parameters, and no weight."""
    return tensor == ROTARY or (tensor in (LONG, SHORT) and kind in LONG_ROPE)


def rope(given: Metadata, width: int) -> JsonObject:
    """Rotary parameters for heads of `width`. UnsupportedError for a scaling that is not known."""
    base = given.number("rope.freq_base", 10000)
    tensors = {
        each.name: np.array(each.data)
        for each in given.reader.tensors
        if is_rotary(given.kind, each.name)
    }
    if LONG in tensors or SHORT in tensors:
        return _long(given, base, tensors)
    scaled = _scaled(given, base)
    if ROTARY not in tensors:
        return scaled
    if scaled["rope_type"] != "default":
        raise given.refuse("rope.scaling.type", f"none beside {ROTARY}")
    if given.kind in PROPORTIONAL:
        return _proportional(given, base, width, tensors[ROTARY])
    return _llama3(given, base, width, tensors[ROTARY])


def _long(given: Metadata, base: float, tensors: Mapping[str, Array]) -> JsonObject:
    """LongRoPE: factors for contexts up to the original length, and for longer ones."""
    if given.get("rope.scaling.type") not in (None, "longrope"):
        raise given.refuse("rope.scaling.type", f"'longrope' beside {LONG}")
    for name in (LONG, SHORT):
        if name not in tensors:
            raise refuse(given.path, name, f"a tensor beside the other of {LONG, SHORT}", "none")
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        given.require(name, 1)
    for name in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier"):
        given.require(name, 0)
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "long_factor": [float(each) for each in tensors[LONG]],
        "short_factor": [float(each) for each in tensors[SHORT]],
        "attention_factor": given.number("rope.scaling.attn_factor", 1),
        "original_max_position_embeddings": int(
            given.required("rope.scaling.original_context_length")
        ),
    }


def _scaled(given: Metadata, base: float) -> JsonObject:
    """Rotary parameters with the scaling of the file's fields, or without one."""
    kind = given.get("rope.scaling.type") or "linear"  # llama.cpp's default
    if kind not in ("none", "linear", "yarn"):
        raise given.refuse("rope.scaling.type", "none, 'linear' or 'yarn'")
    old = given.number("rope.scale_linear", 1)
    factor = given.number("rope.scaling.factor", old) or 1.0
    plain: list[tuple[str, float]] = [("attn_factor", 1)]
    if given.kind not in MSCALE:
        plain.append(("yarn_log_multiplier", 0))
    plain.append(("yarn_ext_factor", int(kind == "yarn")))
    if kind == "yarn":
        plain.append(("yarn_attn_factor", 1 + 0.1 * math.log(max(1.0, factor))))
    for name, value in plain:
        given.require(f"rope.scaling.{name}", value)
    if kind == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": base}
    scaled: JsonObject = {"rope_type": kind, "rope_theta": base, "factor": factor}
    if kind == "yarn":
        context = given.number("context_length", 0)
        original = given.number("rope.scaling.original_context_length", context)
        scaled |= {
            "original_max_position_embeddings": int(original),
            "beta_fast": given.number("rope.scaling.yarn_beta_fast", 32),
            "beta_slow": given.number("rope.scaling.yarn_beta_slow", 1),
        }
        if log := given.number("rope.scaling.yarn_log_multiplier", 0):
            mscale = log * MSCALE[given.kind]
            own = mscale if given.kind == "deepseek2" else 1.0
            scaled |= {"mscale": own, "mscale_all_dim": mscale}
    return scaled


def _proportional(given: Metadata, base: float, width: int, by: Array) -> JsonObject:
    """Rope parameters of heads of `width` whose last pairs do not rotate: their factors in `by` are
    so large that they divide frequencies to nothing. UnsupportedError for other factors."""
    rotates = int((by == 1).sum())
    if 2 * len(by) != width or not ((by[:rotates] == 1).all() and (by[rotates:] >= STILL).all()):
        raise refuse(given.path, ROTARY, f"factors 1, then factors of {STILL:g}", "others")
    part = rotates / len(by)
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": part}


def _llama3(given: Metadata, base: float, width: int, by: Array) -> JsonObject:
    """Rope parameters of Llama 3.1 or 4 for heads of `width`, with frequencies divided by `by`.

    UnsupportedError if `by` are not their factors.
    """
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted: JsonObject = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": float(by.max()),
        **(LLAMA4 if given.kind == "llama4" else LLAMA3),
    }
    config = transformers.LlamaConfig(head_dim=width, rope_parameters=dict(wanted))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / base ** (np.arange(0, width, 2) / width)
    if 2 * len(by) != width or not np.allclose(plain / scaled.numpy(), by, rtol=1e-3):
        name = "4" if given.kind == "llama4" else "3.1"
        raise refuse(given.path, ROTARY, f"the factors of Llama {name}", "others")
    return wanted
