"""Chat templates: texts and token ids are those of transformers' own `apply_chat_template`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AddedToken, PreTrainedTokenizerFast

from kvgraph.errors import ArtifactError, RequestError
from kvgraph.runtime.chat_templates import KEPT_FORMS, ChatTemplates
from kvgraph.runtime.text import TextCodec
from tests.runtime.chat_templates import (
    ASSISTANT,
    CALLING,
    CHATS,
    PARTS,
    PARTS_ALONE,
    RESULT,
    SYSTEM,
    TEMPLATES,
    TOOL,
    TOOLS,
    TURNS,
    USER,
    Message,
)
from tests.support.artifacts import TINY_LLAMA

DOCUMENTS = [{"title": "import", "text": "binds"}]
REFUSED = {("turns", "system"), ("turns", "calls")}
"""By a template's own exception."""

JOINING = {("headers", "calls"), ("instructions", "calls")}
"""These add text and a content; transformers fails where there is none."""


def tokenizer(chat_template: Any = None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(TINY_LLAMA / "tokenizer.json"),
        bos_token="<s>",
        eos_token=AddedToken("</s>", special=True),
        chat_template=chat_template,
    )


def saved(chat_template: Any, folder: Path, **options: Any) -> ChatTemplates:
    tokenizer(chat_template).save_pretrained(folder, **options)
    return ChatTemplates(folder)


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_chat_is_rendered_as_transformers_renders_it(
    style: str, chat: str, prompt: bool, tmp_path: Path
) -> None:
    theirs, ours = tokenizer(TEMPLATES[style]), saved(TEMPLATES[style], tmp_path)
    more = {"documents": DOCUMENTS, "enable_thinking": False, "date_string": "1 May 2026"}
    for messages, tools, options in (
        (CHATS[chat], None, {}),
        (CHATS[chat], [TOOL], more),
        (CHATS[chat], [], {"bos_token": "<other>"}),
    ):
        given: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
        if (style, chat) in REFUSED:
            with pytest.raises(RequestError, match="messages: the chat template refused them"):
                ours.render(messages, **given, chat_template_kwargs=options)
            with pytest.raises((TemplateError, TypeError)):
                theirs.apply_chat_template(messages, tokenize=False, **given, **options)
            continue
        text = ours.render(messages, **given, chat_template_kwargs=options)
        if (style, chat) in JOINING:
            with pytest.raises((TemplateError, TypeError)):
                theirs.apply_chat_template(messages, tokenize=False, **given, **options)
            messages = [each | {"content": each["content"] or ""} for each in messages]
        assert text == theirs.apply_chat_template(messages, tokenize=False, **given, **options)
        tokens = TextCodec(tmp_path).tokenize(text, special_tokens=False)
        expected = theirs.apply_chat_template(messages, **given, **options)["input_ids"]
        assert tokens == expected


def test_a_chat_of_every_template_differs_with_its_generation_prompt(tmp_path: Path) -> None:
    ours = saved(TURNS, tmp_path)
    text = ours.render([USER])
    assert text == f"<s><turn>user\n{USER['content'].strip()}</turn>\n<turn>model\n"
    assert ours.render([USER], add_generation_prompt=False) == text.removesuffix("<turn>model\n")


@pytest.mark.parametrize("in_files", [True, False])
def test_templates_with_names(in_files: bool, tmp_path: Path) -> None:
    named = {"default": "a {{ messages[0].content }}", "tool_use": "b {{ (tools or [3])[0] }}"}
    theirs, ours = tokenizer(named), saved(named, tmp_path, save_jinja_files=in_files)
    assert (tmp_path / "additional_chat_templates/tool_use.jinja").is_file() == in_files
    for options in ({}, {"tools": [TOOL]}, {"chat_template": "tool_use"}, {"chat_template": "{}"}):
        text = ours.render([USER], **options)
        assert text == theirs.apply_chat_template([USER], tokenize=False, **options)
    with pytest.raises(RequestError, match=r"got 'rag' str|\(default, tool_use\), got str 'rag'"):
        ours.render([USER], chat_template="rag")


def test_tokens_of_an_older_folder(tmp_path: Path) -> None:
    """Named in a file of their own, as records, and only known by their names."""
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ sep_token }}", "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = {"bos_token": {"content": "<a>", "lstrip": False}, "eos_token": "<b>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert ChatTemplates(tmp_path).render([USER]) == "<a>|<b>|"


def test_tokens_of_other_names(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ image_token }}|{{ audio_token }}|{{ add_bos_token }}",
        "audio_token": "<a>",
        "add_bos_token": True,
        "extra_special_tokens": {"image_token": "<i>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplates(tmp_path).render([USER]) == "<i>|<a>|"


# -- messages


def test_parts_of_text(tmp_path: Path) -> None:
    """A template that renders parts gets them; for others they are lines of one text."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message: Message = {"role": "user", "content": parts}
    theirs = tokenizer(PARTS).apply_chat_template([message], tokenize=False)
    assert saved(PARTS, tmp_path / "parts").render([message]) == theirs == "user: one two\n"
    text = saved(TURNS, tmp_path / "text").render([message], add_generation_prompt=False)
    assert text == "<s><turn>user\none\ntwo</turn>\n"
    with_system = "{{ raise_exception('no system') if messages[0].role != 'system' }}" + PARTS
    chat: list[Message] = [{"role": "system", "content": "s"}, message]
    theirs = tokenizer(with_system).apply_chat_template(chat, tokenize=False)
    assert saved(with_system, tmp_path / "system").render(chat) == theirs


def test_text_is_a_part_where_a_template_takes_lists_alone(tmp_path: Path) -> None:
    """As those of LLaVA and Idefics do, in which text disappears without a word."""
    ours, theirs = saved(PARTS_ALONE, tmp_path), tokenizer(PARTS_ALONE)
    chat: list[Message] = [SYSTEM, USER, ASSISTANT, USER]
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in chat]
    text = ours.render(chat)
    assert text == theirs.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
    assert all(each["content"] in text for each in chat)
    assert ours.render(parts) == ours.render([*parts[:2], *chat[2:]]) == text
    calls = ours.render([USER, CALLING, RESULT])
    assert calls == f"USER: {USER['content']} ASSISTANT: TOOL: {RESULT['content']} ASSISTANT:"
    asks_the_first = "{% for m in messages %}{{ m.content[0].text + '!' }}{% endfor %}"
    assert saved(asks_the_first, tmp_path / "first").render([ASSISTANT]) == "It binds a name.!"


def test_a_template_is_asked_once_for_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, counts = saved(PARTS_ALONE, tmp_path), []
    render = ours._jinja.render
    monkeypatch.setattr(ours._jinja, "render", lambda *given: counts.append(1) or render(*given))
    for length in (1, 3, 5, 1):
        ours.render(([USER, ASSISTANT] * 3)[:length])
    assert len(counts) == 4 + 2 * 2  # of users alone, and of users and assistants
    for number in range(KEPT_FORMS + 1):
        ours.render([USER], chat_template=f"{{{{ messages[0].content }}}} {number}")
    assert len(ours._forms) <= KEPT_FORMS


def test_parts_are_joined_whatever_was_asked_before(tmp_path: Path) -> None:
    source = (
        "{% if tools %}[tools]{{ messages[0].content | trim }}{% elif messages[0].content is "
        "string %}{{ messages[0].content }}{% else %}{{ messages[0].content[0].text }}{% endif %}"
    )
    ours = saved(source, tmp_path)
    user = USER | {"content": [{"type": "text", "text": "hello"}]}
    assert ours.render([user]) == "hello"
    assert ours.render([user], tools=[TOOL]) == "[tools]hello"


def test_tool_calls_alone_have_an_empty_content_where_a_template_joins_it(tmp_path: Path) -> None:
    """As the server answers them; a template that tells them by None is given it."""
    joins = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
        "+ '<|im_end|>\n' }}{% endfor %}"
    )
    (_, call, _), ours = CHATS["calls"], saved(joins, tmp_path / "joins")
    assert ours.render([USER, call]).endswith("<|im_start|>assistant\n<|im_end|>\n")
    without = {name: value for name, value in call.items() if name != "content"}
    assert ours.render([USER, without]) == ours.render([USER, call])
    for asks in ("m.content is none", "m['content'] == None", "m.get('content') is none"):
        tells = (
            f"{{% for m in messages %}}{{% if {asks} %}}{{{{ m.tool_calls[0].function.name }}}}"
            "{% else %}{{ m.content + '|' }}{% endif %}{% endfor %}"
        )
        asking = saved(tells, tmp_path / "asks")
        assert asking.render([ASSISTANT, without]) == f"{ASSISTANT['content']}|find"
    both = "{{ messages[0].content is none }}{{ messages[0].content + '|' }}"
    assert saved(both, tmp_path / "both").render([without]) == "False|"
    others = "{{ messages[0].reasoning_content is none }} {{ messages[0].content }}"
    assert saved(others, tmp_path / "others").render([call]) == "False "


def test_arguments_in_json_are_rendered_as_objects(tmp_path: Path) -> None:
    """OpenAI's are text; what was cut stays text."""
    (call,) = CALLING["tool_calls"]
    function = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
    as_text = CALLING | {"tool_calls": [call | {"function": function}]}
    ours = saved(TOOLS, tmp_path)
    assert ours.render([USER, as_text, RESULT]) == ours.render([USER, CALLING, RESULT])
    assert isinstance(function["arguments"], str)
    cut = CALLING | {"tool_calls": [{"function": function | {"arguments": '{"text": "<'}}]}
    assert r'"{\"text\": ' in ours.render([USER, cut, RESULT])


def test_a_developer_is_the_system_where_a_template_names_none(tmp_path: Path) -> None:
    """Else many templates drop the message without a word."""
    shown = "{% for message in messages if message.role != 'tool' %}{{ message.role }} {% endfor %}"
    only_system = shown.replace("!= 'tool'", "== 'system'")
    chat: list[Message] = [{"role": "developer", "content": [{"type": "text", "text": "s"}]}, USER]
    assert saved(only_system, tmp_path / "system").render(chat) == "system "
    assert saved(shown, tmp_path / "any").render(chat) == "system user "
    named = shown + "{% if 'developer' == '' %}{% endif %}"
    assert saved(named, tmp_path / "named").render(chat) == "developer user "
    prose = shown + "{{ 'for developers' }}"
    assert saved(prose, tmp_path / "prose").render(chat) == "system user for developers"
    assert chat[0]["role"] == "developer"


def test_an_empty_list_of_calls_is_none(tmp_path: Path) -> None:
    """Templates ask whether there is a list, and refuse one without a single call."""
    source = (
        "{% for message in messages %}{% if 'tool_calls' in message %}"
        "{{ raise_exception('one call at once') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    chat = [ASSISTANT | {"tool_calls": []}]
    ours = saved(source, tmp_path)
    assert ours.render(chat) == ASSISTANT["content"]
    assert chat[0]["tool_calls"] == []
    assert ours.render([{"role": "assistant", "content": None, "tool_calls": []}]) == ""


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning": "r"},
        {"reasoning_content": "c"},
        {"thinking": "t"},
        {"reasoning": "r", "reasoning_content": None, "thinking": ""},
        {"thinking": "t", "reasoning_content": "c", "reasoning": "r"},
        {"reasoning": None},
        {"reasoning": [{"text": "r"}]},
        {},
    ],
)
def test_reasoning_is_there_under_the_names_that_templates_read(
    given: dict[str, Any], tmp_path: Path
) -> None:
    names = ("reasoning_content", "thinking", "reasoning", "content")
    source = "".join([f"{{{{ messages[1].{name} }}}}|" for name in names]) + "{{ messages|tojson }}"
    chat: list[Message] = [USER, {"role": "assistant", **given, "content": "a"}]
    theirs = tokenizer(source).apply_chat_template(chat, tokenize=False)
    assert saved(source, tmp_path).render(chat) == theirs
    assert chat[1] == {"role": "assistant", **given, "content": "a"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", r"messages: expected a list, got one message; use \[message\]"),
        ({"role": "user"}, "messages: expected a list, got dict"),
        ([], "messages: expected one or more, got none"),
        (["hello"], r"messages\[0\]: expected names and values, got str 'hello'"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role: expected text, got NoneType None"),
        ([{"role": "user"}], r"messages\[0\]\.content: expected text or a list of text parts, got"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: expected text or a l.*int 3"),
        ([USER | {"at": Path()}], r"messages\[0\]: expected values of JSON, got another"),
        ([USER | {1: 2}], r"messages\[0\]: names: expected text, got int 1"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[0\]\.type: expected 'text', got str 'image_url'",
        ),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]: expected a part with type and text"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"content\[0\]\.text: expected text, got NoneType None",
        ),
        ([ASSISTANT | {"tool_calls": 1}], r"tool_calls: expected a list of tool calls, got int 1"),
        ([ASSISTANT | {"tool_calls": [1]}], r"tool_calls\[0\]: expected a call of a function, got"),
    ],
)
def test_messages_that_are_none(messages: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        saved(TURNS, tmp_path).render(messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "x"}, r"tools: expected a list, got one tool; use \[tool\]"),
        ({"tools": [print]}, r"tools\[0\]: expected names and values, got builtin"),
        ({"add_generation_prompt": 1}, "add_generation_prompt: expected True or False, got int 1"),
        ({"chat_template": 1}, "chat_template: expected text or None, got int 1"),
        ({"chat_template": "{% if %}"}, r"chat_template: expected a template in Jinja.*\(line 1: "),
        ({"chat_template": "{{ messages[0].nothing.more }}"}, "'dict object' has no attribute 'no"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: expected names and values, got lis"),
        ({"chat_template_kwargs": {"messages": 1}}, "kwargs: expected no 'messages', got one"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        saved(TURNS, tmp_path).render([USER], **options)
    assert "\n" not in str(caught.value)


# -- templates that fail


def test_a_template_may_refuse(tmp_path: Path) -> None:
    ours = saved(TURNS, tmp_path)
    for messages, why in (
        ([SYSTEM, USER], "System role not supported"),
        ([USER, USER], "Roles must alternate: user, assistant"),
    ):
        with pytest.raises(RequestError) as caught:
            ours.render(messages)
        assert str(caught.value) == (f"messages: the chat template refused them: {why}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "OverflowError: Range too big"),
        (
            "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
            "a text of more than 16777216 characters",
        ),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ],
)
def test_the_sandbox_holds(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        saved(source, tmp_path).render([USER])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, "", r": expected a chat template in chat_template\.jinja or tokenizer_config\.json,"
         " got none; pass chat_template"),
        ("tokenizer_config.json", "{", "expected JSON, got a damaged file"),
        ("tokenizer_config.json", b"\xff", r"config\.json: expected text in UTF-8, got 'utf-8' c"),
        ("tokenizer_config.json", "[]", "expected fields, got list"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template: expected text, or templ"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "expected text, or templa"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": "x"}]}',
            "expected a chat template in .*, got rag; pass chat_template",
        ),
        ("chat_template.jinja", b"\xff", r"jinja: expected text in UTF-8, got 'utf-8' codec"),
        (
            "chat_template.jinja",
            "a\n{% for x in y %}",
            r": chat template 'default': expected a template in Jinja, got one that does not parse"
            r" \(line 2: Unexpected end of template",
        ),
    ],
)  # fmt: skip
def test_an_artifact_without_a_template_of_use(
    name: str | None, content: str | bytes, message: str, tmp_path: Path
) -> None:
    if name:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ArtifactError, match=message) as caught:
        ChatTemplates(tmp_path).render([USER])
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(str(tmp_path)) == 1


def test_templates_are_those_that_lay_there_at_the_opening(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own {{ bos_token }}")
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"bos_token": "<s>"}')
    chats = ChatTemplates(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("another one")
    config.write_text("damaged")
    assert chats.render([USER]) == "own <s>"
    with pytest.raises(
        ArtifactError, match=r"tokenizer_config\.json: expected JSON, got a damaged"
    ):
        ChatTemplates(tmp_path)
