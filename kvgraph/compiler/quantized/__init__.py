"""Read quantised checkpoints as the numbers that their weights represent.

Each method decides which stored tensors make one weight, and how its rows are computed from them.
So code that reads plain checkpoints reads these too: names, shapes and conversions are those of the
model. At most one packed tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kvgraph.compiler.checkpoint_files import StoredTensor, shards_of
from kvgraph.compiler.frontends.folder import Config, quantization
from kvgraph.compiler.frontends.found_instead import INSTEAD
from kvgraph.compiler.quantized import (
    activations,
    awq,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)
from kvgraph.compiler.quantized.parts import LEFT, Parts, Refused
from kvgraph.compiler.values import TORCH_DTYPES, Plain, Values
from kvgraph.errors import UnsupportedError

METHODS: Mapping[str, Callable[[Parts, Config], dict[str, Values]]] = {
    "awq": awq.weights,
    "compressed-tensors": compressed_tensors.weights,
    "fbgemm_fp8": fp8.weights,
    "fp8": fp8.weights,
    "gptq": gptq.weights,
    "modelopt": modelopt.weights,
    "modelopt_fp4": modelopt.weights,
    "mxfp4": mxfp4.weights,
}
"""`quant_method` of a configuration -> function that reads its weights."""

WITH_SCALES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8")
"""Stored types of numbers that mean nothing without a scale."""

PACKED = (".qweight", ".weight_packed")
"""Ends of names of tensors that mean nothing without scales, whatever their type."""

SCALES = (".weight_scale", ".weight_scale_inv", ".weight.absmax", ".SCB")
"""Ends of names of scales."""

FACTORS = ("scale", "scales", "g_idx")
"""Ends of names of tensors next to a quantised weight that change what it means."""

OLDER_CONFIGS = ("quantize_config.json", "quant_config.json")
"""Files in which early AutoGPTQ and AutoAWQ wrote the settings that are in config.json now."""


def weights_of(
    folder: Path, config: Config, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, Values], str]:
    """Values of the checkpoint's weights by their names, and text for their quantised form.

    The text is empty for a plain checkpoint. A weight whose tensors cannot be read raises its error
    once its shape, dtype or numbers are asked for.
    UnsupportedError: the form of all weights cannot be read; the message says which forms can.
    """
    readable = {k: each for k, each in stored.items() if each.dtype in TORCH_DTYPES}
    given = quantization(config)
    if given is None:
        _require_scales(folder, stored)
        require_plain_names(folder, stored)
        return {name: Plain(each) for name, each in readable.items()}, ""
    method = str(given["quant_method"])
    unread = {name: each.dtype for name, each in stored.items() if name not in readable}
    parts = Parts(folder, method, readable, unread, shards_of(folder))
    parts.taken.update(name for name in readable if name.endswith(LEFT))
    found = METHODS[method](parts, given)
    others = {name: Plain(each) for name, each in readable.items() if name not in parts.taken}
    found |= _refused(parts, found, stored)
    x_bits = activations.bits(given)
    for each in found.values():
        each.x_bits = x_bits
    unused = f"in no quantised form, though quantization_config says {method}"
    return {**others, **found}, parts.text if found else unused


def _refused(
    parts: Parts, found: Mapping[str, Values], stored: Mapping[str, StoredTensor]
) -> dict[str, Values]:
    """The weights of tensors that no method has read: parts of a weight in `found`, and numbers
    that need scales."""
    made: dict[str, Values] = {}
    for name in sorted(stored.keys() - parts.taken):
        stem, _, own = name.rpartition(".")
        packed = next((end for end in PACKED if name.endswith(end)), None)
        is_part = own.startswith("weight_") or own.endswith(FACTORS)
        if is_part and f"{stem}.weight" in found:
            weight, got = f"{stem}.weight", f"a part of {stem}.weight that is not read"
            error = parts.refuse(name, "none", got)
        elif _needs_scales(stored[name]):
            weight = name if packed is None else f"{name.removesuffix(packed)}.weight"
            error = _without_scales(parts.folder, name, stored[name].dtype)
        else:
            continue
        if not isinstance(found.get(weight), Refused):
            made.setdefault(weight, Refused(f"{parts.folder}: {weight}", error))
    return made


def _needs_scales(stored: StoredTensor) -> bool:
    has_scales = stored.dtype in WITH_SCALES and len(stored.shape) > 1
    return has_scales or stored.name.endswith(PACKED)


def _require_scales(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Raise UnsupportedError if a tensor of a plain checkpoint needs scales."""
    for name, each in sorted(stored.items()):
        if _needs_scales(each):
            raise _without_scales(folder, name, each.dtype)


def require_plain_names(folder: Path, names: Iterable[str]) -> None:
    """Raise UnsupportedError if tensors with these names need scales; they are not at hand."""
    for name in sorted(names):
        if name.endswith(PACKED):
            raise _without_scales(folder, name, "packed numbers, by its name")
        if name.endswith(SCALES):
            raise UnsupportedError(
                f"{folder}: expected quantization_config in config.json for tensors such as "
                f"{name}, got none; {_instead(folder)}"
            )


def _without_scales(folder: Path, name: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        f"{folder}: {name}: expected numbers that quantization_config in config.json says the "
        f"scales of, got {got}; {_instead(folder)}"
    )


def _instead(folder: Path) -> str:
    older = next((name for name in OLDER_CONFIGS if (folder / name).is_file()), None)
    if older is None:
        return INSTEAD
    return f"copy {older} there with its quant_method, 'gptq' or 'awq', or {INSTEAD}"
