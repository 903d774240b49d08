"""Which tensors of a GGUF file make a parameter, and how: transformers' rules, and those of experts
here."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol, TypedDict, Unpack, cast

import numpy as np
import torch

from kvgraph.compiler.frontends.folder import Config
from kvgraph.contract.dims import Array

LAYER = r"(?:model\.)?layers\.(\d+)"
EXPERTS = re.compile(LAYER + r"(?:\.mlp|\.block_sparse_moe)?\.experts\.(gate_up|down)_proj(_bias)?")
PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
EXPERTS_TENSOR = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.(weight|bias)")

LATENT_TENSOR = re.compile(r"blk\.\d+\.attn_(k|v)_b\.weight")

ROUTERS = {
    "ffn_gate_inp.weight": re.compile(LAYER + r"\.block_sparse_moe\.router\.weight"),
    "exp_probs_b.bias": re.compile(
        LAYER + r"\.mlp\.(gate\.(moe_statics\.)?)?e_score_correction_bias"
    ),
    "ffn_gate_inp.scale": re.compile(LAYER + r"\.router\.scale"),
    "ffn_down_exps.scale": re.compile(LAYER + r"\.router\.per_expert_scale"),
}
"""Tensors of a layer -> their parameters, which the gguf package does not know."""

LLAMAS = ("llama", "mistral3", "smollm3", "granite", "granitemoe")
"""Architectures whose queries and keys llama.cpp permutes."""

GEMMAS = ("gemma", "gemma2", "gemma3")
"""Architectures whose norms have 1 added."""

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


class Mixture:
    """Experts of a layer as one parameter `[E, N, K]`, with gate above up. `others`: rules for
    tensors that are no experts."""

    outputs = 1
    """The dim with rows of gate and of up."""

    def __init__(self, others: Processor) -> None:
        self._others = others
        self.preprocess_name = others.preprocess_name

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        names = []
        if found := EXPERTS.fullmatch(hf_name):
            end = "bias" if found[3] else "weight"
            names = [f"blk.{found[1]}.ffn_{part}_exps.{end}" for part in PARTS[found[2]]]
        for tensor, router in ROUTERS.items():
            if found := router.fullmatch(hf_name):
                names.append(f"blk.{found[1]}.{tensor}")
        gguf_to_hf_name_map |= dict.fromkeys(names, qual_name + hf_name)

    def process(self, **given: Unpack[Given]) -> Processed:
        name = given["name"]
        if "ffn_gate_inp_shexp" in name:  # a vector, or a matrix of one row
            return Made(given["weights"].reshape(1, -1))
        found = EXPERTS_TENSOR.fullmatch(name)
        if found is None:
            return self._others.process(**given)
        weights = self._turned(given["weights"])
        if found[1] != "down":
            shape, size = [*weights.shape], weights.shape[self.outputs]
            shape[self.outputs] = 2 * size
            to = given["tensor_key_mapping"][name.removesuffix(".weight")]
            whole = given["parsed_parameters"]["tensors"].setdefault(to, torch.zeros(shape))
            rows = whole.swapaxes(0, self.outputs)[self._place(found[1] == "up", size)]
            rows.copy_(torch.from_numpy(np.array(weights)).swapaxes(0, self.outputs))
        return Made(weights)

    def _turned(self, weights: Array) -> Array:
        """Experts of one tensor with the parameter's order of dims."""
        return weights

    def _place(self, is_up: bool, size: int) -> slice:
        """Where gate or up with `size` outputs is among the parameter's outputs."""
        return slice(size * is_up, size * (1 + is_up))


class Latent(Mixture):
    """Keys and values from a latent, `kv_b_proj`: of each head keys `[K, nope]`, transposed, and
    values `[V, K]`; older files have the parameter whole."""

    def __init__(self, others: Processor, config: Config) -> None:
        super().__init__(others)
        self._sizes = config["qk_nope_head_dim"], config["v_head_dim"]

    def process(self, **given: Unpack[Given]) -> Processed:
        found = LATENT_TENSOR.fullmatch(given["name"])
        if found is None:
            return super().process(**given)
        weights, (keys, values) = given["weights"], self._sizes
        if found[1] == "k":
            weights = weights.swapaxes(1, 2)
        heads, _, rank = weights.shape
        to = given["tensor_key_mapping"][given["name"].removesuffix(".weight")]
        whole = given["parsed_parameters"]["tensors"].setdefault(
            to, torch.zeros(heads * (keys + values), rank)
        )
        place = slice(keys) if found[1] == "k" else slice(keys, None)
        whole.view(heads, -1, rank)[:, place].copy_(torch.from_numpy(np.array(weights)))
        return Made(weights)


class GptOss(Mixture):
    """Experts `[E, K, N]` and biases `[E, N]`, in which gate and up have alternate outputs."""

    outputs = -1

    def _turned(self, weights: Array) -> Array:
        return weights.swapaxes(-1, -2) if weights.ndim > 2 else weights

    def _place(self, is_up: bool, size: int) -> slice:
        return slice(int(is_up), None, 2)


def processor_of(kind: str, config: Config) -> Processor:
    """The rules for files of architecture `kind`."""
    from transformers import modeling_gguf_pytorch_utils as reading

    own = "llama" if kind in LLAMAS else "gemma2" if kind in GEMMAS else None
    made = reading.TENSOR_PROCESSORS.get(own, reading.TensorProcessor)(config=dict(config))
    others = cast(Processor, made)
    if kind == "deepseek2":
        return Latent(others, config)
    return GptOss(others) if kind == "gpt-oss" else Mixture(others)


def with_halves(names: dict[str, str]) -> dict[str, str]:
    """Parameters by tensors, and those of `Latent` by both of theirs."""
    halves = {
        tensor.replace("attn_kv_b", f"attn_{half}_b"): name
        for tensor, name in names.items()
        if "attn_kv_b" in tensor
        for half in "kv"
    }
    return names | halves
