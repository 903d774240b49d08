"""GGUF files: the tokenizer, end tokens and chat templates that are read from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import kvgraph
from kvgraph import KVGraphError
from kvgraph.compiler.frontends import gguf_tokenizer
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.compiler.frontends.text_files import text_files
from kvgraph.runtime.chat import Prompts
from kvgraph.runtime.chat_templates import ChatTemplates
from tests.support import gguf_files

Read = tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, Any]]


@pytest.fixture
def read(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> Callable[[dict[str, object]], Read]:
    """What becomes of a tokenizer's metadata: a tokenizer, its settings and the configuration."""

    def read(said: dict[str, object]) -> Read:
        path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
        with as_folder(path) as folder:
            names = ("tokenizer_config.json", "config.json")
            settings, config = (json.loads((folder / name).read_text()) for name in names)
            file = folder / "tokenizer.json"
            return tokenizers.Tokenizer.from_file(str(file)), settings, config

    return read


BEGIN, END, USER = (
    f"<\uff5c{name}\uff5c>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User")
)


@pytest.mark.parametrize("pre", ["deepseek-r1-qwen", "llama-bpe", "gpt-2"])
def test_tokens_keep_their_places(pre: str, read: Callable[..., Read]) -> None:
    """Those that are not ASCII, and those of spaces, next to a word of two spaces."""
    added = {BEGIN: 3, END: 3, USER: 4, "  ": 4, "\n\n": 4}
    said = gguf_files.byte_level(
        pre, added, bos_token_id=257, eos_token_id=258, padding_token_id=258, add_bos_token=True
    )
    tokenizer, settings, config = read(said)
    assert tokenizer.get_vocab_size() == len(said["tokens"])
    for place, token in enumerate(said["tokens"]):
        assert tokenizer.token_to_id(token) == place, token
    found = tokenizer.encode(f"{USER}  {END}\n\n")
    assert found.ids == [257, 259, 260, 258, 261]
    assert tokenizer.decode(found.ids) == f"{USER}  \n\n"
    assert [settings[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")] == [
        BEGIN, END, END, None
    ]  # fmt: skip
    assert (config["bos_token_id"], config["eos_token_id"]) == (257, [258])


def test_a_token_at_two_places(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    said = gguf_files.byte_level("gpt-2", {"<s>": 3, "</s>": 3})
    said["tokens"][-1] = "<s>"
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
    assert "tokenizer.ggml.tokens: expected '<s>' at 257 alone, got it at 258; " in refused(path)


def test_a_role_without_a_token(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    said = gguf_files.byte_level("gpt-2", {"<s>": 3, "</s>": 3}) | {"bos_token_id": 5000}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
    assert "tokenizer.ggml.bos_token_id: expected one of 259 tokens, got 5000; " in refused(path)


@pytest.mark.parametrize("place", [259, 2**32 - 1])
def test_ids_of_padding_and_unknown_without_a_token(place: int, read: Callable[..., Read]) -> None:
    said = gguf_files.byte_level("gpt-2", {"<s>": 3, "</s>": 3}, bos_token_id=257)
    tokenizer, settings, _ = read(said | {"padding_token_id": place, "unknown_token_id": place})
    whole, _, _ = read(said)
    assert tokenizer.encode("! a<s>").ids == whole.encode("! a<s>").ids
    assert (settings["pad_token"], settings["unk_token"]) == (None, None)


@pytest.mark.parametrize(
    ("said", "ids", "text"),
    [
        ({}, [1, 259], "hi"),
        ({"add_space_prefix": True}, [1, 259], "hi"),
        ({"add_space_prefix": False}, [1, 260], "hi"),
        ({"add_space_prefix": False, "add_bos_token": False}, [260], "hi"),
        ({"add_space_prefix": False}, [1, 259], " hi"),
    ],
)
def test_the_space_before_a_text(
    said: dict[str, object], ids: list[int], text: str, read: Callable[..., Read]
) -> None:
    tokenizer, _, _ = read(gguf_files.sentencepiece(**said))
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("hi", [259]),
        (" hi", [261, 259]),
        ("<s>hi", [1, 259]),
        ("<s> hi", [1, 261, 259]),
        ("hi</s>hi<s>hi", [259, 2, 259, 1, 259]),
        ("hi<user>hi", [259, 264, 259]),
        ("<s></s>", [1, 2]),
    ],
)
def test_a_text_behind_a_token_gets_a_space_too(
    text: str, ids: list[int], read: Callable[..., Read]
) -> None:
    """llama.cpp's rule: one before each text that is first, or behind a special token."""
    said = gguf_files.sentencepiece()
    said["tokens"].append("<user>")
    said["scores"].append(0.0)
    said["token_type"].append(4)
    tokenizer, _, _ = read(said)
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.encode(text).ids == [1, *ids]


def test_the_text_of_a_chat(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    path = gguf_files.make(
        model_folder("llama"),
        tmp_path / "model.gguf",
        text=gguf_files.sentencepiece(),
        tokenizer__chat_template=template,
    )
    with as_folder(path) as folder:
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " hi"}]
        found = Prompts(folder).apply_chat_template(chat)
    assert found == [1, 259, 2, 1, 261, 259, 2]


def test_spaces_are_spelled_as_the_file_says(
    read: Callable[..., Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever steps transformers has for them."""

    def convert(path: Path, folder: Path, *given: object) -> None:
        own(path, folder, *given)
        file = folder / "tokenizer.json"
        prepend = {"type": "Prepend", "prepend": "▁"}
        data = json.loads(file.read_text()) | {"normalizer": prepend, "decoder": None}
        file.write_text(json.dumps(data))

    own = gguf_tokenizer._convert
    monkeypatch.setattr(gguf_tokenizer, "_convert", convert)
    tokenizer, _, _ = read(gguf_files.sentencepiece(add_space_prefix=False))
    assert tokenizer.encode(" hi hi").ids == [1, 259, 259]
    assert tokenizer.decode([1, 259, 259]) == " hi hi"


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [
        ("llama-bpe", {}, True),
        ("llama3", {}, True),
        ("llama-v3", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_who_adds_the_first_token(
    pre: str, said: dict[str, object], adds: bool, read: Callable[..., Read]
) -> None:
    tokenizer, _, _ = read(gguf_files.byte_level(pre, {BEGIN: 3}, bos_token_id=257, **said))
    assert tokenizer.encode(BEGIN).ids == [257] * (1 + adds)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_files_next_to_it_say_nothing(
    name: str,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model's folder, which llama.cpp's converter writes into."""
    said = gguf_files.sentencepiece()
    if name == "byte_level":
        said = gguf_files.byte_level("llama-bpe", {BEGIN: 3, END: 3}, bos_token_id=257)
    template = {"tokenizer__chat_template": "own"}
    path = gguf_files.make(model_folder("llama"), tmp_path / "own.gguf", text=said, **template)
    alone = text_of(path)
    foreign = json.loads(alone["tokenizer.json"]) | {"post_processor": None}
    assert foreign != json.loads(alone["tokenizer.json"])
    others = {
        "tokenizer.json": foreign,
        "tokenizer_config.json": {"add_bos_token": False, "chat_template": "foreign"},
        "config.json": {"model_type": "gemma2"},
    }
    for file, content in others.items():
        (tmp_path / file).write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    assert text_of(Path(path.name)) == alone
    assert alone["chat_template.jinja"] == "own"


def text_of(path: Path) -> dict[str, str]:
    with as_folder(path) as folder:
        return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ({}, None),
        ({"eos_token_id": 258}, [258]),
        ({"eos_token_id": 258, "eot_token_id": 259, "eom_token_id": 258}, [258, 259]),
        ({"eom_token_id": 258}, [258]),
        ({"eos_token_id": 258, "eot_token_id": (1 << 32) - 1, "eom_token_id": 5000}, [258]),
    ],
)
def test_end_tokens(
    said: dict[str, object], ends: list[int] | None, read: Callable[..., Read]
) -> None:
    added = {"<a>": 3, "<b>": 3, "<c>": 3}
    _, _, config = read(gguf_files.byte_level("gpt-2", added, **said))
    assert config["bos_token_id"] is None
    assert config["eos_token_id"] == ends


IM_END, EOT_ID, TEXT, CALL, RETURN, MESSAGE = (
    f"<|{name}|>" for name in ("im_end", "eot_id", "endoftext", "call", "return", "end")
)


@pytest.mark.parametrize(
    ("added", "said", "ends"),
    [
        ({"<a>": 3, IM_END: 3, TEXT: 3}, {}, [258, 259]),
        ({TEXT: 3, IM_END: 3}, {"eos_token_id": 258}, [258, 257]),
        ({"<a>": 3, EOT_ID: 4}, {"eos_token_id": 257}, [257, 258]),  # of another type
        ({"<a>": 3, EOT_ID: 1}, {"eos_token_id": 257}, [257]),  # a word
        ({MESSAGE: 3, CALL: 3}, {}, [257, 258]),
        ({MESSAGE: 3, CALL: 3, RETURN: 3}, {"eos_token_id": 259}, [259, 258]),
        ({MESSAGE: 3, CALL: 3, RETURN: 3}, {"eot_token_id": 257}, [258, 259]),
        ({MESSAGE: 3, "<|calls|>": 3, "<|flush|>": 3}, {}, [258, 259]),
        ({"<|tool_response>": 3, "</s>": 3}, {}, [257]),
        ({"<a>": 3, "</s>": 4}, {"eos_token_id": 257}, [257, 258]),
        ({END: 3, "[EOT]": 3, "_<EOT>": 3, "<eos>": 3}, {}, [257, 258, 259, 260]),
        ({"<|fim_pad|>": 3, "<|repo_name|>": 3, "<|file_sep|>": 4}, {}, [257, 258, 259]),
        ({"<|fim_pad|>": 3, "<a>": 3}, {"fim_pad_token_id": 258}, [258]),
        ({"<reponame>": 1, "<a>": 3}, {"fim_sep_token_id": 258}, [258]),
    ],
)
def test_end_tokens_by_their_spelling(
    added: dict[str, int], said: dict[str, object], ends: list[int], read: Callable[..., Read]
) -> None:
    """As llama.cpp takes them; of harmony's, the end of a message ends no answer."""
    _, _, config = read(gguf_files.byte_level("gpt-2", added, **said))
    assert config["eos_token_id"] == ends


def test_chat_templates_with_names(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    templates = {f"tokenizer__chat_template__{name}": f"{name}!" for name in ("tool_use", "rag")}
    path = gguf_files.make(
        model_folder("llama"),
        tmp_path / "model.gguf",
        text=gguf_files.byte_level("gpt-2", {"<s>": 3}),
        tokenizer__chat_template="plain!",
        tokenizer__chat_templates=["tool_use", "rag"],
        **templates,
    )
    with as_folder(path) as folder:
        names = [name for name in text_files(folder, 160) if "chat_template" in name]
        found = ChatTemplates(folder)
        chat = [{"role": "user", "content": "hi"}]
        assert found.render(chat) == "plain!"
        assert found.render(chat, chat_template="rag") == "rag!"
        assert found.render(chat, tools=[]) == "tool_use!"
    more = "additional_chat_templates"
    assert names == ["chat_template.jinja", f"{more}/rag.jinja", f"{more}/tool_use.jinja"]


@pytest.mark.parametrize("name", ["../rag", "a/b", "..", "", "a b"])
def test_a_name_of_a_chat_template_is_a_file_s(
    name: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    said = gguf_files.byte_level("gpt-2", {"<s>": 3})
    field = {f"tokenizer__chat_template__{name}": "text"}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said, **field)
    key = f"tokenizer.chat_template.{name}"
    assert f"{key}: expected a name of letters, digits, _ and -, got {name!r}; " in refused(path)


@pytest.mark.parametrize("pre", [None, "default", "viking"])
def test_ways_to_split_that_are_not_known(
    pre: str | None, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    said = gguf_files.byte_level(pre, {"<s>": 3})
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
    got = "none" if pre is None else repr(pre)
    assert (
        f"tokenizer.ggml.pre: expected a known way to split text, got {got}; compile the checkpoint"
    ) in refused(path)


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("llama-bpe", " xyz", ["Ġxyz"]),  # though no merges make it
        ("qwen2", " xyz", ["Ġ", "x", "y", "z"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
        ("gpt-2", "a  1", ["a", "Ġ", "Ġ", "1"]),
        ("smollm", "a  1", ["a", "ĠĠ", "1"]),
        ("glm4", " xyz", ["Ġxyz"]),
        ("deepseek-v3", " xyz", ["Ġ", "x", "y", "z"]),
    ],
)
def test_what_a_way_to_split_implies(
    pre: str, text: str, tokens: list[str], read: Callable[..., Read]
) -> None:
    tokenizer, _, _ = read(gguf_files.byte_level(pre, {"<s>": 3}, ["Ġxyz"], add_bos_token=False))
    assert tokenizer.encode(text).tokens == tokens


def test_how_a_file_is_sampled(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The fields in which llama.cpp's conversion keeps those of generation_config.json."""
    said = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05}
    fields = {f"general__sampling__{name}": value for name, value in said.items()}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=BYTES, **fields)
    with as_folder(path) as folder:
        params = Prompts(folder).default_sampling_params()
        assert "generation_config.json" in text_files(folder, 300)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    assert params.repetition_penalty == 1.05
    plain = gguf_files.make(model_folder("llama"), tmp_path / "plain.gguf", text=BYTES)
    with as_folder(plain) as folder:
        assert not (folder / "generation_config.json").exists()


def refused(path: Path) -> str:
    with pytest.raises(KVGraphError) as error:
        kvgraph.compile(path, path.with_name("out"), check=False)
    assert not path.with_name("out").exists()
    return str(error.value)


def without(said: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given for name, given in said.items() if name not in names}


BYTES, PIECES = gguf_files.byte_level("gpt-2", {"<s>": 3}), gguf_files.sentencepiece()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (without(BYTES, "tokens"), "tokens: expected a list, got none; compile the checkpoint"),
        (without(BYTES, "merges"), "merges: expected a list, got none; compile the checkpoint"),
        (BYTES | {"merges": ["ab"]}, "merges: expected two tokens with a space between them in "),
        (BYTES | {"merges": ["a b"]}, "merges: expected 'ab', of the merge 'a b', as a token, got"),
        (without(PIECES, "scores"), "scores: expected a list, got none; compile the checkpoint"),
        (PIECES | {"scores": "abc"}, "scores: expected a list of finite numbers, got 'abc'; comp"),
        (BYTES | {"token_type": "abc"}, "token_type: expected a list of whole numbers, got 'abc';"),
        (BYTES | {"add_bos_token": "no"}, "add_bos_token: expected true or false, got 'no'; comp"),
        (BYTES | {"pre": ["gpt-2"]}, "pre: expected text, got ['gpt-2']; compile the checkpoint"),
        (BYTES | {"eot_token_id": math.nan}, "eot_token_id: expected a whole number, got nan; co"),
        (PIECES | {"unknown_token_id": math.inf}, "unknown_token_id: expected a whole number, go"),
        (PIECES | {"scores": [math.nan] * 264}, "scores: expected a list of finite numbers, got "),
        (PIECES | {"scores": [0.0]}, "scores: expected 264, one of each token, got 1; compile the"),
        (
            PIECES | {"tokens": [*PIECES["tokens"][:-1], "hix"]},
            "tokens: expected 'i', a character of '▁hi', as a token, got none; compile the check",
        ),
    ],
)
def test_a_vocabulary_that_is_not_whole(
    said: dict[str, Any], message: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
    assert f"{path}: tokenizer.ggml.{message}" in refused(path)


def test_a_template_that_does_not_parse(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    field = {"tokenizer__chat_template": "{% if %}"}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=BYTES, **field)
    said = f"{path}: tokenizer.chat_template: expected a template in Jinja, got one that does not"
    assert refused(path).startswith(said)
