"""`Engine.chat` with tools: a choice guides the answer to be a call."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph import Engine, SamplingParams
from kvgraph.errors import RequestError
from tests.runtime.chat_templates import CALLING, RESULT, TOOLS, USER
from tests.runtime.scripted import assert_empty, greedy, scripted
from tests.runtime.test_chat_templates import saved
from tests.support.artifacts import Compiled

pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

CHAT = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY = {"enum": ["Rome", "Oslo"]}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": CITY, "day": {"type": "integer", "minimum": 1, "maximum": 31}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": PARAMETERS},
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
LOOSE = SamplingParams(temperature=100, max_new_tokens=80)
EOS = 1


@pytest.fixture(scope="module")
def engine(compiled: Compiled) -> Engine:
    return Engine(kvgraph.load(compiled("tiny-llama")), num_pages=200)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_answer_is_a_call_that_fits_its_schema(engine: Engine, choice: Any) -> None:
    names = set()
    for seed in range(12):
        params = replace(LOOSE, seed=seed)
        done = engine.chat(CHAT, params, tools=[WEATHER, CLOCK], tool_choice=choice)
        (call,) = done.tool_calls
        assert (call["type"], len(call["id"]), done.finish_reason) == ("function", 9, "stop")
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert json.loads(done.text) == {"name": name, "arguments": arguments}
        if name == "weather":
            assert arguments["city"] in CITY["enum"]
            assert 1 <= arguments["day"] <= 31
        else:
            assert arguments == {}
        names.add(name)
    assert names == ({"weather", "clock"} if choice == "required" else {"weather"})
    assert_empty(engine)


def test_a_call_and_its_result_continue_the_chat(engine: Engine) -> None:
    done = engine.chat(CHAT, greedy(80), tools=[WEATHER], tool_choice="required")
    called = {"role": "assistant", "content": None, "tool_calls": list(done.tool_calls)}
    result = {"role": "tool", "tool_call_id": done.tool_calls[0]["id"], "content": "Rain."}
    text = engine.render_chat([*CHAT, called, result], tools=[WEATHER])
    assert done.text in text
    assert engine.chat([*CHAT, called, result], greedy(4), tools=[WEATHER]).text


@pytest.mark.parametrize("choice", [None, "auto"])
def test_a_free_answer_may_be_a_call(engine: Engine, choice: str | None) -> None:
    prompt = engine.apply_chat_template(CHAT, tools=[WEATHER, CLOCK])
    for text, name in (
        ('{"name": "clock", "arguments": {}}', "clock"),
        ('{"name": "clock", "parameters": {}}', "clock"),
        ('{"name": "other", "arguments": {}}', None),
        ("It is noon.", None),
    ):
        answer = engine.tokenize(text, special_tokens=False)
        own = scripted(engine.artifact, [*prompt, *answer, EOS, 5, 5])
        done = own.chat(CHAT, tools=[WEATHER, CLOCK], tool_choice=choice)
        assert done.text == text
        assert [call["function"]["name"] for call in done.tool_calls] == ([name] if name else [])


@pytest.mark.parametrize("value", [r'"\ud83d"', r'{"\udc00": 1}', "1e999", "NaN", "[-Infinity]"])
def test_arguments_that_are_no_values_of_json_stay_text(value: str, tmp_path: Path) -> None:
    function = {"name": "find", "arguments": f'{{"text": {value}}}'}
    calling = CALLING | {"tool_calls": [{"id": "a", "type": "function", "function": function}]}
    text = saved(TOOLS, tmp_path).render([USER, calling, RESULT])
    assert json.dumps(function["arguments"]) in text


def test_text_of_messages_that_is_not_unicode(engine: Engine) -> None:
    with pytest.raises(RequestError, match="messages: expected text in Unicode, got 'utf-8' codec"):
        engine.apply_chat_template([{"role": "user", "content": "\ud83d"}])
    with pytest.raises(RequestError, match=r"messages\[0\]: expected values of JSON, got another"):
        engine.apply_chat_template([{"role": "user", "content": "a", "weight": float("inf")}])


def test_none_shows_the_model_no_tools(engine: Engine) -> None:
    hidden = engine.chat(CHAT, greedy(8), tools=[WEATHER], tool_choice="none")
    assert hidden.token_ids == engine.chat(CHAT, greedy(8)).token_ids
    assert hidden.prompt_tokens == len(engine.apply_chat_template(CHAT))
    shown = engine.chat(CHAT, greedy(8), tools=[WEATHER])
    assert shown.prompt_tokens == len(engine.apply_chat_template(CHAT, tools=[WEATHER]))


def test_a_cut_call_has_the_arguments_so_far(engine: Engine) -> None:
    whole = engine.chat(CHAT, greedy(80), tools=[WEATHER], tool_choice=NAMED)
    most = len(whole.token_ids) - 3
    done = engine.chat(CHAT, greedy(most), tools=[WEATHER], tool_choice=NAMED)
    assert done.finish_reason == "length"
    arguments = whole.tool_calls[0]["function"]["arguments"]
    assert arguments.startswith(done.tool_calls[0]["function"]["arguments"])
    assert engine.chat(CHAT, greedy(1), tools=[WEATHER], tool_choice=NAMED).tool_calls == ()


def test_a_function_without_its_type_is_taken(engine: Engine) -> None:
    """As templates take it."""
    bare = WEATHER["function"]
    done = engine.chat(CHAT, greedy(80), tools=[bare], tool_choice="required")
    assert done.tool_calls[0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    "tools", [[{"type": "web_search"}], [WEATHER, WEATHER], [{"name": "f", "parameters": 5}]]
)
def test_without_a_choice_tools_are_only_shown(engine: Engine, tools: Any) -> None:
    done = engine.chat(CHAT, greedy(4), tools=iter(tools))
    assert done.prompt_tokens == len(engine.apply_chat_template(CHAT, tools=tools))
    assert done.tool_calls == ()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tool_choice": "required"}, "tool_choice: expected tools next to 'required', got none"),
        (
            {"tools": [WEATHER], "tool_choice": "clock"},
            'tool_choice: expected "none", "auto", "required", or a function of the tools, got '
            "'clock'",
        ),
        (
            {"tools": [WEATHER], "tool_choice": CLOCK},
            'tool_choice: expected "none", "auto", "required", or a function of the tools, got {',
        ),
        ({"tools": [WEATHER], "tool_choice": 5}, 'tool_choice: expected "none", "auto", "requir'),
        (
            {"tools": [WEATHER], "tool_choice": {"type": {1}}},
            "tool_choice: expected values of JSON, got another",
        ),
        (
            {"tools": [WEATHER, WEATHER], "tool_choice": "auto"},
            "tools: expected functions of different names, got 'weather' twice",
        ),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "auto"},
            "tools: expected functions with a name, got {'type': 'web_search'}",
        ),
        (
            {
                "tools": [{"name": f"f{at}", "parameters": PARAMETERS} for at in range(600)],
                "tool_choice": "required",
            },
            "tools: expected ",
        ),
        (
            {
                "tools": [
                    {"name": "f", "parameters": {"properties": {"a": {"multipleOf": 99999}}}}
                ],
                "tool_choice": "required",
            },
            "tools[0] 'f': expected",
        ),
        ({"tools": 5}, "tools: expected "),
        (
            {
                "tools": [
                    {"name": "f", "strict": True, "parameters": {"not": {"type": "object"}}},
                ],
                "tool_choice": "required",
            },
            "tools[0] 'f': expected what llguidance takes, got one that it refuses (",
        ),
        (
            {
                "sampling": SamplingParams(guided_regex="a"),
                "tools": [WEATHER],
                "tool_choice": "required",
            },
            "guided_regex: expected none next to a tool_choice that forces a call, got one",
        ),
    ],
)
def test_what_is_refused(engine: Engine, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.chat(CHAT, **fields)
    assert str(caught.value).startswith(sentence)
    assert_empty(engine)
