"""Arguments of tool calls: objects, or JSON text for templates that join them to other text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvgraph.runtime.chat_templates import ChatTemplates
from tests.runtime.chat_templates import CALLING, RESULT, USER, Message

ARGUMENTS = CALLING["tool_calls"][0]["function"]["arguments"]
AS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
ALL = (
    "{% for m in messages %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
)
JOINED = ALL.replace("CALL", "{{ '<' + c['function']['arguments'] + '>' }}")
PRINTED = ALL.replace("CALL", "<{{ c.function.arguments }}>")
DUMPED = ALL.replace("CALL", "<{{ c.function.arguments | tojson }}>")
LISTED = ALL.replace("CALL", "<{% for k, v in c.function.arguments.items() %}{{ k }};{% endfor %}>")
EITHER = ALL.replace(
    "CALL",
    "<{{ 'text' if c.function.arguments is string else c.function.arguments | tojson }}>",
)
NO_CONTENT = JOINED.replace("m.content or ''", "m.content + ''")
PARTS_ALONE = JOINED.replace("m.content or ''", "(m.content or [{}])[0]['text']")


def calling(arguments: object, content: Any = None) -> list[Message]:
    function = {"name": "find", "arguments": arguments}
    calls = [{"id": "a", "type": "function", "function": function}]
    return [USER, {"role": "assistant", "content": content, "tool_calls": calls}, RESULT]


def rendered(folder: Path, source: str, chat: list[Message]) -> str:
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplates(folder).render(chat)


@pytest.mark.parametrize("source", [JOINED, PRINTED, NO_CONTENT, PARTS_ALONE])
@pytest.mark.parametrize("content", [None, "well"])
def test_a_template_that_joins_arguments_gets_the_text(
    source: str, content: str | None, tmp_path: Path
) -> None:
    own = '{"text":"<é>",  "most": [1]}'
    for given, expected in ((own, own), (ARGUMENTS, AS_JSON), ("", "{}"), ('{"te', '{"te')):
        assert f"<{expected}>" in rendered(tmp_path, source, calling(given, content))


@pytest.mark.parametrize(
    ("source", "expected"), [(DUMPED, AS_JSON), (EITHER, AS_JSON), (LISTED, "text;most;")]
)
def test_other_templates_get_the_object(source: str, expected: str, tmp_path: Path) -> None:
    for given in (AS_JSON, ARGUMENTS):
        assert f"<{expected}>" in rendered(tmp_path, source, calling(given))
    assert given is ARGUMENTS


def test_a_template_is_asked_once_for_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text(JOINED)
    ours, counts = ChatTemplates(tmp_path), list[int]()
    render = ours._jinja.render
    monkeypatch.setattr(ours._jinja, "render", lambda *given: counts.append(1) or render(*given))
    first, second = (ours.render(calling(f'{{"a": {number}}}')) for number in (1, 2))
    asked = len(counts)
    ours.render(calling("{}"))
    assert len(counts) == asked + 1
    assert first == second.replace("2", "1")
