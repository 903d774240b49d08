"""Which functions may be called: `allowed_tools`, and names that are given twice."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraph.serve.chats import tools_of
from kvgraph.serve.protocol import ChatRequest
from tests.serve.running import Server, answered, refusal
from tests.serve.test_chats import rendered
from tests.serve.test_tools import CLOCK, MESSAGES, ONE_OF_TWO, PATH, WEATHER, require_call

pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

TOOLS = [WEATHER, ONE_OF_TWO]
EXPECTED = "tool_choice: expected allowed_tools with a mode of auto or required, and one or more "


def function(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_one_of_the_allowed_functions_is_forced(server: Server) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 60, "temperature": 100}
    body |= {"tool_choice": allowed("required", function("pick"))}
    for seed in range(6):
        (answer,) = answered(server.post(PATH, body | {"seed": seed}))["choices"]
        (call,) = answer["message"]["tool_calls"]
        require_call(call)
        assert call["function"]["name"] == "pick"
        assert answer["finish_reason"] == "tool_calls"


def test_a_free_answer_calls_allowed_functions_alone() -> None:
    choice = allowed("auto", function("clock"))
    given = ChatRequest(messages=MESSAGES, tools=[CLOCK, WEATHER], tool_choice=choice)
    tools = tools_of(given)
    assert not tools.forces_call
    assert tools.call_in('{"name":"clock","arguments":{}}')
    assert tools.call_in('{"name":"weather","arguments":{}}') is None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_is_shown_all_functions(mode: str) -> None:
    """As OpenAI has it: the prompt stays the same, and its pages are found again."""
    choice = allowed(mode, function("clock"))
    given = ChatRequest(messages=MESSAGES, tools=[CLOCK, WEATHER], tool_choice=choice)
    assert rendered(given)["tools"] == [CLOCK, WEATHER]


def test_a_model_that_may_call_none_is_shown_none() -> None:
    given = ChatRequest(messages=MESSAGES, tools=[CLOCK], tool_choice="none")
    assert rendered(given)["tools"] is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"tool_choice": allowed("required", function("pick"), function("other"))},
            "tool_choice: expected allowed functions of the tools, got {'type': 'function', 'func",
        ),
        (
            {"tool_choice": allowed("auto", {"type": "function", "name": "pick"})},
            "tool_choice: expected allowed functions of the tools, got {'type': 'function', 'name",
        ),
        (
            {"tool_choice": allowed("auto", function("pick")), "tools": []},
            "tool_choice: expected allowed functions of the tools, got {'type': 'function', 'func",
        ),
        ({"tool_choice": allowed("auto", 5)}, "tool_choice: expected allowed functions"),
        ({"tool_choice": allowed("auto", function([]))}, "tool_choice: expected allowed functions"),
        ({"tool_choice": allowed("required")}, EXPECTED),
        ({"tool_choice": allowed("none", function("pick"))}, EXPECTED),
        ({"tool_choice": allowed([], function("pick"))}, EXPECTED),
        ({"tool_choice": {"type": "allowed_tools"}}, f"{EXPECTED}tools, got {{'type': "),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [function("pick")]}},
            f"{EXPECTED}tools, got {{'type': 'allowed_tools', 'mode': 'auto', 'tools'",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            EXPECTED,
        ),
        (
            {"tools": [WEATHER, ONE_OF_TWO, WEATHER]},
            "tools: expected functions of different names, got 'weather' twice",
        ),
    ],
)
def test_what_is_refused(server: Server, fields: dict[str, Any], sentence: str) -> None:
    answer = server.post(PATH, {"messages": MESSAGES, "max_tokens": 4, "tools": TOOLS, **fields})
    assert refusal(answer, 400).startswith(sentence)
    assert answer.json()["error"]["param"] == sentence.partition(":")[0]
