"""Read weights of a GGUF file by the names of a model's parameters.

The gguf package decodes the blocks. transformers knows which tensors make a parameter, and how
llama.cpp changed them (it permutes queries and keys of Llama).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraph.compiler.frontends.folder import Config
from kvgraph.compiler.frontends.found_instead import damaged
from kvgraph.compiler.frontends.gguf_fields import field, refuse
from kvgraph.compiler.frontends.gguf_file import nearest_bits, open_file
from kvgraph.compiler.frontends.gguf_rope import is_rotary
from kvgraph.compiler.quantized.gguf_blocks import (
    Blocks,
    Data,
    Decoded,
    decoded,
    do_fit,
    kind_of,
    of_experts,
    of_halves,
    of_matrix,
)
from kvgraph.compiler.quantized.gguf_processors import (
    Mixture,
    Parsed,
    Processor,
    are_of_experts,
    processor_of,
    with_halves,
)
from kvgraph.compiler.values import TORCH_DTYPES, Converted, Values
from kvgraph.contract.dims import Array
from kvgraph.errors import ModelError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from transformers import PreTrainedModel

LAYER = re.compile(r"blk\.(\d+)\.")
KEYS_AND_VALUES = re.compile(LAYER.pattern + r"attn_(k|v|k_norm)\.weight")

PREDICTING = ("glm4_moe", "deepseek_v3")
"""Types of models whose files may have layers that predict more tokens."""


def weights(model: PreTrainedModel, config: Config) -> tuple[dict[str, Values], str]:
    """Values by the parameters' names, and text for the types of blocks in the file.

    UnsupportedError if the model has no parameter for a tensor: then it would compute something
    else than the file's model.
    """
    from transformers import modeling_gguf_pytorch_utils as reading

    path = Path(config["quantization_config"]["file"])
    reader = open_file(path)
    kind = str(field(reader, "general.architecture"))
    processor = processor_of(kind, config)
    names = with_halves(reading.get_gguf_hf_weights_map(model, processor, model_type=kind))
    state = model.state_dict(keep_vars=True)
    sources: dict[str, list[ReaderTensor]] = {}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")  # the map has experts without ".weight"
        name = names.get(tensor.name, names.get(stem))
        if name is not None:
            sources.setdefault(name, []).append(tensor)
        elif not (is_rotary(kind, tensor.name) or _is_unused(tensor.name, model)):
            wanted = f"tensors of {model.config.model_type!r} alone"
            raise refuse(path, tensor.name, wanted, "one that it lacks")
    kinds = sorted({t.tensor_type.name for t in reader.tensors if len(t.shape) > 1})
    values = {
        name: _values(path, name, tensors, processor, tuple(state[name].shape))
        for name, tensors in sources.items()
    }
    return values, ", ".join(["gguf", *kinds])


def _is_unused(tensor: str, model: PreTrainedModel) -> bool:
    """Whether a tensor is of a layer behind the model's, which predicts one more token, or makes
    keys and values of a layer that reads those of another."""
    layer = LAYER.match(tensor)
    if layer is None:
        return False
    behind = int(layer[1]) - model.config.num_hidden_layers
    if behind >= 0:
        return model.config.model_type in PREDICTING
    shared = getattr(model.config, "num_kv_shared_layers", 0)
    return behind >= -shared and KEYS_AND_VALUES.fullmatch(tensor) is not None


def _values(
    path: Path,
    name: str,
    tensors: list[ReaderTensor],
    processor: Mixture,
    shape: tuple[int, ...],
) -> Values:
    _require_count(path, tensors, shape)
    where, each = f"{path}: {tensors[0].name}", [nearest_bits(tensor) for tensor in tensors]
    found, kind, bits = _made_of(name, tensors, processor, shape), kind_of(tensors), max(each)
    made: Values
    if found is None:
        compute = partial(_decode, path, name, tensors, processor, shape)
        made = Converted(where, shape, torch.float32, compute, bits)
    else:
        data, is_transposed = found
        made = Decoded(where, shape, bits, data, is_transposed=is_transposed)
        if kind is not None:
            made = Blocks(where, shape, bits, data, kind, is_transposed=is_transposed)
    made.least_bits = min(each)
    kinds = {tensor.tensor_type.name for tensor in tensors}
    made.plain_dtype = TORCH_DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
    return made


def _made_of(
    name: str, tensors: Sequence[ReaderTensor], processor: Mixture, shape: tuple[int, ...]
) -> tuple[Data, bool] | None:
    """The rows of a parameter, and whether the parameter is their transpose; None if transformers
    changes more than the order of tensors' rows."""
    first, is_matrix = tensors[0], len(shape) == 2
    if is_matrix and len(tensors) == 1 and first.data.ndim == 2:
        order = _order_of_rows(name, first, processor, shape[0])
        if order is not None and len(first.data) == shape[0]:
            return of_matrix(first, order), False
        is_turned = do_fit(tensors, shape, are_transposed=True)
        if is_turned and _is_transposed(name, first, processor):
            return of_matrix(first, np.arange(len(first.data))), True
    if not are_of_experts(tensors):
        return None
    if is_matrix and len(tensors) == 2 and do_fit(tensors, shape, are_transposed=False):
        return of_halves(tensors), False
    turned = processor.are_transposed
    if len(shape) == 3 and do_fit(tensors, shape, are_transposed=turned):
        return of_experts(tensors, do_alternate=processor.do_alternate), turned
    return None


def _require_count(path: Path, tensors: Sequence[ReaderTensor], shape: tuple[int, ...]) -> None:
    """Raise ModelError unless a parameter has as many elements as its tensors. transformers may
    repeat those of a smaller one."""
    if sum(int(tensor.n_elements) for tensor in tensors) == math.prod(shape):
        return
    got = " and ".join(str([int(size) for size in tensor.shape[::-1]]) for tensor in tensors)
    raise _misshapen(path, tensors[0], shape, got)


def _misshapen(path: Path, tensor: ReaderTensor, shape: Sequence[int], got: object) -> ModelError:
    return damaged(f"{path}: {tensor.name}", f"{list(shape)} from its configuration", got)


def _order_of_rows(
    name: str, tensor: ReaderTensor, processor: Processor, count: int
) -> Array | None:
    """Index of the tensor's row for each row of the parameter; None if transformers changes more
    than the order of rows."""
    probe = np.stack([np.arange(count), np.full(count, 0.5)], 1).astype(np.float32)
    made = _processed(name, tensor, processor, probe)
    if made is None or np.shape(made) != probe.shape:
        return None
    order = np.asarray(made)[:, 0].astype(np.int64)
    return order if np.array_equal(probe[order], made) else None


def _is_transposed(name: str, tensor: ReaderTensor, processor: Processor) -> bool:
    """Whether transformers transposes a tensor, and changes no more (GPT-2)."""
    probe = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = _processed(name, tensor, processor, probe)
    return made is not None and np.array_equal(probe.T, made)


def _processed(
    name: str, tensor: ReaderTensor, processor: Processor, weights: Array
) -> Array | None:
    """The values that transformers makes of `weights` for a parameter."""
    return processor.process(
        weights=weights.copy(),
        name=tensor.name,
        tensor_key_mapping={tensor.name.removesuffix(".weight"): name},
        parsed_parameters={"tensors": {}},
    ).weights


def _decode(
    path: Path,
    name: str,
    tensors: Sequence[ReaderTensor],
    processor: Processor,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Decode a parameter from one tensor, or from two that the processor joins: gate and up of
    experts. ModelError if the result has another shape."""
    own = {tensor.name.removesuffix(".weight"): name for tensor in tensors}
    parsed: Parsed = {"tensors": {}}
    found: torch.Tensor | None = None
    for tensor in tensors:
        numbers = decoded(tensor)
        try:
            made = processor.process(
                weights=numbers, name=tensor.name, tensor_key_mapping=own, parsed_parameters=parsed
            )
        except Exception as error:  # it expects the shape that llama.cpp writes
            reraise_if_signalled(error)
            raise _misshapen(path, tensor, shape, list(numbers.shape)) from error
        found = parsed["tensors"].get(name)
        if found is None:
            found = torch.from_numpy(np.require(made.weights, np.float32, ["C", "W"]))
    assert found is not None
    if tuple(found.shape) != shape:
        raise _misshapen(path, tensors[0], shape, list(found.shape))
    return found
