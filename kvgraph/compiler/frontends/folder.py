"""Read and check the config.json of the model that the user names.

This module imports no framework, so a wrong folder is refused at once, and on any machine.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvgraph.compiler.checkpoint_files import CONFIG, require_fetched
from kvgraph.compiler.frontends.found_instead import (
    ADAPTER,
    INSTEAD,
    MERGE,
    instead_of_a_folder,
    instead_of_a_model,
)
from kvgraph.contract.dtypes import ALL
from kvgraph.contract.files import open_regular, reading
from kvgraph.errors import ModelError, UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

MODELOPT_CONFIG = "hf_quant_config.json"
"""File in which older exports of modelopt describe the quantisation, which config.json leaves out.
"""

MODELOPT = ("modelopt", "modelopt_fp4")
QUANTIZED = (
    "awq",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "gptq",
    *MODELOPT,
    "mxfp4",
)
"""Quantisation methods whose checkpoints can be read (compiler/quantized)."""

AUTO_ROUND = {"auto_round:auto_awq": "awq", "auto_round:auto_gptq": "gptq"}
"""`packing_format` of auto-round's own checkpoints -> the method with the same layout."""

PLAIN_BITS = 16
"""Bits that auto-round states for a layer that stays as it is."""

BLOCK = re.compile(r"(\d{1,9})x(\d{1,9})")
"""A block's height and width as text, such as "64x48"."""

DEFAULT_BLOCK = [128, 128]
"""`weight_block_size` of method fp8 where a configuration lacks it: transformers' default."""

DTYPE_FIELDS = ("dtype", "torch_dtype")
"""Fields in which a configuration names the dtype of its weights, in order of precedence."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers without a window, and with one."""

NO_LIMIT = "time_step_limit"
"""A field in which an infinite number is plain: it means that there is no limit."""

TAGGED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Values of `{"__float__": ...}`, as transformers writes numbers that JSON does not have."""

FLOATS = tuple(dtype.name for dtype in ALL if dtype.kind == "float")

GGUF_MAGIC = b"GGUF"
GGUF = f"gguf {secrets.token_hex(16)}"
"""Method of a temporary folder whose configuration names a GGUF file as the place of its weights.
No published configuration can have it."""

Config = Mapping[str, Any]
"""The content of config.json. Types of its values depend on the architecture."""


def read_config(folder: Path) -> Config:
    """The configuration of the checkpoint in `folder`.

    ModelError or UnsupportedError, with the next step for the user, if compile cannot take it: a
    name on the hub, an adapter, a folder with a GGUF file, an unknown quantisation method.
    """
    path = folder / CONFIG
    is_one = folder.is_file() or folder.is_symlink()
    require_fetched([path] if folder.is_dir() else [folder] if is_one else [])
    if not folder.is_dir():
        raise ModelError(f"{folder}: expected a model folder, got {instead_of_a_folder(folder)}")
    if path.is_file() and (folder / ADAPTER).is_file():
        raise ModelError(
            f"{folder}: expected a model folder, got a model and a LoRA adapter in one; if the "
            f"model is the merged one, move {ADAPTER} and the adapter's weights away, else merge "
            f"the adapter into its base model {MERGE}"
        )
    if not path.is_file():
        raise ModelError(
            f"{folder}: expected {CONFIG} in a model folder, got {instead_of_a_model(folder)}"
        )
    config = read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path}: expected a model_type, got none")
    _require_finite(path, config)
    beside = folder / MODELOPT_CONFIG
    if beside.is_file() and quantization(config) is None:
        given = read_json(beside)
        said = given.get("quantization") if isinstance(given, dict) else None
        if not isinstance(said, dict):
            raise ModelError(f"{beside}: expected quantization, an object, got none")
        if said.get("quant_algo"):
            config["quantization_config"] = said | {"quant_method": "modelopt"}
    _require_known_weights(path, config)
    _settle_dtypes(path, config)
    return config


def read_json(path: Path) -> object:
    """The content of a JSON file. ModelError if it cannot be read, or is not JSON."""
    try:
        with reading(path, ModelError), open_regular(path) as file:
            found: object = json.loads(file.read().decode())
            return found
    except ModelError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reraise_if_signalled(error)
        raise ModelError(f"{path}: expected JSON, got a damaged file ({error})") from error


def _require_finite(path: Path, config: Mapping[str, object]) -> None:
    """Raise ModelError for a number that is not finite: Python reads Infinity and NaN in JSON, and
    a model of them compiles, with logits that are all equal."""
    left: list[tuple[str, object]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict) and isinstance(value.get("__float__"), str):
            value = TAGGED.get(value["__float__"])
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelError(f"{path}: {name}: expected a finite number, got {value}; correct it")
        if isinstance(value, dict):
            left += [(f"{name}: {own}", each) for own, each in value.items() if own != NO_LIMIT]
        elif isinstance(value, list) and name != NO_LIMIT:
            left += [(name, each) for each in value]


def _settle_dtypes(path: Path, config: dict[str, object]) -> None:
    """Replace dtype names in `config`: "torch.bfloat16" becomes "bfloat16", and "auto" None.

    ModelError for a name that is no float dtype. A text part must have plain names already, because
    transformers reads it unchanged.
    """
    text = config.get("text_config")
    for name in DTYPE_FIELDS:
        given = config.get(name)
        if isinstance(given, str):
            given = None if given == "auto" else given.removeprefix("torch.")
        _require_dtype(path, name, given)
        config |= {name: given} if name in config else {}
        if isinstance(text, dict):
            _require_dtype(path, f"text_config: {name}", text.get(name))


def _require_dtype(path: Path, name: str, given: object) -> None:
    if given is not None and given not in FLOATS:
        raise ModelError(f"{path}: {name}: expected one of {list(FLOATS)}, got {given!r:.100}")


def checkpoint_dtype(config: Config) -> str:
    """The dtype that a configuration names for its text part, else for the whole model, else
    "float32"."""
    text = config.get("text_config")
    parts = [text, config] if isinstance(text, dict) else [config]
    named = (part.get(name) for part in parts for name in DTYPE_FIELDS)
    return str(next(filter(None, named), "float32"))


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file, by its name or its first bytes."""
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def quantization(config: Config) -> Mapping[str, Any] | None:
    """The quantisation fields of a configuration; None if its weights are plain."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    given = config.get("quantization_config") or nested
    given = given or config.get("compression_config")  # early compressed-tensors
    if not given:
        return None
    if not isinstance(given, dict):
        return {"quant_method": given}
    method, inner = given.get("quant_method"), given.get("quantization")
    if method in MODELOPT and isinstance(inner, dict):  # as hf_quant_config.json has it
        return {**given, **inner, "quant_method": method}
    if method == "fp8":
        return {"weight_block_size": DEFAULT_BLOCK, **given}
    return _unified(given)


def first_of(config: Config, *names: str) -> Any:
    """The first of these fields that is given; null means that it is not."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _unified(given: Config) -> Config:
    """Rewrite an auto-round configuration, if it has no rotations, for the method it stores as."""
    layout = AUTO_ROUND.get(str(given.get("packing_format")))
    if given.get("quant_method") != "auto-round" or layout is None or given.get("rotation_config"):
        return given
    others = given.get("extra_config")
    dynamic: dict[str, object] = {}
    for name, rule in others.items() if isinstance(others, dict) else ():
        is_plain = isinstance(rule, dict) and rule.get("bits") == PLAIN_BITS
        dynamic |= {f"-:(?:{name})$": {}} if is_plain else {f"+:(?:{name})$": rule}
    return {**given, "quant_method": layout, "dynamic": dynamic}


def _require_known_weights(path: Path, config: Config) -> None:
    given = quantization(config)
    method = None if given is None else given.get("quant_method")
    if method is None and isinstance(config.get("quantization"), dict):
        raise UnsupportedError(
            f"{path}: quantization: expected none, got a checkpoint of MLX (mlx-lm); {INSTEAD}"
        )
    if given is None:
        return
    if method == "auto-round":
        rotated = " with one" if given.get("rotation_config") else ""
        packing = given.get("packing_format")
        export = "llm_compressor" if packing == "auto_round:llm_compressor" else "auto_gptq"
        raise UnsupportedError(
            f"{path}: quantization_config: expected a packing_format of {list(AUTO_ROUND)} without "
            f"a rotation_config, got {packing!r}{rotated}; export it with "
            f'format="{export}", or {INSTEAD}'
        )
    if method not in (*QUANTIZED, GGUF):
        said = "no quant_method" if method is None else f"a checkpoint quantised by {method!r}"
        file = "give its .gguf file if there is one, or " if method == "gguf" else ""
        raise UnsupportedError(
            f"{path}: quantization_config: expected one of {list(QUANTIZED)}, got {said}; "
            f"{file}{INSTEAD}"
        )
    for name, (fits, expected) in FIELDS.items():
        _require(path, name, given.get(name), fits, expected)
    for name, group in (given.get("config_groups") or {}).items():
        weights = {} if isinstance(group, list) else group.get("weights") or {}
        own = f"config_groups: {name}: weights: block_structure"
        _require(path, own, weights.get("block_structure"), _is_block_or_text, "two sizes")


def _require(
    path: Path, name: str, value: object, fits: Callable[[object], bool], expected: str
) -> None:
    if value is not None and not fits(value):
        raise ModelError(
            f"{path}: quantization_config: {name}: expected {expected}, got {value!r:.100}"
        )


def block_of(value: object) -> tuple[int, int] | None:
    """Height and width of a block of weights that share a scale. `value` is a list `[64, 48]` or
    compressed-tensors' text "64x48"; None for anything else."""
    if isinstance(value, str) and (found := BLOCK.fullmatch(value)):
        value = [int(found[1]), int(found[2])]
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_size, value)):
        return None
    return value[0], value[1]


def _is_block(value: object) -> bool:
    return isinstance(value, list) and _is_block_or_text(value)


def _is_block_or_text(value: object) -> bool:
    return block_of(value) is not None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_groups(value: object) -> bool:
    groups = value.values() if isinstance(value, dict) else ["none"]
    return all(isinstance(group, list) or _is_group(group) for group in groups)


def _is_group(group: object) -> bool:
    return isinstance(group, dict) and isinstance(group.get("weights") or {}, dict)


FIELDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "config_groups": (_are_groups, "objects or lists by name"),
    "dynamic": (lambda value: isinstance(value, dict), "an object"),
    "extra_config": (lambda value: isinstance(value, dict), "an object"),
    "sparsity_config": (lambda value: isinstance(value, dict), "an object"),
    "transform_config": (lambda value: isinstance(value, dict), "an object"),
    "weight_block_size": (_is_block, "two sizes"),
}
"""Quantisation fields that are checked: a test of the value, and the expected kind as text."""
