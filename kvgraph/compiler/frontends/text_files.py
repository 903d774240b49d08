"""Text files that an artifact gets with a model: tokenizer, chat template, generation config."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvgraph.compiler.frontends.folder import Config, read_json
from kvgraph.contract.files import read_text
from kvgraph.contract.generation import GENERATION, require_suggested, suggested
from kvgraph.contract.manifest_values import MOST
from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import read_tokenizer
from kvgraph.contract.values import require_integer
from kvgraph.errors import KVGraphError, ModelError, RequestError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION,
)
TOKENIZER, SETTINGS, SPECIAL_TOKENS, TEMPLATE, _ = NAMES
ADDED_TOKENS = "added_tokens.json"

OTHERS, OTHERS_BEFORE = "extra_special_tokens", "additional_special_tokens"
"""The field of special tokens without a role, and its name before transformers 5."""

OTHER_TOKENIZERS = {
    "tokenizer.model": ("sentencepiece", ""),
    "tokenizer.model.v3": ("sentencepiece", ""),
    "tiktoken.model": ("tiktoken", ""),
    "spiece.model": ("sentencepiece", ""),
    "sentencepiece.bpe.model": ("sentencepiece", ""),
    "tekken.json": ("mistral-common", ', save_format="hf"'),
    "vocab.json": ("", ""),
    "vocab.txt": ("", ""),
}
"""Tokenizer files that an artifact cannot take, the best first -> the package that transformers
needs to read one (empty: none), and further arguments with which its `save_pretrained` writes a
tokenizer.json of it."""

OLD_TEMPLATE = "chat_template.json"
"""File in which older multimodal checkpoints keep the chat template of their processor."""

FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")
"""Flags of an added token."""

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Roles of special tokens, in transformers' order."""

MORE_TEMPLATES = "additional_chat_templates"
"""Folder in which transformers keeps chat templates other than the default."""


Files = dict[str, Path | bytes]
"""Name of a file in the artifact -> path of its source, or its content."""


def text_files(folder: Path, vocab_size: int) -> Files:
    """Text files of `folder` for the artifact: those in NAMES, and chat templates.

    `vocab_size`: tokens of the model. ModelError for a damaged tokenizer or template, which would
    otherwise fail only when the artifact is used.
    """
    more = [f"{MORE_TEMPLATES}/{p.name}" for p in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
    found: Files = {n: folder / n for n in (*NAMES, *more) if (folder / n).is_file()}
    if TOKENIZER in found:
        found[TOKENIZER] = whole_tokenizer(folder / TOKENIZER, vocab_size)
    if TEMPLATE not in found and (old := _old_template(folder / OLD_TEMPLATE)) is not None:
        found[TEMPLATE] = old.encode()
    for name in (SETTINGS, SPECIAL_TOKENS):
        if name in found:
            _read_object(folder / name)
    for where, template in _templates(folder, found):
        require_template(where, template)
    return found


def tokenizer_notes(folder: Path, files: Files, vocab_size: int) -> tuple[str, ...]:
    """A note for the manifest if none of `files` is a tokenizer, or if some of the tokenizer's ids
    are not below `vocab_size`; else empty."""
    if TOKENIZER in files:
        vocabulary = read_tokenizer(folder / TOKENIZER, ModelError).get_vocab()
        beyond = {place: token for token, place in vocabulary.items() if place >= vocab_size}
        if not beyond:
            return ()
        first = min(beyond)
        return (
            f"tokenizer: the model's table of {vocab_size} rows has none for {len(beyond)} of its "
            f"tokens, such as {beyond[first]!r:.40} (id {first}); a prompt with one is refused",
        )
    other = next((name for name in OTHER_TOKENIZERS if (folder / name).is_file()), None)
    if other is None:
        return (f"tokenizer: the artifact takes token ids alone: there is no {TOKENIZER}",)
    package, arguments = OTHER_TOKENIZERS[other]
    save = f"AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR{arguments})"
    needed = f", with the package {package}," if package else ""
    return (
        f"tokenizer: the artifact takes token ids alone, since the checkpoint has {other} and no "
        f"{TOKENIZER}; transformers{needed} writes one: {save}",
    )


def _templates(folder: Path, found: Files) -> Iterator[tuple[str, object]]:
    """Each chat template with its place for error messages: template files or, if there are none,
    those in the tokenizer's settings. A chat reads them in the same order."""
    files = [name for name in found if name.endswith(".jinja")]
    for name in files:
        file = found[name]
        if isinstance(file, bytes):
            yield str(folder / OLD_TEMPLATE), file.decode()
        else:
            yield str(folder / name), read_text(file, ModelError)
    if files or SETTINGS not in found:
        return
    where = f"{folder / SETTINGS}: chat_template"
    given = _read_object(folder / SETTINGS).get("chat_template")
    if not isinstance(given, list):
        given = [] if given is None else [{"name": "default", "template": given}]
    for entry in given:
        is_named = isinstance(entry, dict) and isinstance(entry.get("name"), str)
        yield where, entry.get("template") if is_named else given


def require_template(where: str, template: object) -> None:
    """Raise ModelError if a chat template is no text, is empty, or does not parse."""
    from kvgraph.contract.templates import environment, in_one_line

    if not isinstance(template, str):
        got = f"{type(template).__name__} {template!r:.100}"
        raise ModelError(f"{where}: expected text, or templates with names, got {got}")
    if not template.strip():
        raise ModelError(
            f"{where}: expected a chat template, got an empty one; remove it to compile without one"
        )
    try:
        with in_one_line():
            environment().from_string(template)
    except ValueError as error:
        raise ModelError(
            f"{where}: expected a template in Jinja, got one that does not parse ({error})"
        ) from error


def _read_object(path: Path) -> Mapping[str, object]:
    given = read_json(path)
    if not isinstance(given, dict):
        raise ModelError(f"{path}: expected an object, got {type(given).__name__}")
    return given


def _old_template(path: Path) -> str | None:
    """The chat template in a JSON file; None if there is no file or it has none.

    It takes precedence over one in the tokenizer's settings, as in transformers' processors.
    ModelError for a damaged file.
    """
    if not path.is_file():
        return None
    fields = read_json(path)
    given = fields.get("chat_template") if isinstance(fields, dict) else fields
    if not isinstance(given, str | None):
        raise ModelError(f"{path}: expected a chat_template of text, got {type(given).__name__}")
    return given


def whole_tokenizer(path: Path, vocab_size: int) -> Path | bytes:
    """The tokenizer's `path`, or new content if tokenizer_config.json in its folder adds tokens or
    gives known tokens other flags.

    Tokens are added in the order of transformers 5. A token for which the model's table has no row
    is left out, so its text is tokenized as plain text. ModelError for a damaged file.
    """
    tokenizer = read_tokenizer(path, ModelError)
    before = _flags_in(tokenizer)
    known = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in known if token.special}
    for token in _added(path.with_name(SETTINGS), known):
        is_new = tokenizer.token_to_id(token.content) is None
        if is_new and tokenizer.get_vocab_size() >= vocab_size:
            continue
        if token.special or token.content in special:  # which it stays
            special.add(token.content)
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return path if _flags_in(tokenizer) == before else tokenizer.to_str().encode()


def _flags_in(tokenizer: Tokenizer) -> dict[int, str]:
    """Added tokens with their flags, by id: what `whole_tokenizer` may change."""
    return {place: repr(token) for place, token in tokenizer.get_added_tokens_decoder().items()}


def _added(path: Path, known: Collection[AddedToken]) -> list[AddedToken]:
    """Tokens that a tokenizer_config.json names: tokens with ids, then with roles, then the others.

    Older files have no ids; two more files in the folder are then read, and tokens that are `known`
    keep their flags.
    """
    from tokenizers import AddedToken

    config, is_old = _merged_settings(path)
    try:
        named = [config.get(f"{role}_token") for role in ROLES]
        listed = config.get(OTHERS) or ()
        if isinstance(listed, dict):
            named += listed.values()
            listed = ()
        spelled = {each["content"] for each in _as_tokens([*named, *listed])}
        others = listed or config.get(OTHERS_BEFORE) or ()
        decoder = config.get("added_tokens_decoder") or {}
        if is_old and (added := path.with_name(ADDED_TOKENS)).is_file():
            for content, place in _read_object(added).items():
                flags = {"special": content in spelled, "normalized": content not in spelled}
                decoder[place] = {"content": content, **flags}
        flags_of: dict[str, JsonObject] = {each["content"]: each for each in decoder.values()}
        kept = {each.content: {k: getattr(each, k) for k in FLAGS} for each in known}
        if is_old:
            flags_of |= kept
        unsaid, always = {"special": True, "normalized": False}, {"special": True}
        by_place = sorted(decoder.items(), key=lambda pair: int(pair[0]))
        given: list[tuple[JsonObject, JsonObject]] = [(each, {}) for _, each in by_place]
        given += [(unsaid | each, always) for each in _as_tokens(named)]
        given += [(unsaid | each, {}) for each in _as_tokens(others)]
        tokens = [each | flags_of.get(each["content"], {}) | forced for each, forced in given]
        return [
            AddedToken(str(each["content"]), **{k: bool(each[k]) for k in FLAGS if k in each})
            for each in tokens
            if each["content"] in flags_of or each["content"] not in kept
        ]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"{path}: expected settings of a tokenizer, got {error!r}") from error


def _merged_settings(path: Path) -> tuple[JsonObject, bool]:
    """Settings of a tokenizer_config.json, with those of special_tokens_map.json if it is of the
    older form, without ids; and whether it is."""
    config: JsonObject = dict(_read_object(path)) if path.is_file() else {}
    if config.get(OTHERS_BEFORE) and not config.get(OTHERS):
        config[OTHERS] = config.pop(OTHERS_BEFORE)
    is_old = "added_tokens_decoder" not in config
    if is_old and (special := path.with_name(SPECIAL_TOKENS)).is_file():
        more: JsonObject = dict(_read_object(special))
        listed, mine = more.get(OTHERS), config.get(OTHERS)
        if isinstance(listed, list) and isinstance(mine, dict):
            more |= {OTHERS: mine, OTHERS_BEFORE: listed}
        elif isinstance(listed, list):
            more[OTHERS] = [*(mine or ()), *listed]
        config |= more
    return config, is_old


def _as_tokens(given: Iterable[object]) -> list[JsonObject]:
    return [
        dict(each) if isinstance(each, dict) else {"content": each}
        for each in given
        if each is not None
    ]


def generation_notes(folder: Path) -> tuple[str, ...]:
    """Notes on the sampling settings of a generation_config.json: those that are applied, and those
    that kvgraph does not have. ModelError for a value that no request can have."""
    path = folder / GENERATION
    if not path.is_file():
        return ()
    config = _read_object(path)
    unknown = {
        name: config[name] for name, none in UNKNOWN_HERE.items() if config.get(name) not in none
    }
    applied = suggested(config)
    try:
        require_suggested(applied)
    except RequestError as error:
        raise ModelError(f"{path}: {error}; correct or remove it") from error
    said = {APPLIED: applied, WITHOUT_PLACE: unknown}
    return tuple(
        f"{GENERATION}: {kind}: {', '.join([f'{n} {value!r:.40}' for n, value in each.items()])}"
        for kind, each in said.items()
        if each
    )


UNKNOWN_HERE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (None, 0)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), (None, [])),
    **dict.fromkeys(("force_words_ids", "sequence_bias"), (None, [], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), (None,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (None, 1)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (None, 0)),
    **dict.fromkeys(("num_beams", "num_beam_groups"), (None, 1)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), (None,)),
}
"""Settings of transformers that change the text and that are not applied -> values without effect.
A request may ask for some of them by other names: `logit_bias`, `min_new_tokens`."""

APPLIED = "the defaults of `kvgraph chat` and `serve`"
WITHOUT_PLACE = "not applied"


def end_notes(eos: Iterable[int], vocab_size: int) -> tuple[str, ...]:
    """A note for the manifest if some of the end tokens `eos` are no ids of the model; else
    empty."""
    beyond = [token for token in eos if not 0 <= token < vocab_size]
    if not beyond:
        return ()
    ids = ", ".join(map(str, beyond))
    return (f"end tokens: the model's table of {vocab_size} rows has none for {ids}",)


def end_tokens(path: Path) -> tuple[tuple[int, ...], int | None]:
    """End tokens and the begin token of a generation_config.json; `((), None)` without the file.

    ModelError for a damaged file.
    """
    if not path.is_file():
        return (), None
    config = cast(Config, _read_object(path))
    eos, bos = (config.get(f"{role}_token_id") for role in ("eos", "bos"))
    return (
        as_ids(f"{path}: eos_token_id", eos, ModelError),
        as_id(f"{path}: bos_token_id", bos, ModelError),
    )


def as_ids(
    name: str, given: int | Iterable[int] | None, refusal: type[KVGraphError]
) -> tuple[int, ...]:
    """Token ids of a field that holds one id, several or None. Raise `refusal`, with `name` in its
    message, for anything that is no integer of 32 bits."""
    if given is None:
        return ()
    several: list[object] = [given]
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        with suppress(TypeError):  # an array of no dimensions is one id
            several = list(given)
    return tuple(_id(name, each, refusal) for each in several)


def as_id(name: str, given: int | None, refusal: type[KVGraphError]) -> int | None:
    """The token id of a field that holds one id or None. Raise `refusal` as `as_ids` does."""
    return None if given is None else _id(name, given, refusal)


def _id(name: str, given: object, refusal: type[KVGraphError]) -> int:
    found = require_integer(name, given, refusal)
    if abs(found) > MOST:
        raise refusal(f"{name}: expected an id of 32 bits, got {found}")
    return found
