"""Messages whose content is a list of parts, for templates that take it of some roles alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.chat_templates import ASSISTANT, Message
from tests.runtime.test_chat_templates import saved, tokenizer


@pytest.mark.parametrize("tool", ["{{ '[' + m.content + ']' }}", "[{{ m.content }}]"])
def test_parts_of_a_role_stay_parts_whatever_another_takes(tool: str, tmp_path: Path) -> None:
    """Else the text of an earlier turn changes once a tool has answered."""
    source = (
        f"{{% for m in messages %}}{{% if m.role == 'tool' %}}{tool}"
        "{% elif m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    user: Message = {"role": "user", "content": parts}
    result: Message = {"role": "tool", "content": "found"}
    ours, theirs = saved(source, tmp_path), tokenizer(source)
    for chat in ([user], [user, ASSISTANT, result], [user, ASSISTANT, result, user]):
        assert ours.render(chat) == theirs.apply_chat_template(chat, tokenize=False)
    assert ours.render([user, result | {"content": parts}]) == "onetwo[one\ntwo]"
