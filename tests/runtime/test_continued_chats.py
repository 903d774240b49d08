"""A chat that ends with the text of its last message, which the answer goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgraph import RequestError
from tests.runtime.chat_templates import PARTS, PARTS_ALONE, TEMPLATES, TURNS
from tests.runtime.test_chat_templates import ASSISTANT, CALLING, USER, saved, tokenizer

FORMS: dict[str, Any] = {
    "text": "It binds a",
    "spaces": "  It binds a \n",
    "empty": "",
    "parts": [{"type": "text", "text": "It"}, {"type": "text", "text": "binds a "}],
}


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("form", ["text", "spaces"])
def test_it_ends_as_in_transformers(style: str, form: str, tmp_path: Path) -> None:
    theirs, ours = tokenizer(TEMPLATES[style]), saved(TEMPLATES[style], tmp_path)
    chat = [USER, {"role": "assistant", "content": FORMS[form]}]
    given: dict[str, Any] = {"continue_final_message": True}
    expected = theirs.apply_chat_template(chat, tokenize=False, **given)
    assert ours.render(chat, **given) == expected


@pytest.mark.parametrize("form", FORMS)
def test_the_end_of_the_last_message(form: str, tmp_path: Path) -> None:
    """A template that trims, and one that takes a list of parts alone."""
    chat = [USER, {"role": "assistant", "content": FORMS[form]}]
    turns = saved(TURNS, tmp_path / "turns").render(chat, continue_final_message=True)
    end = {"text": "It binds a", "spaces": "It binds a", "empty": "", "parts": "It\nbinds a"}
    assert turns.endswith(f"<turn>model\n{end[form]}".rstrip())
    assert not turns.endswith("</turn>\n")
    alone = saved(PARTS_ALONE, tmp_path / "alone").render(chat, continue_final_message=True)
    assert alone.rstrip().endswith(("binds a", "ASSISTANT:"))


def test_messages_are_left_as_they_are(tmp_path: Path) -> None:
    chat: list[Any] = [USER, {"role": "assistant", "content": [{"type": "text", "text": "It"}]}]
    before = repr(chat)
    saved(PARTS, tmp_path).render(chat, continue_final_message=True)
    assert repr(chat) == before


@pytest.mark.parametrize(
    ("template", "last", "options", "sentence"),
    [
        (
            TURNS,
            ASSISTANT,
            {"add_generation_prompt": True},
            "expected no add_generation_prompt next to it, got both",
        ),
        (TURNS, CALLING, {}, "expected a last message with text, got NoneType None"),
        ("{{ messages[0].content }}", ASSISTANT, {}, "a template that shows all of the last"),
        (
            "{{ messages[-1].content.split('binds')[-1] }}",
            ASSISTANT,
            {},
            "a template that shows all of the last",
        ),
        (TURNS, ASSISTANT, {"continue_final_message": 1}, "expected True or False, got int 1"),
    ],
)
def test_what_cannot_be_continued(
    template: str, last: Any, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=f"^continue_final_message: .*{sentence}"):
        saved(template, tmp_path).render([USER, last], **{"continue_final_message": True} | options)
