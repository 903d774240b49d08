"""Files about text that travel from a checkpoint into an artifact."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

import kvgraph
from kvgraph.compiler.frontends import huggingface
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
