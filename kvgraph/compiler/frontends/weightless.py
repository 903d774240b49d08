"""A decoder of transformers without its weights: parameters are fake, buffers are real.

Applies where every parameter is stored under its own name and in its own shape. Where
transformers renames, merges or converts what is stored, the weights have to pass through memory,
and `locate` says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kvgraph.compiler.checkpoint import READ_DTYPES, Checkpoint
from kvgraph.compiler.shards import Stored, stored_tensors
from kvgraph.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def fake_parameters() -> Iterator[None]:
    """Modules made within get parameters that have no storage; their buffers stay real.

    Buffers hold what is computed from the configuration (rotary frequencies); memory that a
    module takes for a parameter's first value is not touched and given back at once.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or isinstance(parameter, FakeTensor):
            return None  # as it is: a tied parameter stays one
        with mode:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            return nn.Parameter(empty, requires_grad=False)

    hook = nn.modules.module.register_module_parameter_registration_hook(fake)
    try:
        yield
    finally:
        hook.remove()


def locate(model: nn.Module, folder: Path, dtype: torch.dtype) -> tuple[Checkpoint | None, str]:
    """Where the values of `model`'s parameters are, or why they cannot be taken as stored.

    ModelError, as of a real load, where tensors are missing or of another shape.
    """
    stored = stored_tensors(folder)
    wanted = _wanted(model)
    why = _why_loaded(model, stored, wanted, dtype)
    if why:
        return None, why
    found: dict[str, Stored] = {}
    for names, shape in wanted:
        name = next((n for n in names if n in stored), names[0])
        if name not in stored:
            raise _incomplete(folder, "missing_keys", name)
        if stored[name].shape != shape:
            both = f"{name} {list(stored[name].shape)} for {list(shape)}"
            raise _incomplete(folder, "mismatched_keys", both)
        found |= dict.fromkeys(names, stored[name])
    return Checkpoint(found), ""


def _wanted(model: nn.Module) -> list[tuple[list[str], tuple[int, ...]]]:
    """Names that share a tensor, and its shape, of what a checkpoint stores of `model`."""
    names: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return [(tied, tuple(state[tied[0]].shape)) for tied in names.values()]


def _why_loaded(
    model: PreTrainedModel,
    stored: Mapping[str, Stored],
    wanted: list[tuple[list[str], tuple[int, ...]]],
    dtype: torch.dtype,
) -> str:
    """Why transformers has to load the weights itself; empty where it need not."""
    if not stored:
        return "the checkpoint has no safetensors"
    if getattr(model.config, "quantization_config", None):
        return "the checkpoint is quantised"
    if _kept_in_float32(model, dtype):
        return "transformers keeps some of them in float32"
    for names, _ in wanted:
        present = [name for name in names if name in stored]
        if len(present) > 1:
            return f"tied {' and '.join(present)} are both stored"
        if present and stored[present[0]].dtype not in READ_DTYPES:
            return f"{present[0]} is stored as {stored[present[0]].dtype}"
    converted = _first_converted(model, stored)
    if converted:
        return f"transformers converts {converted}"
    known = {name for names, _ in wanted for name in names}
    missing = [names[0] for names, _ in wanted if not any(name in stored for name in names)]
    unknown = sorted(stored.keys() - known)
    if missing and unknown:
        return f"{missing[0]} is not stored under its name, and {unknown[0]} is no parameter"
    return ""


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    always = getattr(model, "_keep_in_fp32_modules_strict", None)
    in_half = getattr(model, "_keep_in_fp32_modules", None)
    return bool(
        (always and dtype in (torch.float16, torch.bfloat16))
        or (in_half and dtype == torch.float16)
    )


def _first_converted(model: PreTrainedModel, stored: Mapping[str, Stored]) -> str:
    """A stored tensor that transformers would rename or compute others from."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return "names in a way that this version does not say"
    transforms = get_model_conversion_mapping(model)
    for name in stored:
        for transform in transforms:
            renamed, pattern = transform.rename_source_key(name)
            if renamed != name or pattern is not None:
                return name
    return ""


def _incomplete(folder: Path, problem: str, first: str) -> ModelError:
    return ModelError(
        f"{folder}: expected weights for every parameter, got {problem} such as {first}"
    )
