"""Describe a checkpoint by its own files, without torch, for families where these are sufficient.

Decision: a family is described here only if config.json and the stored weights say all that its
code in transformers would: each field is given or has the family's own default, and the weights are
exactly those that the family has. Otherwise `describe` raises InDoubtError, and transformers has to
build the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgraph.compiler.cache import LayerNeed
from kvgraph.compiler.checkpoint_files import Index, read_index, shard_paths, stored_tensors
from kvgraph.compiler.described import Experts, Linear, ModelSizes
from kvgraph.compiler.frontends.folder import FULL, SLIDING, Config, checkpoint_dtype
from kvgraph.compiler.frontends.lengths import ORIGINAL, RopeParameters, most_tokens
from kvgraph.contract.dtypes import DTYPES, FLOATS, itemsize

Shapes = Mapping[str, tuple[int, ...]]

TABLE, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FREQUENCIES = "rotary_emb.inv_freq"
"""The end of names of buffers that old checkpoints hold and no model reads."""

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
TWO_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
EXPERTS = tuple(
    f"mlp.{name}"
    for name in (
        *("router.weight", "router.bias", "experts.gate_up_proj", "experts.gate_up_proj_bias"),
        *("experts.down_proj", "experts.down_proj_bias"),
    )
)

DOWN = ".mlp.experts.down_proj"

ROTARY = ("default", "linear", "llama3", "yarn")
"""Rope types that rotate all elements of a head, by position alone."""

DOUBTFUL = (
    "is_encoder_decoder",
    "kv_lora_rank",
    "num_kv_shared_layers",
    ORIGINAL,
    "partial_rotary_factor",
    "quantization_config",
    "text_config",
    "use_bidirectional_attention",
)
"""Fields that make `describe` give up: each changes what a model stores or sees."""


class InDoubtError(Exception):
    """A checkpoint's files alone do not describe it; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The rules for one model type: how transformers reads its configuration and names its weights.

    `layer_types(config, layers)`: types of layers if the configuration has no such field.
    `has_layer_types`: the family reads that field. `biases`: linear layer -> it has a bias, or the
    field that says so. `others`: a layer's other weights. `defaults`: values of missing fields.
    """

    layer_types: Callable[[Config, int], list[str]]
    has_layer_types: bool = True
    biases: Mapping[str, bool | str]
    others: tuple[str, ...]
    defaults: Config
    has_rotary_of_layer_types: bool = False


def describe(folder: Path, config: Config, *, by_shape: bool) -> ModelSizes:
    """Describe the checkpoint in `folder`. `by_shape`: linear layers are needed one by one, for
    which an index alone is not sufficient.
    InDoubtError: the files are not sufficient. ModelError: a shard is damaged.
    """
    kind = config["model_type"]
    family = FAMILIES.get(kind)
    if family is None:
        raise InDoubtError(f"architecture {kind!r} is none that its files alone describe")
    doubtful = next((name for name in DOUBTFUL if config.get(name) not in (None, False)), None)
    if doubtful:
        raise InDoubtError(f"its config.json has {doubtful}")
    config = {**family.defaults, **config}
    heads, layers = _count(config, "num_attention_heads"), _count(config, "num_hidden_layers")
    head_dim = _count(config, "head_dim", _count(config, "hidden_size") // heads)
    kv_heads = _count(config, "num_key_value_heads", heads)
    types = _layer_types(family, config, layers)
    longest = _count(config, "max_position_embeddings")
    sizes = _sizes(folder, family, config, layers, by_shape)
    _require_shapes(sizes.shapes, config, heads * head_dim, kv_heads * head_dim)
    return ModelSizes(
        architecture=kind,
        layers=tuple(
            LayerNeed(kv_heads, head_dim, head_dim, _window(config, each)) for each in types
        ),
        max_seq_len=longest,
        hidden_size=_count(config, "hidden_size"),
        vocab_size=_count(config, "vocab_size"),
        widest=_widest(config, heads * head_dim, kv_heads * head_dim),
        linears=sizes.linears,
        table_elements=sizes.table,
        other_elements=sizes.others,
        rotary_dims=_rotary_dims(family, config, head_dim, types),
        experts=sizes.experts,
        most_seq_len=most_tokens(_rope_parameters(family, config), longest),
    )


# -- the configuration


def _field(config: Config, name: str) -> Any:
    if name not in config:
        raise InDoubtError(f"its config.json does not say {name}")
    return config[name]


def _count(config: Config, name: str, default: int | None = None) -> int:
    """A field that is an integer >= 1; `default` if it is null. InDoubtError for anything else."""
    value = _field(config, name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise InDoubtError(f"its config.json says {name} {value!r}")
    return value


def _widest(config: Config, queries: int, keys: int) -> int:
    """Most values per token that a linear layer makes; experts have their own scratch memory."""
    dense = 0 if "num_local_experts" in config else _count(config, "intermediate_size")
    return max(dense, queries, keys, _count(config, "hidden_size"))


def _layer_types(family: Family, config: Config, count: int) -> list[str]:
    own, given = family.layer_types(config, count), config.get("layer_types")
    if "layer_types" not in config or (family.has_layer_types and given is None):
        return own
    if not family.has_layer_types or not isinstance(given, list) or len(given) != count:
        raise InDoubtError("its config.json has layer_types of its own")
    return [str(each) for each in given]


def _all_full(config: Config, count: int) -> list[str]:
    return [FULL] * count


def _all_sliding(config: Config, count: int) -> list[str]:
    return [FULL if _field(config, "sliding_window") is None else SLIDING] * count


def _sliding_behind(config: Config, count: int) -> list[str]:
    if not _field(config, "use_sliding_window") or _field(config, "sliding_window") is None:
        return [FULL] * count
    first = _field(config, "max_window_layers")
    if type(first) is not int:
        raise InDoubtError(f"its config.json says max_window_layers {first!r}")
    return [SLIDING if i >= first else FULL for i in range(count)]


def _alternating(config: Config, count: int) -> list[str]:
    return [FULL if i % 2 else SLIDING for i in range(count)]


def _by_pattern(config: Config, count: int) -> list[str]:
    """Layer types with full attention in every `sliding_window_pattern`-th layer."""
    pattern = _count(config, "sliding_window_pattern")
    return [SLIDING if (i + 1) % pattern else FULL for i in range(count)]


def _window(config: Config, layer_type: str) -> int | None:
    """The window of a layer in tokens; None: full attention."""
    if layer_type == FULL:
        return None
    if layer_type != SLIDING or not config.get("use_sliding_window", True):
        raise InDoubtError(f"its config.json has layers of {layer_type}")
    return _count(config, "sliding_window")


def _rope_parameters(family: Family, config: Config) -> RopeParameters:
    """Rope parameters; the older field takes precedence, as in transformers. Those of a family with
    parameters by layer type are by layer type, though an older file has them for all layers."""
    given: RopeParameters = (
        config.get("rope_scaling")
        or config.get("rope_parameters")
        or family.defaults.get("rope_parameters", {})
    )
    return {FULL: given} if family.has_rotary_of_layer_types and FULL not in given else given


def _rotary_dims(
    family: Family, config: Config, head_dim: int, types: Sequence[str]
) -> tuple[int, ...]:
    """Dims of each rotary embedding: one in all, or one for each layer type, over whole heads."""
    names = sorted(set(types)) if family.has_rotary_of_layer_types else [""]
    scaling, given = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if not (isinstance(scaling, dict) and isinstance(given, dict)):
        raise InDoubtError("its config.json has rope parameters of its own")
    nested = [given.get(name) or {} for name in names if name]
    for each in (scaling, *(nested or [given])):
        _require_rotary(each, head_dim)
    return (head_dim,) * len(names)


def _require_rotary(given: Any, head_dim: int) -> None:
    """Raise InDoubtError unless every element of a head is rotated, by position alone."""
    if isinstance(given, dict) and not any(isinstance(each, dict) for each in given.values()):
        kind = given.get("rope_type", given.get("type", "default"))
        if kind in ROTARY and given.get("partial_rotary_factor", 1) == 1 and head_dim % 2 == 0:
            return
    raise InDoubtError("its config.json has rope parameters of its own")


# -- the weights


@dataclass(frozen=True)
class _Sizes:
    """Linear layers, elements of the embedding table and of all other weights, and stored shapes.

    If only an index is at hand, all weights count as others, and there are no shapes.
    """

    linears: tuple[Linear, ...]
    table: int
    others: int
    shapes: Shapes
    experts: tuple[Experts, ...] = ()


def _require_shapes(shapes: Shapes, config: Config, queries: int, keys: int) -> None:
    """Raise InDoubtError if a weight's shape differs from the configuration's."""
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    vocab, experts = _count(config, "vocab_size"), config.get("num_local_experts")
    expected = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "gate_proj.weight": (inner, hidden),
        "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
        "gate_up_proj": (experts, hidden, 2 * inner),
    }
    for name, shape in shapes.items():
        wanted = next((expected[end] for end in expected if name.endswith(end)), shape)
        if shape != wanted:
            raise InDoubtError(f"{name} is {list(shape)}, and its config.json says {list(wanted)}")


def _sizes(folder: Path, family: Family, config: Config, layers: int, by_shape: bool) -> _Sizes:
    is_tied = bool(_field(config, "tie_word_embeddings"))
    linears = dict(_linears(family, config, layers))
    if not is_tied:
        linears[HEAD.removesuffix(".weight")] = False
    others = {NORM, *(f"model.layers.{i}.{name}" for i in range(layers) for name in family.others)}
    expected = {TABLE, *others, *(f"{name}.weight" for name in linears)}
    expected |= {f"{name}.bias" for name, has_bias in linears.items() if has_bias}
    if not all(path.is_file() for path in shard_paths(folder)):
        if "num_local_experts" in config:
            raise InDoubtError("an index alone does not say how large its experts are")
        return _by_index(read_index(folder), expected, config, by_shape)
    found = stored_tensors(folder, expected)
    for name, each in found.items():
        if each.dtype not in FLOATS:
            raise InDoubtError(f"{name} is stored as {each.dtype}")
    shapes = {name: each.shape for name, each in found.items() if not name.endswith(FREQUENCIES)}
    _require_names(set(shapes), expected)
    made = [_linear(shapes, f"{name}.weight", has_bias) for name, has_bias in linears.items()]
    if is_tied:
        made.append(_linear(shapes, TABLE, False, is_tied=True))
    elements = {name: math.prod(shape) for name, shape in shapes.items()}
    stacked = {name for name in others if ".mlp.experts." in name}
    rest = sum(elements[name] for name in others - stacked)
    experts = tuple(
        _experts(shapes, name, config) for name in sorted(stacked) if name.endswith(DOWN)
    )
    return _Sizes(tuple(sorted(made)), elements[TABLE], rest, shapes, experts)


def _experts(shapes: Shapes, down: str, config: Config) -> Experts:
    """The experts of a layer; their second weight `down` is `[experts, inner, hidden]`."""
    count, inner, hidden = shapes[down]
    if (active := _count(config, "num_experts_per_tok")) > count:
        raise InDoubtError(f"it says num_experts_per_tok {active}, and has {count} experts")
    return Experts(count, active, hidden, inner, has_bias=True)


def _linears(family: Family, config: Config, layers: int) -> Iterator[tuple[str, bool]]:
    """The name of each linear layer in the decoder layers, and whether it has a bias."""
    for name, bias in family.biases.items():
        has_bias = bool(config.get(bias)) if isinstance(bias, str) else bias
        yield from ((f"model.layers.{i}.{name}", has_bias) for i in range(layers))


def _linear(shapes: Shapes, name: str, has_bias: bool, *, is_tied: bool = False) -> Linear:
    shape = shapes[name]
    if len(shape) != 2:
        raise InDoubtError(f"{name} has the shape {list(shape)}")
    return Linear(*shape, has_bias, is_tied, is_head=name in (HEAD, TABLE))


def _require_names(found: set[str], expected: set[str]) -> None:
    if not found:
        raise InDoubtError("it has no safetensors")
    for name in sorted(found ^ expected)[:1]:
        how = "has" if name in found else "lacks"
        raise InDoubtError(f"it {how} {name}, as its architecture does not")


def _by_index(index: Index | None, expected: set[str], config: Config, by_shape: bool) -> _Sizes:
    if index is None:
        raise InDoubtError("it has no weights")
    if by_shape:
        raise InDoubtError(
            "packed weights are counted by their shapes, and its shards are not here"
        )
    _require_names(set(index.shards), expected)
    dtype = checkpoint_dtype(dict(config))
    if index.total_size is None or dtype not in DTYPES:
        raise InDoubtError("its index does not say how large the weights are")
    return _Sizes((), 0, index.total_size // itemsize(dtype), {})


# -- the families


def _family(
    layer_types: Callable[[Config, int], list[str]],
    *,
    has_layer_types: bool = True,
    qkv: bool | str = False,
    o: bool | str = False,
    mlp: bool | str | None = False,
    others: tuple[str, ...] = TWO_NORMS,
    has_rotary_of_layer_types: bool = False,
    **defaults: Any,
) -> Family:
    """Make a Family. `qkv`, `o`, `mlp`: biases of these linear layers; None: no such layers."""
    biases = dict.fromkeys(ATTENTION, qkv) | {ATTENTION[-1]: o}
    if mlp is not None:
        biases |= dict.fromkeys(MLP, mlp)
    defaults = {"tie_word_embeddings": False} | defaults
    return Family(
        layer_types=layer_types,
        has_layer_types=has_layer_types,
        biases=biases,
        others=others,
        defaults=defaults,
        has_rotary_of_layer_types=has_rotary_of_layer_types,
    )


BIASED: Mapping[str, Any] = {"qkv": "attention_bias", "o": "attention_bias"}

FAMILIES: Mapping[str, Family] = {
    "llama": _family(
        _all_full,
        has_layer_types=False,
        mlp="mlp_bias",
        head_dim=None,
        num_key_value_heads=None,
        **BIASED,
    ),
    "mistral": _family(_all_sliding, has_layer_types=False, head_dim=None),
    "qwen2": _family(_sliding_behind, qkv=True, head_dim=None, use_sliding_window=False),
    "qwen3": _family(
        _sliding_behind, others=(*TWO_NORMS, *QK_NORMS), use_sliding_window=False, **BIASED
    ),
    "gemma2": _family(_alternating, others=FOUR_NORMS, tie_word_embeddings=True, **BIASED),
    "gemma3_text": _family(
        _by_pattern,
        others=(*FOUR_NORMS, *QK_NORMS),
        has_rotary_of_layer_types=True,
        tie_word_embeddings=True,
        sliding_window_pattern=6,
        **BIASED,
    ),
    "gpt_oss": _family(
        _alternating,
        qkv="attention_bias",
        o="attention_bias",
        mlp=None,
        others=(*TWO_NORMS, "self_attn.sinks", *EXPERTS),
        attention_bias=True,
        rope_parameters={"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096},
    ),
}
"""Families by model type. Tests compare `describe` with the models that transformers builds."""
