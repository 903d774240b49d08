"""GGUF: one file with a configuration, a tokenizer and weights, read as a checkpoint folder.

transformers says what the configuration and the tokenizer are, the gguf package reads the file;
what the file says and transformers leaves out is added here, or refused by name.
Only architectures are taken whose file says all that the configuration does: others leave
constants to llama.cpp's code (scales of Gemma's queries, say).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvgraph.compiler.frontends.folder import CONFIG, GGUF_INSTEAD, is_gguf
from kvgraph.compiler.frontends.text_files import SETTINGS, TOKENIZER
from kvgraph.compiler.quiet import quiet_loggers
from kvgraph.contract.plain import JsonObject
from kvgraph.errors import MissingDependencyError, ModelError, UnsupportedError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
    from transformers import PreTrainedConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")

HEADS = ("output.weight", "token_embd.weight")
"""Of the output projection: its own, or those of the embedding."""

ROTARY = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

ENDS = ("eos", "eot", "eom")
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Of tokens, in a tokenizer's settings -> in the file."""

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split."""

LLAMA3_SPLITS = ("llama-bpe", "llama-v3", "llama3", "falcon-h1", "falcon3", "jina-v5-nano", "lfm2")
WHOLE_WORDS = (*LLAMA3_SPLITS, "midm-2.0", "pixtral", "tekken")
"""Ways to split for which llama.cpp takes a word that is a token without its merges, and adds BOS
where the file does not say."""

GPT2 = ("gpt-2", "phi-2")
DIGITS = ("refact", "smollm", "starcoder")
"""As GPT-2, behind a split at each digit."""


@contextmanager
def as_folder(model: Path) -> Iterator[Path]:
    """`model` itself; or of a GGUF file a folder with its configuration and its tokenizer, which
    is gone behind.

    ModelError or UnsupportedError for a file that is damaged, or says less than a compile needs.
    """
    if not (model.is_file() and is_gguf(model)):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="kvgraph-gguf-") as name:
        _write(model.absolute(), Path(name))
        yield Path(name)


def open_file(path: Path) -> GGUFReader:
    """ModelError for a damaged file."""
    try:
        import transformers  # noqa: F401
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name}: needed to read a GGUF file, not installed; pip install "
            "'kvgraph[compile]'"
        ) from error
    try:
        return GGUFReader(path)
    except Exception as error:  # it checks nothing
        raise ModelError(f"{path}: expected a GGUF file, got a damaged one") from error


def _write(path: Path, folder: Path) -> None:
    reader = open_file(path)
    kind = _field(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise _refuse(path, "general.architecture", f"one of {list(ARCHITECTURES)}", repr(kind))
    _require_readable(path, reader, kind)
    config = _config(path, reader, kind)
    matrices = {tensor.name: tensor for tensor in reader.tensors if len(tensor.shape) > 1}
    heads = [matrices[name] for name in HEADS if name in matrices]
    quantized = {"quant_method": "gguf", "file": str(path), **_stored(list(matrices.values()))}
    quantized["head"] = _stored(heads[:1])
    (folder / CONFIG).write_text(json.dumps(config | {"quantization_config": quantized}))
    if _field(reader, "tokenizer.ggml.model") is not None:
        _write_tokenizer(path, reader, folder)


def is_decoded(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package decodes blocks of this type."""
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _require_readable(path: Path, reader: GGUFReader, kind: str) -> None:
    if int(_field(reader, "split.count") or 1) > 1:
        raise UnsupportedError(
            f"{path}: expected a whole GGUF file, got a part of one; join the parts with "
            "llama-gguf-split --merge"
        )
    for name in (f"{kind}.rope.scaling.type", f"{kind}.expert_count" if kind == "llama" else ""):
        if _field(reader, name) not in (None, "none", 0):
            raise _refuse(path, name, "none", repr(_field(reader, name)))
    for name in (f"{kind}.rope.scaling.factor", f"{kind}.rope.scale_linear"):
        if _field(reader, name) not in (None, 0, 1):  # llama.cpp's type is "linear" where none is
            raise _refuse(path, name, "1", repr(_field(reader, name)))
    for tensor in reader.tensors:
        if not is_decoded(tensor.tensor_type):
            wanted = "a type that the gguf package decodes"
            raise _refuse(path, tensor.name, wanted, tensor.tensor_type.name)


def _config(path: Path, reader: GGUFReader, kind: str) -> dict[str, object]:
    import transformers

    try:
        with quiet_loggers("transformers"):
            read = transformers.AutoConfig.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
            if read.model_type == "mistral":  # of a Llama whose name is "mistral"
                read = _llama(reader, read)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path}: cannot read the configuration: {first}") from error
    config: dict[str, object] = read.to_dict() | {"dtype": "bfloat16"}
    stated = _field(reader, f"{kind}.attention.key_length")
    width = int(stated or read.hidden_size // read.num_attention_heads)
    _require_plain(path, reader, kind, width, read.max_position_embeddings)
    for name, given in (
        ("head_dim", width),
        ("moe_intermediate_size", _field(reader, f"{kind}.expert_feed_forward_length")),
    ):
        if given is not None and name in config:  # transformers leaves it to its defaults
            config[name] = int(given)
    ends = [_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None)) or None
    config["bos_token_id"] = _field(reader, "tokenizer.ggml.bos_token_id")
    scaled = next((tensor for tensor in reader.tensors if tensor.name == ROTARY), None)
    if scaled is not None:
        config["rope_parameters"] = _llama3(path, reader, kind, np.array(scaled.data))
    return config


def _llama(reader: GGUFReader, read: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a Llama, of which `read` is transformers' as a Mistral."""
    import transformers
    from transformers.integrations import GGUF_CONFIG_MAPPING

    names = {f"llama.{field}": name for field, name in GGUF_CONFIG_MAPPING["llama"].items() if name}
    given = {name: _field(reader, field) for field, name in names.items()}
    found = {name: value for name, value in given.items() if value is not None}
    tied = {"vocab_size": read.vocab_size, "tie_word_embeddings": read.tie_word_embeddings}
    return transformers.LlamaConfig(**tied | found)


def _require_plain(path: Path, reader: GGUFReader, kind: str, width: int, context: int) -> None:
    """UnsupportedError for metadata that changes the numbers, and that no configuration takes."""
    for name, plain in (
        ("rope.dimension_count", width),
        ("rope.scaling.attn_factor", 1),
        ("attention.scale", width**-0.5),
        ("embedding_scale", 1),
        ("residual_scale", 1),
        ("logit_scale", 1),
    ):
        given = _field(reader, f"{kind}.{name}")
        if given is None or (given == 0 and name.endswith("scale")):  # llama.cpp's "none"
            continue
        if not isinstance(given, int | float) or not math.isclose(given, plain, rel_tol=1e-5):
            raise _refuse(path, f"{kind}.{name}", f"{plain:g}", repr(given))
    window = _field(reader, f"{kind}.attention.sliding_window") or 0
    if not isinstance(window, int) or 0 < window < context:
        raise _refuse(path, f"{kind}.attention.sliding_window", "none", repr(window))


def _llama3(path: Path, reader: GGUFReader, kind: str, stored: np.ndarray) -> dict[str, object]:
    """Parameters of the rotary embedding whose frequencies are divided by `stored`."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base = float(_field(reader, f"{kind}.rope.freq_base") or 10000.0)
    wanted: dict[str, object] = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": float(stored.max()),
        "original_max_position_embeddings": 8192,
        **LLAMA3,
    }
    dims = 2 * len(stored)
    config = transformers.LlamaConfig(head_dim=dims, rope_parameters=dict(wanted))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / base ** (np.arange(0, dims, 2) / dims)
    if not np.allclose(plain / scaled.numpy(), stored, rtol=1e-3):
        raise _refuse(path, ROTARY, "the factors of Llama 3.1", "others")
    return wanted


def _write_tokenizer(path: Path, reader: GGUFReader, folder: Path) -> None:
    """transformers' tokenizer, with the file's own tokens at their places."""
    model, pre = (_field(reader, f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model not in ("gpt2", "llama"):
        raise _refuse(path, "tokenizer.ggml.model", "'gpt2' or 'llama'", repr(model))
    is_bytes = model == "gpt2"
    if is_bytes and pre not in (*GPT2, *DIGITS, *_splits()):
        wanted = "a way to split text that transformers knows"
        raise _refuse(path, "tokenizer.ggml.pre", wanted, "none" if pre is None else repr(pre))
    adds_bos = _field(reader, "tokenizer.ggml.add_bos_token")
    if adds_bos is None:  # llama.cpp's default
        adds_bos = not is_bytes or pre in WHOLE_WORDS
    tokens = [str(token) for token in _list(reader, "tokenizer.ggml.tokens")]
    roles = {name: _field(reader, f"tokenizer.ggml.{own}_token_id") for name, own in ROLES.items()}
    for name, given in roles.items():
        if given is not None and not 0 <= int(given) < len(tokens):
            wanted = f"one of {len(tokens)} tokens"
            raise _refuse(path, f"tokenizer.ggml.{ROLES[name]}_token_id", wanted, repr(given))
    _convert(path, folder, bool(adds_bos))
    whole = {int(place): True for place in roles.values() if place is not None}
    types = _list(reader, "tokenizer.ggml.token_type")
    for place, type_ in enumerate(types[: len(tokens)]):
        if type_ in (CONTROL, USER_DEFINED):
            whole[place] = type_ == CONTROL or place in whole
    data: JsonObject = json.loads((folder / TOKENIZER).read_text())
    _place_tokens(data, tokens, whole)
    if is_bytes:
        _split_by(data, str(pre))
    elif _field(reader, "tokenizer.ggml.add_space_prefix") not in (None, True):
        _drop_prefix(path, data)
    (folder / TOKENIZER).write_text(json.dumps(data))
    _require_places(path, folder / TOKENIZER, {place: tokens[place] for place in whole})
    settings: JsonObject = json.loads((folder / SETTINGS).read_text())
    for name, given in roles.items():
        settings[f"{name}_token"] = None if given is None else tokens[int(given)]
    (folder / SETTINGS).write_text(json.dumps(settings))


def _splits() -> frozenset[str]:
    """Names of ways to split that transformers knows."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    except ImportError:  # an older one, which splits all as GPT-2
        return frozenset()
    return frozenset(mapping.GGUF_PRE_TOKENIZER_SPLITS)


def _convert(path: Path, folder: Path, adds_bos: bool) -> None:
    import transformers

    try:
        with quiet_loggers("transformers"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                path.parent,
                gguf_file=path.name,
                local_files_only=True,
                add_bos_token=adds_bos,
            )
            tokenizer.save_pretrained(folder)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path}: cannot read the tokenizer: {first}") from error


def _place_tokens(data: JsonObject, tokens: Sequence[str], whole: Mapping[int, bool]) -> None:
    """The file's spelling of each token at its place, where transformers respells it as bytes.

    `whole`: places of tokens that are found in a text, and whether they are special.
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
    """What transformers leaves out of a byte-level tokenizer."""
    if pre in DIGITS:
        digits = {"type": "Digits", "individual_digits": True}
        steps = [digits, data["pre_tokenizer"]]
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    data["model"]["ignore_merges"] = pre in WHOLE_WORDS
    if pre == "qwen2":
        data["normalizer"] = {"type": "NFC"}


def _drop_prefix(path: Path, data: JsonObject) -> None:
    """No space before a text, and none to take away behind it."""
    first, last = data["pre_tokenizer"] or {}, data["decoder"] or {}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if first.get("type") != "Metaspace" or strip not in last.get("decoders", ()):
        raise _refuse(path, "tokenizer.ggml.add_space_prefix", "true of its tokenizer", "false")
    first["prepend_scheme"] = "never"
    last["decoders"].remove(strip)


def _require_places(path: Path, file: Path, tokens: Mapping[int, str]) -> None:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other
        raise _refuse(path, "tokenizer.ggml.tokens", "a whole vocabulary", str(error)) from error
    for place, token in tokens.items():
        found = tokenizer.token_to_id(token)
        if found != place:
            wanted = f"{token!r} at {place} alone"
            raise _refuse(path, "tokenizer.ggml.tokens", wanted, f"it at {found}")


def _stored(tensors: Sequence[ReaderTensor]) -> dict[str, object]:
    """Bits of most weights (None: floats), and the type of most blocks."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    most = max(counts, key=counts.__getitem__, default="")
    return {"bits": nearest_bits(tensors), "blocks": most}


def nearest_bits(tensors: Sequence[ReaderTensor]) -> int | None:
    """Of packed weights, those nearest to what tensors take; None: floats."""
    elements = sum(int(tensor.n_elements) for tensor in tensors)
    bits = 8 * sum(int(tensor.n_bytes) for tensor in tensors) / max(1, elements)
    return 4 if bits < 5.5 else 8 if bits < 10 else None


def _field(reader: GGUFReader, name: str) -> str | int | float | None:
    found = reader.get_field(name)
    given: str | int | float | None = None if found is None else found.contents()
    return given


def _list(reader: GGUFReader, name: str) -> list[object]:
    found = reader.get_field(name)
    return [] if found is None else list(found.contents())


def _refuse(path: Path, what: str, expected: str, got: str) -> UnsupportedError:
    return UnsupportedError(f"{path}: {what}: expected {expected}, got {got}; {GGUF_INSTEAD}")
