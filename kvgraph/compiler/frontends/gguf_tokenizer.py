"""GGUF: the tokenizer, the end tokens and the chat templates of a file, as a checkpoint has them.

transformers converts the tokenizer. What it leaves out or changes is corrected to the file's fields
and to llama.cpp's rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.compiler.frontends.gguf_fields import ENDS, ROLES, entries, field, refuse
from kvgraph.compiler.frontends.gguf_file import (
    CONTROL,
    USER_DEFINED,
    alone,
    require_merges,
    require_vocabulary,
)
from kvgraph.compiler.frontends.gguf_splits import SPLITS, splitter
from kvgraph.compiler.frontends.text_files import (
    MORE_TEMPLATES,
    SETTINGS,
    TOKENIZER,
    require_template,
)
from kvgraph.contract.plain import JsonObject
from kvgraph.errors import ModelError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from kvgraph.compiler.frontends.gguf_reader import Reader

SPELLED_ENDS = (
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<eos>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Tokens that end an answer, even if the file gives them no such role."""

SPELLED_ROLES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Roles of ENDS -> spellings of the token that has the role if the file names none."""

TEMPLATE_FIELD = "tokenizer.chat_template"
NAMED_TEMPLATE = f"{TEMPLATE_FIELD}."

SPACE = "▁"
"""The character that SentencePiece writes for a space."""

MODELS = ("gpt2", "llama", "gemma4")
"""Kinds of tokenizers: byte-level, and two that are SentencePiece's; the last one has merges."""

PHI_3 = ("phi-3", "phi3")
NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""llama.cpp drops the space behind tokens of models with such names, but not behind these."""

LLAMA3_SPLITS = ("llama-bpe", "llama-v3", "llama3", "falcon-h1", "falcon3", "jina-v5-nano", "lfm2")
BEGIN_WITH_BOS = (*LLAMA3_SPLITS, "midm-2.0", "pixtral", "tekken")
"""Pre-tokenizers for which llama.cpp adds BOS by default."""
WHOLE_WORDS = (*BEGIN_WITH_BOS, "glm4", "glm5")
"""Pre-tokenizers for which llama.cpp ignores merges if a word is itself a token."""
MAY_BE_MISSING = ("unk", "pad")
"""Roles whose id may be of no token, often 2**32 - 1: llama.cpp ignores it."""


def ends(reader: Reader) -> list[int]:
    """Ids of end tokens, as llama.cpp finds them: by their roles and by their spelling."""
    tokens, types = (entries(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    given = {name: field(reader, f"tokenizer.ggml.{name}_token_id") for name in ENDS}
    spelled = {*SPELLED_ENDS}
    for role, names in SPELLED_ROLES.items():
        spelled |= set() if given[role] is not None else {*names}
    found = [int(end) for end in given.values() if end is not None]
    found += [
        place
        for place, (token, type_) in enumerate(zip(tokens, types, strict=False))
        if token in spelled and type_ in (CONTROL, USER_DEFINED)
    ]
    said = {end: tokens[end] if 0 <= end < len(tokens) else None for end in found}
    kept = {*said.values()} - {None}  # an id of no token is ignored
    if kept & {"<|call|>", "<|calls|>"} and kept & {"<|return|>", "<|flush|>"}:
        kept.discard("<|end|>")  # ends a message of Harmony, but not the answer
    if kept & {"<|tool_response>", "<|plamo:eos|>"}:
        kept.discard("</s>")
    return [end for end, token in said.items() if token in kept]


def write_tokenizer(path: Path, reader: Reader, folder: Path) -> None:
    """Write transformers' conversion of the tokenizer, corrected to the file's own token ids."""
    model, pre = (field(reader, f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model not in MODELS:
        raise refuse(path, "tokenizer.ggml.model", f"one of {list(MODELS)}", repr(model))
    is_bytes = model == "gpt2"
    if is_bytes and pre not in SPLITS and pre not in _splits():
        wanted = "a known way to split text"
        raise refuse(path, "tokenizer.ggml.pre", wanted, "none" if pre is None else repr(pre))
    adds_bos = field(reader, "tokenizer.ggml.add_bos_token")
    if adds_bos is None:  # llama.cpp's default
        adds_bos = not is_bytes or pre in BEGIN_WITH_BOS
    tokens = [str(token) for token in entries(reader, "tokenizer.ggml.tokens")]
    require_vocabulary(path, reader, is_bytes=is_bytes)
    roles = {name: field(reader, f"tokenizer.ggml.{own}_token_id") for name, own in ROLES.items()}
    missing = [
        name
        for name, given in roles.items()
        if given is not None and not 0 <= int(given) < len(tokens)
    ]
    for name in missing:
        if name not in MAY_BE_MISSING:
            wanted = f"one of {len(tokens)} tokens"
            raise refuse(path, f"tokenizer.ggml.{ROLES[name]}_token_id", wanted, repr(roles[name]))
        roles[name] = None
    try:
        _convert(path, folder, bool(adds_bos), _header(reader, missing) if missing else None)
    except ModelError:
        require_merges(path, reader)
        raise
    whole = {int(place): True for place in roles.values() if place is not None}
    types = entries(reader, "tokenizer.ggml.token_type")
    for place, type_ in enumerate(types[: len(tokens)]):
        if type_ in (CONTROL, USER_DEFINED):
            whole[place] = type_ == CONTROL or place in whole
    data: JsonObject = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    named = str(field(reader, "general.name") or "").lower()
    if model == "gemma4" and adds_bos and roles["bos"] is not None:
        _begin_with(data, tokens[int(roles["bos"])])
    _place_tokens(data, tokens, whole, strips=any(name in named for name in PHI_3))
    if is_bytes:
        _split_by(data, str(pre))
    else:
        if not entries(reader, "tokenizer.ggml.merges"):
            data["model"]["merges"] = _merges(reader, tokens)
        prefix = field(reader, "tokenizer.ggml.add_space_prefix")
        _spell_spaces(data, has_prefix=prefix in (None, True))
    (folder / TOKENIZER).write_text(json.dumps(data), encoding="utf-8")
    _require_places(path, folder / TOKENIZER, {place: tokens[place] for place in whole})
    settings: JsonObject = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    for name, given in roles.items():
        settings[f"{name}_token"] = None if given is None else tokens[int(given)]
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    _write_templates(path, reader, folder / MORE_TEMPLATES)


def _write_templates(path: Path, reader: Reader, folder: Path) -> None:
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
    """Names of pre-tokenizers that transformers knows, in addition to SPLITS."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    except ImportError:  # older versions split every text as GPT-2 does
        return frozenset()
    return frozenset(mapping.GGUF_PRE_TOKENIZER_SPLITS)


def _header(reader: Reader, roles: Sequence[str]) -> bytes:
    """The file up to its tensors' data, with 0 as the id of `roles`: transformers fails at an id of
    no token."""
    header = bytearray(reader.data[: reader.data_offset])
    for role in roles:
        given = reader.fields[f"tokenizer.ggml.{ROLES[role]}_token_id"]
        end = given.offset + sum(part.nbytes for part in given.parts)
        size = given.parts[-1].nbytes
        header[end - size : end] = bytes(size)
    return bytes(header)


def _convert(path: Path, folder: Path, adds_bos: bool, header: bytes | None) -> None:
    import transformers

    with alone(path, header) as only:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
            only,
            gguf_file=path.name,
            local_files_only=True,
            add_bos_token=adds_bos,
        )
        tokenizer.save_pretrained(folder)


def _begin_with(data: JsonObject, token: str) -> None:
    """Begin each text with `token`, as llama.cpp does; transformers' rule for Gemma 4 does not."""
    given = data["post_processor"]
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    begun = {token: {"id": token, "ids": [], "tokens": [token]}}
    data["post_processor"] = given | {
        "single": [special, *given["single"]],
        "special_tokens": given["special_tokens"] | begun,
    }


def _place_tokens(
    data: JsonObject, tokens: Sequence[str], whole: Mapping[int, bool], *, strips: bool
) -> None:
    """Put the file's spelling of each token at its id; transformers may respell it as bytes.

    `whole`: ids of tokens that are matched in a text, and whether each is special. `strips`: they
    take the space behind them.
    """
    vocab = {token: place for place, token in enumerate(tokens)}
    data["model"]["vocab"] = vocab
    flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    data["added_tokens"] = [
        {
            "id": place,
            "content": tokens[place],
            **flags,
            "rstrip": strips and tokens[place] not in NOT_STRIPPED,
            "special": whole[place],
        }
        for place in sorted(whole)
    ]
    for name, entry in ((data["post_processor"] or {}).get("special_tokens") or {}).items():
        entry["ids"] = [vocab[name]]


def _split_by(data: JsonObject, pre: str) -> None:
    """Add to a byte-level tokenizer what transformers leaves out: splits, whole words, NFC."""
    if pre in SPLITS:
        data["pre_tokenizer"] = splitter(SPLITS[pre])
    data["model"]["ignore_merges"] = pre in WHOLE_WORDS
    if pre == "qwen2":
        data["normalizer"] = {"type": "NFC"}


def _merges(reader: Reader, tokens: Sequence[str]) -> list[list[str]]:
    """Pairs of tokens that make a token, the highest score first."""
    known = {*tokens}
    pairs = [
        (float(str(score)), token[:at], token[at:])
        for token, score in zip(tokens, entries(reader, "tokenizer.ggml.scores"), strict=True)
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    return [[left, right] for _, left, right in pairs]


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
