"""Any Hugging Face decoder whose attention goes through transformers' attention interface.

The model is built with an attention implementation of ours, which stores into and reads from the
paged cache; where it asks for a mask it gets what the mask says (`masks.py`). Tokens of all rows
run as one sequence whose position ids say where each token sits in its row. The model's own code
does everything else.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from kvgraph import progress
from kvgraph.compiler.cache import CachePlan, LayerNeed
from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.frontends import masks
from kvgraph.compiler.frontends.caches import PaddedCache, PagedCache, Probe, make_cache
from kvgraph.compiler.frontends.folder import Config, read_config
from kvgraph.compiler.frontends.masks import AskedMask
from kvgraph.compiler.frontends.text_files import as_ids, require_tokenizer, text_files
from kvgraph.compiler.frontends.weightless import fake_parameters, locate
from kvgraph.compiler.model import Model
from kvgraph.compiler.quiet import quiet_loggers
from kvgraph.compiler.shards import INDEXES, read_index
from kvgraph.errors import MissingDependencyError, ModelError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NAME = "kvgraph"
IMPLEMENTATIONS = {
    "attn_implementation": NAME,
    "experts_implementation": "batched_mm",  # the one form without data-dependent shapes
}

PROVEN = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss")
"""Model types on the equivalence ladder; others compile if their attention allows it."""

REPORTING = ("transformers", "torch._subclasses.fake_tensor")

WITHOUT_EFFECT = (
    "dropout",  # 0 outside training
    "position_ids",  # applied to q and k already
    "use_cache",
    "cache_position",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
)
"""Keywords that models hand to their attention and that change nothing here."""


class Decoder(nn.Module):
    """A causal language model of transformers over the graph's signature."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._plan: CachePlan | None = None

    def place(self, plan: CachePlan) -> None:
        self._plan = plan

    def forward(
        self,
        tokens: torch.Tensor,
        input_row_offsets: torch.Tensor,
        logits_indices: torch.Tensor,
        *cache: torch.Tensor,
    ) -> torch.Tensor:
        assert self._plan is not None, "place() comes before export"
        kv = make_cache(self._plan, input_row_offsets, cache)
        return self.run(tokens, kv.positions(tokens), logits_indices, kv)

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        paged_kv: PagedCache | PaddedCache | Probe,
    ) -> torch.Tensor:
        with masks.ragged_rows():
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logits_indices.long(),
                paged_kv=paged_kv,
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def paged_kv_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AskedMask | None = None,
    *,
    paged_kv: PagedCache | PaddedCache | Probe,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; q, k, v are `[1, heads, T, D]`, returns `[1, T, N, D]`.

    UnsupportedError: a mask or a keyword with a meaning that the cache ops do not have.
    """
    _require_known(others)
    q_TND, k_TKD, v_TKD = (x.transpose(1, 2)[0] for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out_TND = paged_kv.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        q_TND,
        k_TKD,
        v_TKD,
        s_aux.float() if s_aux is not None else None,
        scale=scaling if scaling is not None else q_TND.shape[-1] ** -0.5,
        window=_window(attention_mask, sliding_window),
        softcap=softcap or 0.0,
        causal=int(causal),
        v_head_dim=v_TKD.shape[-1] if v_TKD.shape[-1] != q_TND.shape[-1] else 0,
    )
    progress.advance()
    return out_TND[None], None


def _require_known(others: dict[str, object]) -> None:
    unknown = [name for name, given in others.items() if given is not None]
    unknown = [name for name in unknown if name not in WITHOUT_EFFECT]
    if unknown or others.get("dropout"):
        named = ", ".join(map(repr, unknown or ["dropout"]))
        raise UnsupportedError(f"its attention is given {named}, which the cache ops do not have")


def _window(mask: AskedMask | None, sliding_window: int | None) -> int:
    """What the mask says and what attention is told; 0 where both see everything before them."""
    if mask is None:
        return sliding_window or 0
    if not isinstance(mask, AskedMask):
        raise UnsupportedError("its attention has a mask of its own")
    if sliding_window is not None and sliding_window != mask.window:
        raise UnsupportedError(
            f"its attention is told sliding_window={sliding_window}, "
            f"and its mask has {mask.window or 'no window'}"
        )
    return mask.window or 0


def probe(decoder: Decoder, architecture: str, num_layers: int) -> tuple[LayerNeed, ...]:
    """What each layer's attention stores, seen by running one token on fake tensors.

    UnsupportedError where a layer's attention does not come through the interface.
    """
    seen = Probe()
    mode = active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        one = torch.zeros(1, dtype=torch.int32)
        try:
            decoder.run(one, one, one, seen)
        except Exception as error:
            raise UnsupportedError(_unsupported(architecture, _first_line(error))) from error
    if sorted(seen.layers) != list(range(num_layers)):
        why = f"attention of {len(seen.layers)} of {num_layers} layers reaches the interface"
        raise UnsupportedError(_unsupported(architecture, why))
    config: Any = decoder.model.config
    config = config.get_text_config()
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (seen.layers[layer].window_size is None) != (kind == "full_attention"):
            why = f"layer {layer} is {kind}, which its attention does not say"
            raise UnsupportedError(_unsupported(architecture, why))
    return tuple(seen.layers[i] for i in range(num_layers))


def load(folder: Path, dtype: str, *, weightless: bool = False) -> Model:
    """Read a checkpoint folder in `dtype`.

    `weightless`: parameters are fake and the model's `checkpoint` says where their values are,
    unless transformers has to load them: then its `loaded` says why.
    ModelError: a folder that is missing, truncated or lacks weights. UnsupportedError: an
    architecture that is not a decoder of the attention interface.
    """
    config = read_config(folder)
    for index in INDEXES:
        read_index(folder, index)
    transformers = _transformers()
    with quiet_loggers(*REPORTING):
        return _load(transformers, folder, config, dtype, weightless)


def _load(
    transformers: ModuleType, folder: Path, config: Config, dtype: str, weightless: bool
) -> Model:
    text = _decoder_config(transformers, folder, config)
    require_tokenizer(folder / "tokenizer.json")
    model, checkpoint, loaded = None, None, ""
    if weightless:
        model, checkpoint, loaded = _build(transformers, folder, config, text, dtype)
    if checkpoint is None:
        model = _load_weights(transformers, folder, dtype)
    assert model is not None
    generation = model.generation_config
    eos = generation.eos_token_id
    eos = getattr(text, "eos_token_id", None) if eos is None else eos  # not every type has one
    decoder = Decoder(model)
    return Model(
        module=decoder,
        architecture=text.model_type,
        layers=probe(decoder, text.model_type, text.num_hidden_layers),
        place=decoder.place,
        vocab_size=text.vocab_size,
        max_seq_len=text.max_position_embeddings,
        dtype=dtype,
        files=text_files(folder),
        eos_token_ids=as_ids(eos),
        bos_token_id=getattr(text, "bos_token_id", None),
        checkpoint=checkpoint,
        loaded=loaded,
    )


def _build(
    transformers: ModuleType, folder: Path, config: Config, text: PretrainedConfig, dtype: str
) -> tuple[PreTrainedModel | None, Checkpoint | None, str]:
    """The model with fake parameters and where their values are, or why it has to be loaded."""
    if text.model_type != config["model_type"]:
        return None, None, "the decoder is a part of a larger model"
    with fake_parameters():
        model = _make(transformers, folder, text, dtype)
    checkpoint, why = locate(model, folder, getattr(torch, dtype))
    if (folder / "generation_config.json").is_file():
        with contextlib.suppress(OSError):  # as from_pretrained: the model's own defaults stay
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                folder, local_files_only=True
            )
    return model, checkpoint and checkpoint.renamed("model."), why


def _make(
    transformers: ModuleType, folder: Path, config: PretrainedConfig, dtype: str
) -> PreTrainedModel:
    """The model of a configuration; ModelError where one of its values is none that it takes."""
    auto = transformers.AutoModelForCausalLM
    try:
        return auto.from_config(config, dtype=getattr(torch, dtype), **IMPLEMENTATIONS)
    except Exception as error:
        raise ModelError(
            f"{folder}/config.json: expected values that transformers makes a model of, got one "
            f"that it does not take: {_first_line(error)}"
        ) from error


@dataclass(frozen=True)
class Description:
    """A checkpoint as its configuration describes it: no weight is read."""

    architecture: str
    layers: tuple[LayerNeed, ...]
    module: nn.Module
    """Parameters and buffers are fake."""
    max_seq_len: int


def describe(folder: Path, dtype: str) -> Description:
    """What `load` would give, from config.json alone: parameters are made fake.

    Raises as `load` does, except that weights are not looked at.
    """
    config = read_config(folder)
    transformers = _transformers()
    with quiet_loggers(*REPORTING), FakeTensorMode(allow_non_fake_inputs=True):
        text = _decoder_config(transformers, folder, config)
        model = _make(transformers, folder, text, dtype)
        layers = probe(Decoder(model).eval(), text.model_type, text.num_hidden_layers)
    return Description(text.model_type, layers, model, text.max_position_embeddings)


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "transformers: needed to read a Hugging Face model, not installed; "
            "pip install 'kvgraph[compile]'"
        ) from error
    module: ModuleType = transformers
    transformers.utils.logging.disable_progress_bar()
    transformers.AttentionInterface.register(NAME, paged_kv_attention)
    masks.register(transformers, NAME)
    return module


def _decoder_config(transformers: ModuleType, folder: Path, config: Config) -> PretrainedConfig:
    """The configuration of the text decoder; UnsupportedError where there is none for us."""
    hf_config = _parse_config(transformers, folder, config)
    try:
        text = hf_config.get_text_config()
        _require_decoder(transformers, text)
    except UnsupportedError:
        raise
    except Exception as error:  # several text configurations, attributes that differ by layer
        raise UnsupportedError(_unsupported(config["model_type"], _first_line(error))) from error
    return text


def _parse_config(transformers: ModuleType, folder: Path, config: Config) -> PretrainedConfig:
    if config["model_type"] not in transformers.models.auto.CONFIG_MAPPING:
        raise UnsupportedError(_unsupported(config["model_type"], "transformers does not know it"))
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{folder}/config.json: {_first_line(error)}") from error


def _require_decoder(transformers: ModuleType, config: PretrainedConfig) -> None:
    kind = config.model_type
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(_unsupported(kind, "it is not a causal decoder"))
    if not mapping[type(config)]._supports_attention_backend:
        raise UnsupportedError(_unsupported(kind, "its attention has no interface"))
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(_unsupported(kind, "its latent attention (MLA) has no kernel yet"))
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedError(_unsupported(kind, "its layers share caches"))


def _unsupported(kind: str, why: str) -> str:
    proven = ", ".join(PROVEN)
    return (
        f"architecture {kind!r}: expected a decoder that uses transformers' attention interface "
        f"(proven: {proven}), got one that cannot be compiled: {why}"
    )


def _load_weights(transformers: ModuleType, folder: Path, dtype: str) -> PreTrainedModel:
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            **IMPLEMENTATIONS,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # info lists them
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"{folder}: cannot read the weights: {_first_line(error)}") from error
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            first = sorted(map(str, info[problem]))[0]
            raise ModelError(
                f"{folder}: expected weights for every parameter, got {problem} such as {first}"
            )
    return model


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
