"""Read any Hugging Face decoder whose attention goes through transformers' attention interface.

`decoder.py` runs the model over the graph's signature.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import nn

from kvgraph.compiler.cache import LayerNeed, latent_notes
from kvgraph.compiler.checkpoint_files import (
    INDEXES,
    PICKLED,
    indexed,
    read_index,
    require_fetched,
    shard_paths,
)
from kvgraph.compiler.frontends import masks
from kvgraph.compiler.frontends.counts import require_counts, too_large
from kvgraph.compiler.frontends.decoder import (
    Decoder,
    paged_kv_attention,
    probe,
)
from kvgraph.compiler.frontends.folder import (
    DTYPE_FIELDS,
    Config,
    quantization,
    read_config,
)
from kvgraph.compiler.frontends.found_instead import require_known_names
from kvgraph.compiler.frontends.language_part import language_model
from kvgraph.compiler.frontends.left_over import left_over
from kvgraph.compiler.frontends.lengths import most_tokens, with_current_name
from kvgraph.compiler.frontends.loaded import load_weights
from kvgraph.compiler.frontends.rope import longest as longest_of
from kvgraph.compiler.frontends.rope import parameters_of, settle
from kvgraph.compiler.frontends.routing import require_routing
from kvgraph.compiler.frontends.text_files import NAMES as TEXT_FILES
from kvgraph.compiler.frontends.text_files import (
    as_id,
    as_ids,
    end_notes,
    end_tokens,
    generation_notes,
    text_files,
    tokenizer_notes,
)
from kvgraph.compiler.frontends.weightless import (
    Located,
    fake_parameters,
    keep_in_float32,
    locate,
    require_loadable,
)
from kvgraph.compiler.model import Model
from kvgraph.compiler.quiet import first_line, quiet_loggers
from kvgraph.compiler.refusals import Reason, unsupported
from kvgraph.contract.generation import GENERATION
from kvgraph.contract.loading import require_package
from kvgraph.errors import ModelError, UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NAME = "kvgraph"
IMPLEMENTATIONS = {
    "attn_implementation": NAME,
    "experts_implementation": "batched_mm",  # the one form without data-dependent shapes
}

REPORTING = ("transformers", "torch._subclasses.fake_tensor")


def load(
    folder: Path, dtype: str, *, max_seq_len: int | None = None, weightless: bool = False
) -> Model:
    """Read a checkpoint folder in `dtype`, for contexts of `max_seq_len` tokens (default: as many
    as its configuration says).

    `weightless`: parameters are fake, and the model's `checkpoint` holds the sources of their
    values. If transformers has to load them instead, the model's `loaded` says why.
    ModelError: the folder is missing, truncated or lacks weights. ParamsError: the model does not
    allow such a context. UnsupportedError: the architecture is no decoder that uses the attention
    interface.
    """
    config = read_config(folder)
    for index in INDEXES:
        read_index(folder, index)
    require_known_names(folder)
    require_fetched([*shard_paths(folder), *(folder / name for name in (PICKLED, *TEXT_FILES))])
    require_counts(folder, config)
    transformers = _transformers()
    with quiet_loggers(*REPORTING):
        try:
            return _load(transformers, folder, config, dtype, max_seq_len, weightless)
        except ModelError:
            with suppress(ModelError):  # a model that is no decoder is refused for that first
                _describe(transformers, folder, config, dtype)
            raise


def _load(
    transformers: ModuleType,
    folder: Path,
    config: Config,
    dtype: str,
    max_seq_len: int | None,
    weightless: bool,
) -> Model:
    text = _decoder_config(transformers, folder, config)
    if not _class_of(transformers, text)._supports_attention_backend:
        with fake_parameters():  # refuse it before weights are read
            _probed(_make(transformers, folder, text, dtype), text)
    longest = _longest(text, max_seq_len)
    files = text_files(folder, text.vocab_size)
    larger = _larger(transformers, folder, config, text)
    eos, bos = _tokens(folder, text, larger)
    with indexed(folder):
        model, located = _with_weights(
            transformers, folder, config, text, larger, dtype, weightless
        )
    settled = settle(model, longest)
    decoder = Decoder(model)
    layers = probe(decoder, text.model_type, text.num_hidden_layers)
    return Model(
        module=decoder,
        architecture=text.model_type,
        layers=layers,
        place=decoder.place,
        vocab_size=text.vocab_size,
        max_seq_len=longest,
        dtype=dtype,
        files=files,
        eos_token_ids=eos,
        bos_token_id=bos,
        checkpoint=located.checkpoint and located.checkpoint.renamed("model."),
        loaded=located.why,
        is_quantized=quantization(config) is not None,
        notes=(
            *tokenizer_notes(folder, files, text.vocab_size),
            *end_notes(eos, text.vocab_size),
            *generation_notes(folder),
            *located.notes,
            *latent_notes(layers, text),
            *settled,
        ),
    )


def _with_weights(
    transformers: ModuleType,
    folder: Path,
    config: Config,
    text: PretrainedConfig,
    larger: PretrainedConfig | None,
    dtype: str,
    weightless: bool,
) -> tuple[PreTrainedModel, Located]:
    """The model with its weights, or with fake ones and the sources of their values.

    UnsupportedError: transformers would have to load the values, and cannot.
    """
    located = Located(None)
    is_quantized = quantization(config) is not None
    is_built = _is_built(transformers, larger)
    if weightless or is_quantized or is_built:
        model, located = _build(transformers, folder, config, text, larger, dtype)
        if located.checkpoint is not None and weightless:
            return model, located
        if located.checkpoint is not None:
            located.checkpoint.fill(model)
            return model, replace(located, checkpoint=None)
    require_loadable(located, folder, config, is_built=is_built)
    parsed = _parse_config(transformers, folder, config)
    model, unexpected = load_weights(transformers, folder, parsed, dtype, IMPLEMENTATIONS)
    return model, replace(located, left=left_over(model, unexpected, {}))


def _tokens(
    folder: Path, text: PretrainedConfig, larger: PretrainedConfig | None
) -> tuple[tuple[int, ...], int | None]:
    """End tokens and the begin token.

    They come from generation_config.json, else from the `larger` model that `text` is a part of,
    else from `text`. Without a larger model, the begin token comes from config.json only.
    """
    eos, begin = end_tokens(folder / GENERATION)
    bos = None if larger is None else begin
    for config in (larger, text):  # not every type has them
        said = getattr(config, "eos_token_id", None), getattr(config, "bos_token_id", None)
        eos = eos or as_ids(f"{folder}/config.json: eos_token_id", said[0], ModelError)
        if bos is None:
            bos = as_id(f"{folder}/config.json: bos_token_id", said[1], ModelError)
    return eos, bos


def _build(
    transformers: ModuleType,
    folder: Path,
    config: Config,
    text: PretrainedConfig,
    larger: PretrainedConfig | None,
    dtype: str,
) -> tuple[PreTrainedModel, Located]:
    """The model with fake parameters, and the sources of their values or why it must be loaded."""
    with fake_parameters():
        model = _make(transformers, folder, text, dtype)
    located = locate(model, folder, config, larger)
    if located.checkpoint is not None:
        located.checkpoint.fill_buffers(model)
    return model, located


def _make(
    transformers: ModuleType, folder: Path, config: PretrainedConfig, dtype: str
) -> PreTrainedModel:
    """Build a configuration's model. ModelError: transformers does not take one of its values."""
    make = (
        transformers.AutoModelForCausalLM.from_config
        if _has_causal_class(transformers, config)
        else _class_of(transformers, config)._from_config
    )
    try:
        made: PreTrainedModel = make(config, dtype=getattr(torch, dtype), **IMPLEMENTATIONS)
    except Exception as error:
        reraise_if_signalled(error)
        why = ""
        if isinstance(error, KeyError) and error.args == (NAME,):  # not in the model's own table
            why = Reason.NO_INTERFACE.said()
        if isinstance(error, RuntimeError) and "Couldn't swap" in str(error):  # fake parameters
            why = Reason.CONVERTED.said()
        if why:
            raise UnsupportedError(unsupported(config.model_type, why)) from error
        if largest := too_large(error, config.to_dict()):
            raise ModelError(f"{folder}/config.json: {largest}") from error
        raise ModelError(
            f"{folder}/config.json: expected values that transformers makes a model of, got one "
            f"that it does not take: {first_line(error)}"
        ) from error
    keep_in_float32(made, getattr(torch, dtype))
    return made.eval()


def _class_of(transformers: ModuleType, config: PretrainedConfig) -> type[PreTrainedModel]:
    auto = transformers.models.auto.modeling_auto
    if _has_causal_class(transformers, config):
        found: type[PreTrainedModel] = auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return found
    return language_model(auto.MODEL_MAPPING[type(config)])


def _probed(model: PreTrainedModel, config: PretrainedConfig) -> tuple[LayerNeed, ...]:
    settle(model, 1)  # what attention stores does not depend on the length
    return probe(Decoder(model), config.model_type, config.num_hidden_layers)


@dataclass(frozen=True)
class Description:
    """A checkpoint as its configuration describes it: no weight is read."""

    architecture: str
    layers: tuple[LayerNeed, ...]
    module: nn.Module
    """The model, with fake parameters."""
    max_seq_len: int
    most_seq_len: int
    """Longest context, in tokens, that the user may ask for."""
    larger: PretrainedConfig | None
    """The configuration of the checkpoint's whole model, if this is its language part."""
    is_built: bool
    """Whether it is a language part that transformers does not load by itself."""


def describe(folder: Path, dtype: str) -> Description:
    """Describe the model that `load` would read, from config.json alone; parameters are fake.

    It raises what `load` raises, except for errors about weights.
    """
    config = read_config(folder)
    transformers = _transformers()
    with quiet_loggers(*REPORTING):
        return _describe(transformers, folder, config, dtype)


def _describe(transformers: ModuleType, folder: Path, config: Config, dtype: str) -> Description:
    with fake_parameters():
        text = _decoder_config(transformers, folder, config)
        model = _make(transformers, folder, text, dtype)
        layers = _probed(model, text)
        larger = _larger(transformers, folder, config, text)
    own = _longest(text)
    return Description(
        architecture=text.model_type,
        layers=layers,
        module=model,
        max_seq_len=own,
        most_seq_len=most_tokens(parameters_of(text), own),
        larger=larger,
        is_built=_is_built(transformers, larger),
    )


def _larger(
    transformers: ModuleType, folder: Path, config: Config, text: PretrainedConfig
) -> PretrainedConfig | None:
    """The configuration of the whole model, if `text` is of a part of it."""
    is_part = text.model_type != config["model_type"]
    return _parse_config(transformers, folder, config) if is_part else None


def _is_built(transformers: ModuleType, larger: PretrainedConfig | None) -> bool:
    """Whether a language part of `larger` is built here, as transformers does not load it alone."""
    return larger is not None and not _has_causal_class(transformers, larger)


def _longest(config: PretrainedConfig, asked: int | None = None) -> int:
    """Tokens of the longest context: `asked`, or the configuration's.

    UnsupportedError if the configuration has no limit.
    """
    found = longest_of(config, asked)
    if found is None:
        raise UnsupportedError(unsupported(config.model_type, Reason.NO_LIMIT.said()))
    return found


def _transformers() -> ModuleType:
    transformers = require_package(
        "transformers", "needed to read a Hugging Face model", "pip install 'kvgraph[compile]'"
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.AttentionInterface.register(NAME, paged_kv_attention)
    masks.register(transformers, NAME)
    return transformers


def _decoder_config(transformers: ModuleType, folder: Path, config: Config) -> PretrainedConfig:
    """The configuration of the text decoder. UnsupportedError if there is none, or compile cannot
    take it; ModelError if a token cannot use its experts."""
    hf_config = _parse_config(transformers, folder, config)
    try:
        text = hf_config.get_text_config()
        _require_decoder(transformers, text, is_part=text is not hf_config)
        if text is not hf_config and "tie_word_embeddings" in config:
            text.tie_word_embeddings = config["tie_word_embeddings"]  # the whole model decides
        if hasattr(text, "quantization_config"):
            del text.quantization_config  # transformers must build the plain model's modules
    except UnsupportedError:
        raise
    except Exception as error:  # transformers raises various types here
        reraise_if_signalled(error)
        why = Reason.SEVERAL_PARTS.said()
        raise UnsupportedError(unsupported(config["model_type"], why)) from error
    require_routing(folder, text)
    return text


def _parse_config(transformers: ModuleType, folder: Path, config: Config) -> PretrainedConfig:
    if config["model_type"] not in transformers.models.auto.CONFIG_MAPPING:
        raise UnsupportedError(unsupported(config["model_type"], Reason.UNKNOWN.said()))
    try:
        named = {name: config[name] for name in DTYPE_FIELDS if name in config}  # as we read them
        dtypes = {name: given and getattr(torch, given) for name, given in named.items()}
        if renamed := with_current_name(config):  # transformers renames too late
            of_type = transformers.models.auto.CONFIG_MAPPING[config["model_type"]]
            return of_type.from_dict(renamed, **dtypes)
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **dtypes)
    except Exception as error:
        reraise_if_signalled(error)
        raise ModelError(f"{folder}/config.json: {first_line(error)}") from error


def _require_decoder(transformers: ModuleType, config: PretrainedConfig, *, is_part: bool) -> None:
    kind, all_models = config.model_type, transformers.models.auto.modeling_auto.MODEL_MAPPING
    is_known = _has_causal_class(transformers, config) or (is_part and type(config) in all_models)
    if not is_known or getattr(config, "is_encoder_decoder", False):
        why = Reason.NO_PART if is_part and not is_known else Reason.NO_DECODER
        raise UnsupportedError(unsupported(kind, why.said()))
    if getattr(config, "index_topk", None):
        raise UnsupportedError(unsupported(kind, Reason.SPARSE.said()))


def _has_causal_class(transformers: ModuleType, config: PretrainedConfig) -> bool:
    """Whether transformers has a causal language model class for `config` itself."""
    return type(config) in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
