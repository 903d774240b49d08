"""Files about text that travel from a checkpoint into an artifact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import kvgraph
from kvgraph import ModelError
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.text_files import text_files
from kvgraph.runtime.chat import ChatTemplates
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


def settings(folder: Path, **fields: object) -> Path:
    """A folder with the tokenizer of tiny-llama, and such a tokenizer_config.json."""
    shutil.copyfile(TINY_LLAMA / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def test_tokens_that_only_the_settings_have_are_added(tmp_path: Path) -> None:
    """As transformers adds them: those with ids first, then the additional ones."""
    more = {"2049": {"content": "<b>", "special": False}, "2048": {"content": "<a>"}}
    more["2048"] |= {"special": True, "lstrip": True}  # type: ignore[dict-item]
    folder = settings(
        tmp_path, added_tokens_decoder=more, additional_special_tokens=["<c>", "<a>", "<s>"]
    )
    found = text_files(folder)["tokenizer.json"]
    assert isinstance(found, bytes)
    tokenizer = Tokenizer.from_str(found.decode())
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("in <a>put<b> of <c>", "<s>import </s>"):
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"]
    assert [tokenizer.token_to_id(f"<{letter}>") for letter in "abc"] == [2048, 2049, 2050]


def test_a_tokenizer_that_lacks_nothing_travels_as_it_is(tmp_path: Path) -> None:
    folder = settings(tmp_path, additional_special_tokens=["<s>"])
    assert text_files(folder)["tokenizer.json"] == folder / "tokenizer.json"


@pytest.mark.parametrize(
    "fields", [{"added_tokens_decoder": {"a": {}}}, {"added_tokens_decoder": 1}]
)
def test_damaged_settings_are_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(
        ModelError, match=r"tokenizer_config.json: expected settings of a tokenizer"
    ):
        text_files(settings(tmp_path, **fields))
