"""Files about text that travel from a checkpoint into an artifact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import kvgraph
from kvgraph import ModelError
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.text_files import generation_notes, text_files, tokenizer_notes
from kvgraph.runtime.chat_templates import ChatTemplates
from tests.support.artifacts import TINY_LLAMA
from tests.support.models import make_model


def test_chat_templates_and_all_end_tokens_travel(tmp_path: Path) -> None:
    """As of chat models: an end token of texts and one of turns, and a template for tools."""
    model = make_model("llama", tmp_path / "model", vocab_size=2048)
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    PreTrainedTokenizerFast(
        tokenizer_file=str(TINY_LLAMA / "tokenizer.json"),
        chat_template={"default": "a", "tool_use": "b"},
    ).save_pretrained(model)
    manifest = kvgraph.compile(model, tmp_path / "out", check=False)
    assert manifest.model.eos_token_ids == [1, 7]
    assert huggingface.load(model, "float32", weightless=True).eos_token_ids == (1, 7)
    assert {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"} <= set(
        manifest.files
    )
    chats = ChatTemplates(kvgraph.load(tmp_path / "out").folder)
    messages = [{"role": "user", "content": "x"}]
    assert (chats.render(messages), chats.render(messages, tools=[])) == ("a", "b")


def test_a_template_of_a_processor_travels(tmp_path: Path) -> None:
    """Older checkpoints of models that see images have it in JSON; their tokenizer's comes after
    it, and a file of the template alone before it."""
    folder = settings(tmp_path, chat_template="the tokenizer's")
    old = folder / "chat_template.json"
    old.write_text('{"chat_template": "the é of its processor"}')
    found = text_files(folder, 2048)
    assert found["chat_template.jinja"] == "the é of its processor".encode()
    assert "chat_template.json" not in found
    (folder / "chat_template.jinja").write_text("newer")
    assert text_files(folder, 2048)["chat_template.jinja"] == folder / "chat_template.jinja"
    (folder / "chat_template.jinja").unlink()
    old.write_text('{"chat_template": null}')
    assert "chat_template.jinja" not in text_files(folder, 2048)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"chat_template": 3}', "expected a chat_template of text, got int"),
        ("[]", "expected a chat_template of text, got list"),
        ("{", "expected JSON, got a damaged file"),
    ],
)
def test_a_damaged_template_of_a_processor_is_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(ModelError, match=rf"chat_template\.json: {message}"):
        text_files(tmp_path, 2048)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": [2, 5', "expected JSON, got a damaged file (Expecting"),
        ("[]", "expected an object, got list"),
        ("null", "expected an object, got NoneType"),
        ('{"eos_token_id": [2, null]}', "eos_token_id: expected an integer, got NoneType None"),
        ('{"eos_token_id": "151645"}', "eos_token_id: expected an integer, got str '151645'"),
        ('{"eos_token_id": 2.5}', "eos_token_id: expected an integer, got float 2.5"),
        ('{"eos_token_id": 4294967296}', "eos_token_id: expected an id of 32 bits, got 4294967296"),
        *(
            (f'{{"do_sample": true, "{name}": {value}}}', f"{name}: expected {expected}, got ")
            for name, value, expected in (
                ("temperature", "-1", ">= 0 and finite"),
                ("temperature", "NaN", ">= 0 and finite"),
                ("temperature", '"0.7"', "a number"),
                ("top_p", "1.5", "in (0, 1]"),
                ("top_k", "-2", ">= 0"),
                ("top_k", "0.5", "an integer >= 0"),
                ("repetition_penalty", "[2]", "a number"),
            )
        ),
        ('{"repetition_penalty": 0}', "repetition_penalty: expected in [1e-9, 1e9], got 0.0; cor"),
        ('{"bos_token_id": true}', "bos_token_id: expected an integer, got bool True"),
    ],
)
@pytest.mark.parametrize("weightless", [True, False])
def test_a_damaged_generation_config(
    content: str, message: str, weightless: bool, llama: Path, tmp_path: Path
) -> None:
    """The end tokens of config.json are others."""
    path = shutil.copytree(llama, tmp_path / "model") / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ModelError) as refused:
        huggingface.load(path.parent, "float32", weightless=weightless)
    assert str(refused.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    "field",
    [
        {"max_new_tokens": 0},
        {"num_return_sequences": 2},
        {"cache_implementation": "none of transformers'"},
        {"watermarking_config": {"a": 1}},
    ],
)
@pytest.mark.parametrize("weightless", [True, False])
def test_generation_fields_that_nothing_reads(
    field: dict[str, object], weightless: bool, llama: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(field | {"eos_token_id": [5, 7]}))
    assert huggingface.load(folder, "float32", weightless=weightless).eos_token_ids == (5, 7)


def settings(folder: Path, **fields: object) -> Path:
    """A folder with the tokenizer of tiny-llama, and such a tokenizer_config.json."""
    shutil.copyfile(TINY_LLAMA / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


MORE: dict[str, object] = {
    "2049": {"content": "<b>", "special": False},
    "2048": {"content": "<a>", "special": True, "lstrip": True},
}


@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
def test_tokens_that_only_the_settings_have_are_added(name: str, tmp_path: Path) -> None:
    """As transformers adds them: those with ids first, those with a role, then the others."""
    others = {name: ["<c>", "<a>", "<s>"], "pad_token": "<p>", "eos_token": "<e>"}
    folder = settings(tmp_path, added_tokens_decoder=MORE, **others)
    found = text_files(folder, 2100)["tokenizer.json"]
    assert isinstance(found, bytes)
    tokenizer = Tokenizer.from_str(found.decode())
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("in <a>put<b> of <c>", "<s>import </s><p><e>"):
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"]
    assert [tokenizer.token_to_id(f"<{letter}>") for letter in "abepc"] == [*range(2048, 2053)]


@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("has_settings", [False, True])
def test_tokens_of_older_files_are_added(name: str, has_settings: bool, tmp_path: Path) -> None:
    """Settings that have no ids: two more files have the tokens, as transformers reads them."""
    folder = settings(tmp_path, additional_special_tokens=["<lost>"])
    if not has_settings:
        (folder / "tokenizer_config.json").unlink()
    special = {name: ["<x>", "<y>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special | {"eos_token": "</s>"}))
    (folder / "added_tokens.json").write_text(json.dumps({"<plain>": 2049, "<y>": 2048}))
    found = text_files(folder, 2100)["tokenizer.json"]
    assert isinstance(found, bytes)
    tokenizer = Tokenizer.from_str(found.decode())
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("in <x>put <y> of <plain>", "<y>import</s>", "<lost>"):
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_damaged_older_files_are_refused(name: str, tmp_path: Path) -> None:
    folder = settings(tmp_path)
    (folder / name).write_text('{"additional_special_tokens": 5, "a": "b"}')
    with pytest.raises(ModelError, match="expected settings of a tokenizer"):
        text_files(folder, 2100)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"repetition_penalty": 1.05}, "repetition_penalty 1.05"),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 1.0},
            "temperature 0.7, top_k 20",
        ),
        ({"do_sample": True}, "temperature 1.0"),
        ({"do_sample": False, "temperature": 0.7, "top_k": 20}, ""),
        ({"repetition_penalty": 1.0, "suppress_tokens": [], "no_repeat_ngram_size": 0}, ""),
    ],
)
def test_how_a_checkpoint_samples_is_said(
    fields: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    note = f"generation_config.json: the defaults of `kvgraph chat` and `serve`: {said}"
    assert generation_notes(tmp_path) == ((note,) if said else ())


def test_what_no_request_has_is_said(tmp_path: Path) -> None:
    fields = {"suppress_tokens": [3, 4], "repetition_penalty": 2, "num_beams": 4, "typical_p": 1.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert generation_notes(tmp_path) == (
        "generation_config.json: the defaults of `kvgraph chat` and `serve`: repetition_penalty 2",
        "generation_config.json: not applied: suppress_tokens [3, 4], num_beams 4",
    )


@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
def test_tokens_with_names_and_tokens_of_an_older_file(name: str, tmp_path: Path) -> None:
    folder = settings(tmp_path, extra_special_tokens={"image_token": "<img>"})
    (folder / "special_tokens_map.json").write_text(json.dumps({name: ["<x>"]}))
    found = text_files(folder, 2100)["tokenizer.json"]
    assert isinstance(found, bytes)
    tokenizer = Tokenizer.from_str(found.decode())
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("an image_token", "<img>import", "<x>", "<x><img>"):
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"]


NEW = {"__type": "AddedToken"}
"""transformers' form of one with flags."""


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token": "<e>"},
        {"eos_token": {**NEW, "content": "<e>", "rstrip": True}},
        {"added_tokens_decoder": {"2048": {"content": "<e>", "special": True}}},
        {"added_tokens_decoder": {"2048": {"content": "<e>", "rstrip": True, "lstrip": True}}},
        {
            "added_tokens_decoder": {"2048": {"content": "<e>", "rstrip": True}},
            "eos_token": "<e>",
        },
        {"added_tokens_decoder": {"0": {"content": "<s>", "normalized": False}}},
        {"added_tokens_decoder": {}, "mask_token": {**NEW, "content": "<e>", "lstrip": True}},
        {"added_tokens_decoder": {}, "extra_special_tokens": ["<e>"]},
    ],
)
def test_settings_say_the_flags_of_known_tokens(fields: dict[str, object], tmp_path: Path) -> None:
    """As in transformers, which leaves a token that has a role, and no entry, as it is."""
    folder = settings(tmp_path, **fields)
    known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known.add_tokens([AddedToken("<e>", normalized=False)])
    known.save(str(folder / "tokenizer.json"))
    found = text_files(folder, 2100)["tokenizer.json"]
    text = found.decode() if isinstance(found, bytes) else found.read_text()
    tokenizer = Tokenizer.from_str(text)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("the <e> import <s> of", "<e>import <s>"):
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_token_without_a_row_stays_text(tmp_path: Path) -> None:
    folder = settings(tmp_path, added_tokens_decoder=MORE)
    found = text_files(folder, 2049)["tokenizer.json"]
    assert isinstance(found, bytes)
    tokenizer = Tokenizer.from_str(found.decode())
    assert (tokenizer.token_to_id("<a>"), tokenizer.token_to_id("<b>")) == (2048, None)
    assert text_files(folder, 2048)["tokenizer.json"] == folder / "tokenizer.json"


def test_a_tokenizer_that_lacks_nothing_travels_as_it_is(tmp_path: Path) -> None:
    folder = settings(tmp_path, additional_special_tokens=["<s>"], pad_token=None)
    assert text_files(folder, 2100)["tokenizer.json"] == folder / "tokenizer.json"


@pytest.mark.parametrize(
    "fields", [{"added_tokens_decoder": {"a": {}}}, {"added_tokens_decoder": 1}]
)
def test_damaged_settings_are_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(
        ModelError, match=r"tokenizer_config.json: expected settings of a tokenizer"
    ):
        text_files(settings(tmp_path, **fields), 2100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a chat template, got an empty one; remove it to compile without one"),
        (b" \n", "expected a chat template, got an empty one; remove it to compile without one"),
        (b"\xff\xfe\x00", "expected text in UTF-8, got 'utf-8' codec can't"),
        (b"a\n{% for %}", "expected a template in Jinja, got one that does not parse (line 2: Exp"),
        (b"{{ x | none_such }}", "expected a template in Jinja, got one that does not parse (line"),
    ],
)
@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_damaged_template_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(ModelError) as refused:
        text_files(tmp_path, 2048)
    assert str(refused.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "expected text, or templates with names, got int 5"),
        ([{"name": "default"}], "expected text, or templates with names, got NoneType None"),
        (["default"], "expected text, or templates with names, got list ['default']"),
        ("{% if %}", "expected a template in Jinja, got one that does not parse (line 1: Expected"),
    ],
)
def test_a_damaged_template_in_the_settings_is_refused(
    given: object, message: str, tmp_path: Path
) -> None:
    folder = settings(tmp_path, chat_template=given)
    with pytest.raises(ModelError) as refused:
        text_files(folder, 2048)
    where = f"{folder}/tokenizer_config.json: chat_template"
    assert str(refused.value).startswith(f"{where}: {message}")
    (folder / "chat_template.jinja").write_text("goes before it")
    assert "chat_template.jinja" in text_files(folder, 2048)


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}{{ x | tojson }}{% endgeneration %}",
        "{% for m in messages %}{% break %}{% endfor %}{{ raise_exception('no') }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_what_a_chat_takes_parses(template: str, tmp_path: Path) -> None:
    named = [{"name": name, "template": template} for name in ("default", "rag")]
    for given in (template, named):
        assert "tokenizer_config.json" in text_files(settings(tmp_path, chat_template=given), 2048)


def test_damaged_special_tokens_are_refused(tmp_path: Path) -> None:
    for content, message in (("", "expected JSON, got a damaged"), ("[]", "expected an object")):
        (tmp_path / "special_tokens_map.json").write_text(content)
        with pytest.raises(ModelError, match=rf"special_tokens_map\.json: {message}"):
            text_files(tmp_path, 2048)


SAVE = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["tokenizer.model"], f"transformers, with the package sentencepiece, writes one: {SAVE})"),
        (["vocab.json", "merges.txt"], f"transformers writes one: {SAVE})"),
        (["tiktoken.model"], f"transformers, with the package tiktoken, writes one: {SAVE})"),
        (
            ["tekken.json"],
            f'transformers, with the package mistral-common, writes one: {SAVE}, save_format="hf")',
        ),
    ],
)
def test_a_tokenizer_that_does_not_travel_is_said(
    names: list[str], said: str, llama: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    for name in names:
        (folder / name).write_text("{}")
    manifest = kvgraph.compile(folder, tmp_path / "out", check=False)
    assert manifest.notes[:-1] == [
        f"tokenizer: the artifact takes token ids alone, since the checkpoint has {names[0]} and "
        f"no tokenizer.json; {said}"
    ]
    shutil.copyfile(TINY_LLAMA / "tokenizer.json", folder / "tokenizer.json")
    files = text_files(folder, 2048)
    assert tokenizer_notes(folder, files, 2048) == ()
    assert tokenizer_notes(folder, files, 2046) == (
        "tokenizer: the model's table of 2046 rows has none for 2 of its tokens, such as "
        f"{Tokenizer.from_file(str(folder / 'tokenizer.json')).id_to_token(2046)!r} (id 2046); a "
        "prompt with one is refused",
    )


def test_transformers_writes_the_tokenizer_that_travels(tmp_path: Path) -> None:
    """As the note says, of a vocabulary and its merges."""
    model = json.loads((TINY_LLAMA / "tokenizer.json").read_text())["model"]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    found = text_files(tmp_path, 2100)
    assert tokenizer_notes(tmp_path, found, 2100) == ()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("import this").ids) == "import this"
