"""Which tensors of a GGUF file make a parameter, and how: transformers' rules, with additions."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol, TypedDict, Unpack, cast

import numpy as np
import torch

from kvgraph.compiler.frontends.folder import Config
from kvgraph.contract.dims import Array

EXPERTS = re.compile(r"(?:model\.)?layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
EXPERTS_TENSOR = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.(weight|bias)")

Parsed = dict[str, dict[str, torch.Tensor]]
"""Under "tensors", parameters by name that are made of several tensors."""


class Given(TypedDict):
    """Arguments of `Processor.process`."""

    weights: Array
    name: str
    """The tensor's name."""
    tensor_key_mapping: dict[str, str]
    """Parameters by tensors' names without ".weight"."""
    parsed_parameters: Parsed


class Processed(Protocol):
    """The attribute of transformers' results that is used here."""

    @property
    def weights(self) -> Array | None: ...


class Processor(Protocol):
    """transformers' TensorProcessor."""

    def preprocess_name(self, hf_name: str) -> str:
        """The name of a parameter to look up."""

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        """Add tensors of the parameter `hf_name`, which the gguf package does not know."""

    def process(self, **given: Unpack[Given]) -> Processed:
        """Values of a parameter from a tensor, or None if they are in `parsed_parameters`."""


class Made(NamedTuple):
    weights: Array


class GptOss:
    """Gate and up have alternate outputs of one parameter; outputs are a parameter's last dim."""

    def preprocess_name(self, hf_name: str) -> str:
        return hf_name

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        if (found := EXPERTS.fullmatch(hf_name)) is None:
            return
        end = "bias" if found[3] else "weight"
        for part in PARTS[found[2]]:
            gguf_to_hf_name_map[f"blk.{found[1]}.ffn_{part}_exps.{end}"] = qual_name + hf_name

    def process(self, **given: Unpack[Given]) -> Processed:
        weights, name = given["weights"], given["name"]
        found = EXPERTS_TENSOR.fullmatch(name)
        if found is None:
            return Made(weights)
        if found[2] == "weight":
            weights = weights.swapaxes(-1, -2)
        if found[1] != "down":
            to = given["tensor_key_mapping"][name.removesuffix(".weight")]
            shape = (*weights.shape[:-1], 2 * weights.shape[-1])
            whole = given["parsed_parameters"]["tensors"].setdefault(to, torch.zeros(shape))
            whole[..., int(found[1] == "up") :: 2] = torch.from_numpy(np.array(weights))
        return Made(weights)


class Qwen2Moe:
    """transformers' rules, but the shared expert's gate may be a vector, or a matrix of one row."""

    def __init__(self, theirs: Processor) -> None:
        self._theirs = theirs
        self.preprocess_name = theirs.preprocess_name
        self.perform_fallback_tensor_mapping = theirs.perform_fallback_tensor_mapping

    def process(self, **given: Unpack[Given]) -> Processed:
        if "ffn_gate_inp_shexp" in given["name"]:
            return Made(given["weights"].reshape(1, -1))
        return self._theirs.process(**given)


def processor_of(kind: str, config: Config) -> Processor:
    """The rules for files of architecture `kind`."""
    from transformers import modeling_gguf_pytorch_utils as reading

    if kind == "gpt-oss":
        return GptOss()
    made = reading.TENSOR_PROCESSORS.get(kind, reading.TensorProcessor)(config=dict(config))
    theirs = cast(Processor, made)
    return Qwen2Moe(theirs) if kind == "qwen2moe" else theirs
