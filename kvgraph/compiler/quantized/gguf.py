"""Weights of a GGUF file by the names of a model's parameters.

The gguf package decodes its blocks, and transformers says which tensors are a parameter, and how
llama.cpp changed them (it permutes queries and keys of Llama).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraph.compiler.frontends.folder import Config
from kvgraph.compiler.frontends.gguf import ROTARY, open_file
from kvgraph.compiler.values import PLAIN_BITS, Converted, Values
from kvgraph.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from transformers import PreTrainedModel
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor


def weights(model: PreTrainedModel, config: Config) -> tuple[dict[str, Values], str]:
    """Values of parameters, and the types of blocks that they are stored in.

    UnsupportedError for a tensor that the model has no use for: it would compute something else.
    """
    from transformers import modeling_gguf_pytorch_utils as reading

    path = Path(config["quantization_config"]["file"])
    reader = open_file(path)
    kind = reader.get_field("general.architecture").contents()
    processor = reading.TENSOR_PROCESSORS.get(kind, reading.TensorProcessor)(config=dict(config))
    names = reading.get_gguf_hf_weights_map(model, processor)
    state = model.state_dict(keep_vars=True)
    sources: dict[str, list[ReaderTensor]] = {}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")  # experts are a parameter, not a module's
        name = names.get(tensor.name, names.get(stem))
        if name is not None:
            sources.setdefault(name, []).append(tensor)
        elif tensor.name != ROTARY:
            raise UnsupportedError(
                f"{path}: expected tensors of {model.config.model_type!r} alone, got {tensor.name}"
            )
    kinds = sorted({t.tensor_type.name for t in reader.tensors if len(t.shape) > 1})
    return {
        name: Converted(
            f"{path}: {tensors[0].name}",
            state[name].shape,
            torch.float32,
            partial(_decode, path, name, tensors, processor, tuple(state[name].shape)),
            _nearest_bits(tensors),
        )
        for name, tensors in sources.items()
    }, ", ".join(["gguf", *kinds])


def _nearest_bits(tensors: Sequence[ReaderTensor]) -> int:
    """Of packed weights."""
    bits = 8 * sum(int(t.n_bytes) for t in tensors) / sum(int(t.n_elements) for t in tensors)
    return 4 if bits < 5.5 else 8 if bits < 10 else PLAIN_BITS


def _decode(
    path: Path,
    name: str,
    tensors: Sequence[ReaderTensor],
    processor: TensorProcessor,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """A parameter of one tensor, or of two that the processor joins: gate and up of experts."""
    from gguf import dequantize

    own = {tensor.name.removesuffix(".weight"): name for tensor in tensors}
    parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
    found: torch.Tensor | None = None
    for tensor in tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        made = processor.process(
            weights=numbers, name=tensor.name, tensor_key_mapping=own, parsed_parameters=parsed
        )
        found = parsed["tensors"].get(name)
        if found is None:
            found = torch.from_numpy(np.array(made.weights, np.float32))
    assert found is not None
    if tuple(found.shape) != shape:
        raise ModelError(
            f"{path}: {tensors[0].name}: expected {list(shape)} from its configuration, got "
            f"{list(found.shape)}"
        )
    return found
