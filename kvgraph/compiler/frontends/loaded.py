"""Load weights with transformers, which reads all of them into memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from kvgraph.compiler.checkpoint_files import INDEX, INDEXES, PICKLED, WHOLE, stored_tensors
from kvgraph.compiler.frontends.left_over import incomplete
from kvgraph.compiler.quiet import first_line, quiet_warnings
from kvgraph.errors import ModelError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

UNPICKLER = re.compile(r"WeightsUnpickler error: (.*?)(?: was not an allowed|\n|$)")
"""The part of torch's message that names what it refuses to unpickle, without the advice to load it
all the same."""


def load_weights(
    transformers: ModuleType,
    folder: Path,
    config: PretrainedConfig,
    dtype: str,
    implementations: Mapping[str, str],
) -> tuple[PreTrainedModel, list[str]]:
    """The loaded model, and names of tensors for which it has no parameter.

    ModelError if weights cannot be read, are missing, or have other shapes.
    """
    if not any((folder / name).is_file() for name in (WHOLE, PICKLED, *INDEXES)):
        raise ModelError(
            f"{folder}: expected weights in {WHOLE} or {INDEX}, got none; take all files of the "
            "checkpoint from its publisher"
        )
    stored_tensors(folder)  # refuses shards that do not fit each other, or their index
    try:
        with quiet_warnings():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=getattr(torch, dtype),
                **implementations,
                generation_config=transformers.GenerationConfig(),  # nothing uses the folder's
                local_files_only=True,
                ignore_mismatched_sizes=True,  # info lists them
                output_loading_info=True,
            )
    except Exception as error:
        reraise_if_signalled(error)
        why = _of_pickles(folder, error) or first_line(error)
        raise ModelError(f"{folder}: cannot read the weights: {why}") from error
    left = sorted(info.get("unexpected_keys") or ())
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            raise incomplete(folder, problem, min(map(_said, info[problem])), left)
    return model, left


def _said(problem: str | tuple[str, torch.Size, torch.Size]) -> str:
    """The problem of one entry: a name, a sentence, or a name with both shapes."""
    if isinstance(problem, str):
        return problem
    name, found, wanted = problem
    return f"{name} {list(found)} for {list(wanted)}"


def _of_pickles(folder: Path, error: Exception) -> str:
    """Why pytorch_model.bin, or a shard of its index, cannot be read, as text for an error.

    Empty if the folder's weights are safetensors, or if the error has another cause.
    """
    is_of_file = isinstance(error, EOFError | UnpicklingError | RuntimeError)
    if isinstance(error, OSError):
        is_of_file = error.errno is not None and error.filename is None
    found = [name for name in (WHOLE, INDEX, PICKLED, INDEXES[1]) if (folder / name).is_file()]
    if not is_of_file or not found or found[0] in (WHOLE, INDEX):
        return ""
    said = UNPICKLER.search(str(error))
    why = (said[1] if said else first_line(error).partition(". ")[0]) or type(error).__name__
    name = PICKLED if found[0] == PICKLED else f"a shard of {found[0]}"
    return (
        f"{name}: expected tensors, got a damaged file, or one that holds code ({why}); save the "
        "model as safetensors"
    )
