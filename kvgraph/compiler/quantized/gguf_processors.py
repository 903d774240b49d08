"""Which tensors of a GGUF file make a parameter, and how: transformers' rules, and those of experts
here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypedDict, Unpack, cast

import numpy as np
import torch

from kvgraph.compiler.frontends.folder import Config
from kvgraph.contract.dims import Array

if TYPE_CHECKING:
    from gguf import ReaderTensor

LAYER = r"(?:model\.)?layers\.(\d+)"
EXPERTS = re.compile(
    LAYER + r"(?:\.mlp|\.block_sparse_moe|\.feed_forward)?\.experts\.(gate_up|down)_proj(_bias)?"
)
PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
WHOLE = ("gate_up",)
"""Gate above up in one tensor, as files of Gemma 4 and newer ones of others have them."""
EXPERTS_TENSOR = re.compile(r"blk\.\d+\.ffn_(gate_up|gate|up|down)_(exps|shexp)\.(weight|bias)")

SHARED = re.compile(LAYER + r"\.shared_mlp\.input_linear\.weight")
"""Gate above up of a shared expert, as Granite has it. Other models have them apart."""

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

ADDED = ("gemma", "gemma2", "gemma3", "nemotron")
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

    are_transposed = False
    """Whether the parameter is `[E, K, N]`."""
    do_alternate = False
    """Whether outputs of gate and of up alternate."""

    def __init__(self, others: Processor) -> None:
        self._others = others
        self.preprocess_name = others.preprocess_name

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        names = []
        if found := EXPERTS.fullmatch(hf_name):
            end = "bias" if found[3] else "weight"
            whole = WHOLE if found[2] == "gate_up" and not self.do_alternate else ()
            parts = *PARTS[found[2]], *whole
            names = [f"blk.{found[1]}.ffn_{part}_exps.{end}" for part in parts]
        if found := SHARED.fullmatch(hf_name):
            names = [f"blk.{found[1]}.ffn_{part}_shexp.weight" for part in PARTS["gate_up"]]
        for tensor, router in ROUTERS.items():
            if found := router.fullmatch(hf_name):
                names.append(f"blk.{found[1]}.{tensor}")
        gguf_to_hf_name_map |= dict.fromkeys(names, qual_name + hf_name)

    def process(self, **given: Unpack[Given]) -> Processed:
        name = given["name"]
        if "ffn_gate_inp_shexp" in name:  # a vector, or a matrix of one row
            return Made(given["weights"].reshape(1, -1))
        found = EXPERTS_TENSOR.fullmatch(name)
        to = given["tensor_key_mapping"].get(name.removesuffix(".weight"), "")
        is_shared = SHARED.fullmatch(to) is not None
        if found is None or (found[2] == "shexp" and not is_shared):
            return self._others.process(**given)
        weights = given["weights"]
        outputs = 0 if is_shared else -1 if self.are_transposed else 1
        if self.are_transposed and weights.ndim > 2:
            weights = weights.swapaxes(-1, -2)
        if found[1] in PARTS["gate_up"]:
            shape, size = [*weights.shape], weights.shape[outputs]
            shape[outputs] = 2 * size
            whole = given["parsed_parameters"]["tensors"].setdefault(to, torch.zeros(shape))
            is_up = found[1] == "up"
            place = slice(size * is_up, size * (1 + is_up))
            if self.do_alternate:
                place = slice(int(is_up), None, 2)
            rows = whole.swapaxes(0, outputs)[place]
            rows.copy_(torch.from_numpy(np.array(weights)).swapaxes(0, outputs))
        return Made(weights)


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


class Transposed(Mixture):
    """Experts `[E, K, N]`, and biases `[E, N]`, as Llama 4 has them."""

    are_transposed = True


class GptOss(Transposed):
    do_alternate = True


def are_of_experts(tensors: Sequence[ReaderTensor]) -> bool:
    """Whether tensors are all that make one weight of experts: gate and up, apart or in one, or
    down."""
    found = [EXPERTS_TENSOR.fullmatch(tensor.name) for tensor in tensors]
    parts = tuple(sorted(each[1] for each in found if each and each[3] == "weight"))
    return len(parts) == len(tensors) and parts in (*PARTS.values(), WHOLE)


def processor_of(kind: str, config: Config) -> Mixture:
    """The rules for files of architecture `kind`."""
    from transformers import modeling_gguf_pytorch_utils as reading

    own = "llama" if kind in LLAMAS else "gemma2" if kind in ADDED else None
    own = kind if kind == "gpt2" else own
    made = reading.TENSOR_PROCESSORS.get(own, reading.TensorProcessor)(config=dict(config))
    others = cast(Processor, made)
    if kind == "deepseek2":
        return Latent(others, config)
    return {"gpt-oss": GptOss, "llama4": Transposed}.get(kind, Mixture)(others)


def with_halves(names: dict[str, str]) -> dict[str, str]:
    """Parameters by tensors, and those of `Latent` by both of theirs."""
    halves = {
        tensor.replace("attn_kv_b", f"attn_{half}_b"): name
        for tensor, name in names.items()
        if "attn_kv_b" in tensor
        for half in "kv"
    }
    return names | halves
