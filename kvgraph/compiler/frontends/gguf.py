"""GGUF: read one file with a configuration, a tokenizer and weights as a checkpoint folder.

transformers converts the configuration and the tokenizer; the gguf package reads the file. Fields
that transformers leaves out are added here, or refused by name.
An architecture is supported only if its files hold the whole configuration. Others leave constants
to llama.cpp's code, such as the scale of Gemma's queries.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvgraph.compiler.frontends.folder import CONFIG, is_gguf
from kvgraph.compiler.frontends.gguf_file import (
    SAMPLING,
    alone,
    entries,
    field,
    generation,
    is_decoded,
    nearest_bits,
    open_file,
    refuse,
    require_numbers,
    require_sizes,
    require_vocabulary,
    told_of,
)
from kvgraph.compiler.frontends.text_files import (
    MORE_TEMPLATES,
    SETTINGS,
    TOKENIZER,
    require_template,
)
from kvgraph.contract.generation import GENERATION
from kvgraph.contract.plain import JsonObject
from kvgraph.errors import UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")

HEADS = ("output.weight", "token_embd.weight")
"""Tensor names of the output projection: its own weight, else the embedding's."""

ROTARY = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

ENDS = ("eos", "eot", "eom")
HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Harmony's end tokens. In a vocabulary with both, <|end|> ends a message but not the answer."""
SPELLED_ENDS = (
    *HARMONY_ENDS,
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<EOT>",
)
"""Tokens that end an answer, even if the file gives them no such role."""

ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Roles of tokens: name in a tokenizer's settings -> name in the file's fields."""

TEMPLATE_FIELD = "tokenizer.chat_template"
NAMED_TEMPLATE = f"{TEMPLATE_FIELD}."

SPACE = "▁"
"""The character that SentencePiece writes for a space."""

CONTROL, USER_DEFINED = 3, 4
"""GGUF token types that are matched in a text before it is split."""

LLAMA3_SPLITS = ("llama-bpe", "llama-v3", "llama3", "falcon-h1", "falcon3", "jina-v5-nano", "lfm2")
WHOLE_WORDS = (*LLAMA3_SPLITS, "midm-2.0", "pixtral", "tekken")
"""Pre-tokenizers for which llama.cpp ignores merges if a word is itself a token, and adds BOS by
default."""

GPT2, DIGITS = ("gpt-2", "phi-2"), ("refact", "smollm", "starcoder")
"""Pre-tokenizers that split as GPT-2 does; those in DIGITS split at each digit first."""


@contextmanager
def as_folder(model: Path) -> Iterator[Path]:
    """The folder `model` itself, or a temporary folder with a GGUF file's configuration and
    tokenizer. Errors name the file.

    ModelError or UnsupportedError if the file is damaged, or compile cannot take it.
    """
    if not (model.is_file() and is_gguf(model)):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="kvgraph-gguf-") as name, told_of(model, name):
        _write(model.absolute(), Path(name))
        yield Path(name)


def _write(path: Path, folder: Path) -> None:
    reader = open_file(path)
    kind = field(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise refuse(path, "general.architecture", f"one of {list(ARCHITECTURES)}", repr(kind))
    _require_readable(path, reader, kind)
    config = _config(path, reader, kind)
    matrices = {tensor.name: tensor for tensor in reader.tensors if len(tensor.shape) > 1}
    heads = [matrices[name] for name in HEADS if name in matrices]
    quantized = {"quant_method": "gguf", "file": str(path), **_stored(list(matrices.values()))}
    quantized["head"] = _stored(heads[:1])
    (folder / CONFIG).write_text(json.dumps(config | {"quantization_config": quantized}))
    if given := generation(reader):
        (folder / GENERATION).write_text(json.dumps(given))
    if field(reader, "tokenizer.ggml.model") is not None:
        _write_tokenizer(path, reader, folder)


def _require_readable(path: Path, reader: GGUFReader, kind: str) -> None:
    tokens = (f"tokenizer.ggml.{name}_token_id" for name in (*ROLES.values(), *ENDS))
    require_numbers(path, reader, ["split.count", *tokens, *SAMPLING])
    require_sizes(path, reader, kind)
    if int(field(reader, "split.count") or 1) > 1:
        raise UnsupportedError(
            f"{path}: expected a whole GGUF file, got a part of one; join the parts with "
            "llama-gguf-split --merge"
        )
    for name in (f"{kind}.rope.scaling.type", f"{kind}.expert_count" if kind == "llama" else ""):
        if field(reader, name) not in (None, "none", 0):
            raise refuse(path, name, "none", repr(field(reader, name)))
    for name in (f"{kind}.rope.scaling.factor", f"{kind}.rope.scale_linear"):
        if field(reader, name) not in (None, 0, 1):  # llama.cpp's type is "linear" where none is
            raise refuse(path, name, "1", repr(field(reader, name)))
    for tensor in reader.tensors:
        if not is_decoded(tensor.tensor_type):
            wanted = "a type that the gguf package decodes"
            raise refuse(path, tensor.name, wanted, tensor.tensor_type.name)


def _config(path: Path, reader: GGUFReader, kind: str) -> dict[str, object]:
    import transformers

    with alone(path, "configuration") as only:
        read = transformers.AutoConfig.from_pretrained(
            only, gguf_file=path.name, local_files_only=True
        )
        if read.model_type == "mistral":  # transformers' guess for a Llama named "mistral"
            read = _llama(reader, read)
    config: dict[str, object] = read.to_dict() | {"dtype": "bfloat16"}
    config.pop("_name_or_path", None)
    stated = field(reader, f"{kind}.attention.key_length")
    width = int(stated or read.hidden_size // read.num_attention_heads)
    _require_plain(path, reader, kind, width, read.max_position_embeddings)
    for name, given in (
        ("head_dim", width),
        ("moe_intermediate_size", field(reader, f"{kind}.expert_feed_forward_length")),
    ):
        if given is not None and name in config:  # transformers ignores the field
            config[name] = int(given)
    config["eos_token_id"] = _ends(reader) or None
    config["bos_token_id"] = field(reader, "tokenizer.ggml.bos_token_id")
    scaled = next((tensor for tensor in reader.tensors if tensor.name == ROTARY), None)
    if scaled is not None:
        config["rope_parameters"] = _llama3(path, reader, kind, width, np.array(scaled.data))
    return config


def _ends(reader: GGUFReader) -> list[int]:
    """Ids of end tokens: tokens with such a role, and tokens in SPELLED_ENDS, as in llama.cpp."""
    tokens, types = (entries(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    given = [field(reader, f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    found = [int(end) for end in given if end is not None]
    spelled = {
        place: str(token)
        for place, (token, type_) in enumerate(zip(tokens, types, strict=False))
        if token in SPELLED_ENDS and type_ in (CONTROL, USER_DEFINED)
    }
    ends = dict.fromkeys([*found, *spelled])
    if {*HARMONY_ENDS} <= {*spelled.values()}:
        return [end for end in ends if spelled.get(end) != "<|end|>"]
    return list(ends)


def _llama(reader: GGUFReader, read: PreTrainedConfig) -> PreTrainedConfig:
    """A Llama configuration from the file; transformers took it for a Mistral, in `read`."""
    import transformers
    from transformers.integrations import GGUF_CONFIG_MAPPING

    names = {f"llama.{own}": name for own, name in GGUF_CONFIG_MAPPING["llama"].items() if name}
    given = {name: field(reader, own) for own, name in names.items()}
    found = {name: value for name, value in given.items() if value is not None}
    tied = {"vocab_size": read.vocab_size, "tie_word_embeddings": read.tie_word_embeddings}
    return transformers.LlamaConfig(**tied | found)


def _require_plain(path: Path, reader: GGUFReader, kind: str, width: int, context: int) -> None:
    """Raise UnsupportedError for metadata that changes results but fits no configuration."""
    for name, plain in (
        ("rope.dimension_count", width),
        ("rope.scaling.attn_factor", 1),
        ("attention.scale", width**-0.5),
        ("attention.causal", 1),
        ("embedding_scale", 1),
        ("residual_scale", 1),
        ("logit_scale", 1),
    ):
        given = field(reader, f"{kind}.{name}")
        if given is None or (given == 0 and name.endswith("scale")):  # llama.cpp's "none"
            continue
        if not isinstance(given, int | float) or not math.isclose(given, plain, rel_tol=1e-5):
            raise refuse(path, f"{kind}.{name}", f"{plain:g}", repr(given))
    window = field(reader, f"{kind}.attention.sliding_window") or 0
    if not isinstance(window, int) or 0 < window < context:
        raise refuse(path, f"{kind}.attention.sliding_window", "none", repr(window))


def _llama3(path: Path, reader: GGUFReader, kind: str, width: int, by: np.ndarray) -> JsonObject:
    """Rope parameters of Llama 3.1 for heads of `width`, with frequencies divided by `by`.

    UnsupportedError if `by` are not Llama 3.1's factors.
    """
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base = float(field(reader, f"{kind}.rope.freq_base") or 10000)
    wanted: dict[str, object] = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": float(by.max()),
        "original_max_position_embeddings": 8192,
        **LLAMA3,
    }
    config = transformers.LlamaConfig(head_dim=width, rope_parameters=dict(wanted))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / base ** (np.arange(0, width, 2) / width)
    if 2 * len(by) != width or not np.allclose(plain / scaled.numpy(), by, rtol=1e-3):
        raise refuse(path, ROTARY, "the factors of Llama 3.1", "others")
    return wanted


def _write_tokenizer(path: Path, reader: GGUFReader, folder: Path) -> None:
    """Write transformers' conversion of the tokenizer, corrected to the file's own token ids."""
    model, pre = (field(reader, f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model not in ("gpt2", "llama"):
        raise refuse(path, "tokenizer.ggml.model", "'gpt2' or 'llama'", repr(model))
    is_bytes = model == "gpt2"
    if is_bytes and pre not in (*GPT2, *DIGITS, *_splits()):
        wanted = "a way to split text that transformers knows"
        raise refuse(path, "tokenizer.ggml.pre", wanted, "none" if pre is None else repr(pre))
    adds_bos = field(reader, "tokenizer.ggml.add_bos_token")
    if adds_bos is None:  # llama.cpp's default
        adds_bos = not is_bytes or pre in WHOLE_WORDS
    tokens = [str(token) for token in entries(reader, "tokenizer.ggml.tokens")]
    require_vocabulary(path, reader, is_bytes=is_bytes)
    roles = {name: field(reader, f"tokenizer.ggml.{own}_token_id") for name, own in ROLES.items()}
    for name, given in roles.items():
        if given is not None and not 0 <= int(given) < len(tokens):
            wanted = f"one of {len(tokens)} tokens"
            raise refuse(path, f"tokenizer.ggml.{ROLES[name]}_token_id", wanted, repr(given))
    _convert(path, folder, bool(adds_bos))
    whole = {int(place): True for place in roles.values() if place is not None}
    types = entries(reader, "tokenizer.ggml.token_type")
    for place, type_ in enumerate(types[: len(tokens)]):
        if type_ in (CONTROL, USER_DEFINED):
            whole[place] = type_ == CONTROL or place in whole
    data: JsonObject = json.loads((folder / TOKENIZER).read_text())
    _place_tokens(data, tokens, whole)
    if is_bytes:
        _split_by(data, str(pre))
    else:
        prefix = field(reader, "tokenizer.ggml.add_space_prefix")
        _spell_spaces(data, has_prefix=prefix in (None, True))
    (folder / TOKENIZER).write_text(json.dumps(data))
    _require_places(path, folder / TOKENIZER, {place: tokens[place] for place in whole})
    settings: JsonObject = json.loads((folder / SETTINGS).read_text())
    for name, given in roles.items():
        settings[f"{name}_token"] = None if given is None else tokens[int(given)]
    (folder / SETTINGS).write_text(json.dumps(settings))
    _write_templates(path, reader, folder / MORE_TEMPLATES)


def _write_templates(path: Path, reader: GGUFReader, folder: Path) -> None:
    """Write named chat templates; transformers writes the default one. All are checked here."""
    for key in reader.fields:
        if key == TEMPLATE_FIELD or key.startswith(NAMED_TEMPLATE):
            require_template(f"{path}: {key}", field(reader, key))
        name = key.removeprefix(NAMED_TEMPLATE)
        if name == key:
            continue
        if not re.fullmatch(r"[\w-]+", name, re.ASCII):
            raise refuse(path, key, "a name of letters, digits, _ and -", repr(name))
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.jinja").write_text(str(field(reader, key)), encoding="utf-8")


def _splits() -> frozenset[str]:
    """Names of pre-tokenizers that transformers knows."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    except ImportError:  # older versions split every text as GPT-2 does
        return frozenset()
    return frozenset(mapping.GGUF_PRE_TOKENIZER_SPLITS)


def _convert(path: Path, folder: Path, adds_bos: bool) -> None:
    import transformers

    with alone(path, "tokenizer") as only:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            only,
            gguf_file=path.name,
            local_files_only=True,
            add_bos_token=adds_bos,
        )
        tokenizer.save_pretrained(folder)


def _place_tokens(data: JsonObject, tokens: Sequence[str], whole: Mapping[int, bool]) -> None:
    """Put the file's spelling of each token at its id; transformers may respell it as bytes.

    `whole`: ids of tokens that are matched in a text, and whether each is special.
    """
    vocab = {token: place for place, token in enumerate(tokens)}
    data["model"]["vocab"] = vocab
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data["added_tokens"] = [
        {"id": place, "content": tokens[place], **flags, "special": whole[place]}
        for place in sorted(whole)
    ]
    for name, entry in ((data["post_processor"] or {}).get("special_tokens") or {}).items():
        entry["ids"] = [vocab[name]]


def _split_by(data: JsonObject, pre: str) -> None:
    """Add to a byte-level tokenizer what transformers leaves out: digits, whole words, NFC."""
    if pre in DIGITS:
        digits = {"type": "Digits", "individual_digits": True}
        steps = [digits, data["pre_tokenizer"]]
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    data["model"]["ignore_merges"] = pre in WHOLE_WORDS
    if pre == "qwen2":
        data["normalizer"] = {"type": "NFC"}


def _spell_spaces(data: JsonObject, *, has_prefix: bool) -> None:
    """Make the tokenizer write spaces as SentencePiece does.

    `has_prefix`: add a space before each text between special tokens, and strip it when decoding.
    """
    spell = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}, spell] if has_prefix else [spell]
    data["normalizer"] = {"type": "Sequence", "normalizers": steps}
    data["pre_tokenizer"] = None
    read = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": int(has_prefix), "stop": 0}
    decoders = [read, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    data["decoder"] = {"type": "Sequence", "decoders": decoders}


def _require_places(path: Path, file: Path, tokens: Mapping[int, str]) -> None:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other
        reraise_if_signalled(error)
        raise refuse(path, "tokenizer.ggml.tokens", "a whole vocabulary", str(error)) from error
    for place, token in tokens.items():
        found = tokenizer.token_to_id(token)
        if found != place:
            wanted = f"{token!r} at {place} alone"
            raise refuse(path, "tokenizer.ggml.tokens", wanted, f"it at {found}")


def _stored(tensors: Sequence[ReaderTensor]) -> dict[str, object]:
    """`bits`: nearest bits of packed weights (None: floats); `blocks`: type of most elements."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    most = max(counts, key=counts.__getitem__, default="")
    return {"bits": nearest_bits(tensors), "blocks": most}
