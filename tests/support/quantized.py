"""Tiny checkpoints in fewer bits, packed from each method's published layout, and what they mean.

`make(form, plain, out)` packs the linear layers of the plain checkpoint into `out` and returns the
numbers that these stand for, by the names of the plain ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph import KVGraphError

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
"""Stored tensors by the end of their name, and the weight that they stand for."""

GROUP = 32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INSTEAD = "; compile the checkpoint that it was made from, with --weights int4 or int8"
"""How every refusal of such a checkpoint ends."""
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def integers(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[N, K]` -> numbers of 0 up, scales and zero points `[N, G]`; scales fit float16."""
    grouped = weight.unflatten(1, (-1, group))
    most = 2**bits - 1
    if symmetric:
        scale = grouped.abs().amax(-1) * 2 / most
        zero = torch.full(scale.shape, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (high - low) / most
        zero = (-low / scale).round().clamp(1, most)
    scale = scale.half().float()
    numbers = (grouped / scale[..., None]).round() + zero[..., None]
    return numbers.clamp(0, most).int().flatten(1), scale, zero.int()


def spread(part: torch.Tensor, group: int) -> torch.Tensor:
    return part.repeat_interleave(group, 1)


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """`[..., n]` -> int32 words, the lowest bits first."""
    per = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % per))
    words = numbers.long().unflatten(-1, (-1, per)) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.uint32).view(torch.int32)


def gptq(bits: int = 4, *, act_order: bool = False, v2: bool = False) -> Callable[..., Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        inputs = weight.shape[1]
        order = torch.randperm(inputs) if act_order else torch.arange(inputs)
        numbers, scale, zero = integers(weight[:, order], bits, GROUP, False)
        back = order.argsort()
        meant = (numbers - spread(zero, GROUP)) * spread(scale, GROUP)
        return {
            "qweight": packed(numbers[:, back], bits).T.contiguous(),
            "qzeros": packed((zero - int(not v2)).T.contiguous(), bits),
            "scales": scale.T.half().contiguous(),
            "g_idx": (back // GROUP).int(),
        }, meant[:, back]

    return pack


def awq(weight: torch.Tensor) -> Packed:
    numbers, scale, zero = integers(weight, 4, GROUP, False)

    def in_order(part: torch.Tensor) -> torch.Tensor:  # [n, N] -> words
        return packed(part.unflatten(-1, (-1, 8))[..., list(ORDER)].flatten(-2), 4)

    stored = {
        "qweight": in_order(numbers.T.contiguous()),
        "qzeros": in_order(zero.T.contiguous()),
        "scales": scale.T.half().contiguous(),
    }
    return stored, (numbers - spread(zero, GROUP)) * spread(scale, GROUP)


def by_package(**scheme: Any) -> Callable[..., Packed]:
    """Packed, and unpacked again, by the compressed-tensors package."""

    def pack(weight: torch.Tensor) -> Packed:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        form = scheme["format"]
        weights = QuantizationArgs(**scheme["weights"])
        given = QuantizationScheme(targets=["Linear"], weights=weights)
        blocks = weights.block_structure
        if blocks:
            high, wide = (-(-n // b) for n, b in zip(weight.shape, blocks, strict=True))
            whole = torch.zeros(high * blocks[0], wide * blocks[1])
            whole[: weight.shape[0], : weight.shape[1]] = weight
            parts = whole.reshape(high, blocks[0], wide, blocks[1]).transpose(1, 2).flatten(2)
        elif weights.strategy == "tensor":
            parts = weight.reshape(1, 1, -1)
        else:
            parts = weight.unflatten(1, (-1, weights.group_size or weight.shape[1]))
        state = {"weight": weight}
        if weights.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        whole = state.get("weight_global_scale")
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), weights, whole)
        if weights.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state["weight_scale"] = scale.float()
        if not weights.symmetric:
            state["weight_zero_point"] = zero
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, given)
        if whole is None:
            meant = compressor.decompress(dict(stored), given)["weight"]
        else:  # its decompress rounds to bfloat16
            levels = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape).float()
            scale = stored["weight_scale"].float()
            meant = dequantize(levels, scale, args=weights, dtype=levels.dtype, global_scale=whole)
        return {k: v.contiguous() for k, v in stored.items()}, meant

    return pack


def fp8(weight: torch.Tensor, block: tuple[int, int] = (64, 32)) -> Packed:
    scales = torch.empty(*(-(-n // b) for n, b in zip(weight.shape, block, strict=True)))
    stored, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[at] = stored[at].float() * scales[i, j]
    return {"weight": stored, "weight_scale_inv": scales}, meant


def e2m1(scaled: torch.Tensor) -> Packed:
    """The nearest levels, two of them in a byte."""
    level = (scaled.abs()[..., None] - LEVELS).abs().argmin(-1)
    nibbles = level + 8 * (scaled < 0)
    numbers = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8)
    return {"numbers": numbers}, LEVELS[level] * scaled.sign()


def nvfp4(weight: torch.Tensor) -> Packed:
    """As modelopt has it: E4M3 scales of 16 inputs, times one of the tensor."""
    grouped = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (6 * 448)
    scales = (grouped.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    each = scales.float() * whole
    stored, meant = e2m1(grouped / each.clamp(min=1e-9)[..., None])
    return {
        "weight": stored["numbers"].flatten(1),
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.ones(()),
    }, (meant * each[..., None]).flatten(1)


def mxfp4_rows(weight: torch.Tensor) -> Packed:
    """As modelopt has a linear layer."""
    stored, meant = mxfp4(weight.T[None])
    numbers, scales = stored["_blocks"][0].flatten(1), stored["_scales"][0]
    return {"weight": numbers, "weight_scale": scales}, meant[0].T.contiguous()


def mxfp8(weight: torch.Tensor, scales: torch.dtype = torch.uint8) -> Packed:
    """As modelopt has it: scales of 32 inputs that are exponents."""
    grouped = weight.unflatten(1, (-1, 32))
    exponent = (grouped.abs().amax(-1) / 448).log2().ceil().clamp(-20, 20)
    numbers = (grouped / exponent.exp2()[..., None]).to(torch.float8_e4m3fn)
    meant = (numbers.float() * exponent.exp2()[..., None]).flatten(1)
    exponents = (exponent + 127).to(torch.uint8).view(scales)
    return {"weight": numbers.flatten(1), "weight_scale": exponents}, meant


def fp8_of_modelopt(weight: torch.Tensor) -> Packed:
    """Scales of blocks, as modelopt has them."""
    stored, meant = fp8(weight, (128, 128))
    scales = stored.pop("weight_scale_inv")
    return stored | {"weight_scale": scales[:, None, :, None]}, meant


def fp8_inverse(weight: torch.Tensor) -> Packed:
    """Inverse scales of rows, as GPTQModel has them."""
    inverse = 448 / weight.abs().amax(1).clamp(min=1e-6)
    numbers = (weight * inverse[:, None]).to(torch.float8_e4m3fn)
    stored = {"weight": numbers, "weight_scale_inv": inverse}
    return stored, numbers.float() * (1 / inverse)[:, None]


def mxfp4(weight: torch.Tensor) -> Packed:
    """`[E, K, N]`, as gpt-oss has its experts."""
    grouped = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = (grouped.abs().amax(-1) / 6).log2().ceil().clamp(-20, 20)
    stored, meant = e2m1(grouped / exponent.exp2()[..., None])
    meant, blocks = meant * exponent.exp2()[..., None], stored["numbers"]
    scales = (exponent + 127).to(torch.uint8)
    return {"_blocks": blocks, "_scales": scales}, meant.flatten(2).transpose(1, 2).contiguous()


def integer(bits: int, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True} | others


def compressed(
    form: str, inputs: dict[str, Any] | None = None, **weights: Any
) -> tuple[dict[str, Any], Callable[..., Packed]]:
    """As llm-compressor writes a configuration, and the package's own packing. `inputs`: how those
    of a layer are rounded."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return config, by_package(format=form, weights=weights)


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FORMS: Mapping[str, tuple[dict[str, Any], Callable[..., Packed]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq()),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, gptq(8)),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        gptq(act_order=True),
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        gptq(v2=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "w4a16": compressed("pack-quantized", **integer(4, strategy="group", group_size=GROUP)),
    "w4a16-zero-points": compressed(
        "pack-quantized", **integer(4, strategy="group", group_size=GROUP, symmetric=False)
    ),
    "w8a16": compressed("pack-quantized", **integer(8, strategy="group", group_size=GROUP)),
    "w8a16-channel": compressed("pack-quantized", **integer(8, strategy="channel")),
    "w8a8": compressed("int-quantized", **integer(8, strategy="channel")),
    "fp8-channel": compressed("float-quantized", **FLOAT8, strategy="channel"),
    "w8a8-dynamic": compressed(
        "int-quantized",
        integer(8, strategy="token", dynamic=True),
        **integer(8, strategy="channel"),
    ),
    "fp8-dynamic": compressed(
        "float-quantized",
        FLOAT8 | {"strategy": "token", "dynamic": True},
        **FLOAT8,
        strategy="channel",
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        partial(fp8, block=(128, 128)),
    ),
    "fp8-tensor": compressed("float-quantized", **FLOAT8, strategy="tensor"),
    "fp8-block": compressed(
        "float-quantized", **FLOAT8, strategy="block", block_structure=[64, 48]
    ),
    "mxfp4-packed": compressed(
        "mxfp4-pack-quantized",
        **FLOAT8 | {"num_bits": 4},
        strategy="group",
        group_size=32,
        scale_dtype="uint8",
    ),
    "fp8-group": compressed("float-quantized", **FLOAT8, strategy="group", group_size=GROUP),
    "nvfp4-packed": compressed(
        "nvfp4-pack-quantized",
        **FLOAT8 | {"num_bits": 4},
        strategy="tensor_group",
        group_size=16,
        scale_dtype="torch.float8_e4m3fn",
    ),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "mxfp8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, mxfp8),
    "mxfp4-modelopt": ({"quant_method": "modelopt", "quant_algo": "mxfp4"}, mxfp4_rows),
    "mxfp8-e8m0": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        partial(mxfp8, scales=torch.float8_e8m0fnu),
    ),
    "fp8-modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, fp8_of_modelopt),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [64, 32]}, fp8),
    "fp8-usual-blocks": ({"quant_method": "fp8"}, partial(fp8, block=(128, 128))),
    "fp8-inverse": (
        {"quant_method": "fp8", "weight_block_size": None, "weight_scale_semantics": "inverse"},
        fp8_inverse,
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4),
}
"""Name -> quantization_config and what packs a weight."""
WIDE = {"w4a16-128": compressed("pack-quantized", **integer(4, strategy="group", group_size=128))}
"""Forms for layers whose inputs are multiples of 128."""


def make(form: str, plain: Path, out: Path, meant: Path | None = None) -> Path:
    """Pack `plain` into `out`; `meant` becomes a plain checkpoint of what that stands for."""
    torch.manual_seed(3)
    config, pack = {**FORMS, **WIDE}[form]
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    for name, weight in tensors.items():
        if not is_packed(name, form):
            stored[name] = weight
            continue
        parts, tensors[name] = pack(weight.float())
        stem = name if form == "mxfp4" else name.removesuffix("weight")
        stored |= {stem + end: part.contiguous() for end, part in parts.items()}
    save(plain, out, stored, config)
    if meant is not None:
        save(plain, meant, tensors, None)
    return out


def is_packed(name: str, form: str) -> bool:
    """Linear layers of a decoder layer, but for the router; or experts that are one tensor."""
    if form == "mxfp4":
        return name.endswith(("gate_up_proj", "down_proj"))
    return name.endswith("_proj.weight")


def save(plain: Path, out: Path, tensors: Tensors, config: dict[str, Any] | None) -> None:
    shutil.copytree(plain, out)
    contiguous = {name: each.contiguous().clone() for name, each in tensors.items()}
    save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
    given = json.loads((out / "config.json").read_text())
    if config is not None:
        given["quantization_config"] = config
    (out / "config.json").write_text(json.dumps(given))


def mixed(folder: Path, other: Path, stem: str) -> None:
    """`folder` with the tensors of `other` that begin with `stem`."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if not n.startswith(stem)}
    theirs = load_file(other / "model.safetensors").items()
    tensors |= {n: t for n, t in theirs if n.startswith(stem)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_group(folder: Path, form: str, stem: str) -> None:
    """Say in a configuration of compressed-tensors that layers of this stem have another form."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    weights = FORMS[form][0]["config_groups"]["group_0"]["weights"]
    group = {"targets": [f"re:.*{stem.rstrip('.')}"], "weights": weights}
    config["quantization_config"]["config_groups"][form] = group
    path.write_text(json.dumps(config))


def refused(folder: Path) -> str:
    """What a compile says of it; nothing is written."""
    with pytest.raises(KVGraphError) as error:
        kvgraph.compile(folder, folder.with_name("out"), check=False)
    assert not folder.with_name("out").exists()
    return str(error.value)
