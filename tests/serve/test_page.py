"""The page at /, in headless Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.browser import COMMAND, Browser
from tests.serve.running import SECONDS, Server, serving

pytestmark = pytest.mark.skipif(COMMAND is None, reason="needs Chromium: apt install chromium")

SEND = """
document.getElementById("text").value = {text!r};
document.getElementById("send").click();
"""


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def text_of(name: str) -> str:
    return f"document.getElementById({name!r}).textContent"


def test_a_chat_answers(server: Server, browser: Browser, artifact: Path) -> None:
    browser.open(server.url)
    browser.wait(f"{text_of('model')} === {artifact.name!r}")
    for count in (1, 2):
        browser.value(SEND.format(text="What does import do?"))
        browser.wait(f"document.querySelectorAll('.assistant').length === {count}")
        browser.wait("[...document.querySelectorAll('.assistant')].at(-1).textContent")
        # Random, and as long as the context: a next message may find no room.
        browser.value("document.getElementById('stop').click()")
        browser.wait("!document.getElementById('send').disabled")
    assert browser.value("document.querySelectorAll('.user').length") == 2
    assert browser.value("document.querySelectorAll('.error').length") == 0


def test_stop_cancels_the_answer(server: Server, browser: Browser) -> None:
    browser.open(server.url)
    browser.value(SEND.format(text="Tell me all."))
    browser.wait("document.querySelector('.assistant').textContent")
    browser.value("document.getElementById('stop').click()")
    browser.wait("!document.getElementById('send').disabled")
    server.wait_until_idle()
    assert browser.value("document.querySelectorAll('.error').length") == 0


def test_a_message_that_is_refused_is_forgotten(server: Server, browser: Browser) -> None:
    browser.open(server.url)
    browser.value(SEND.format(text="word " * 3000))
    browser.wait("document.querySelectorAll('.error').length === 1")
    assert "2048 tokens" in browser.value("document.querySelector('.error').textContent")
    assert browser.value("document.querySelectorAll('.assistant').length") == 0
    browser.wait("!document.getElementById('send').disabled")
    browser.value(SEND.format(text="Hi"))
    browser.wait("document.querySelectorAll('.assistant').length === 1")
    browser.wait("!document.getElementById('send').disabled")
    assert browser.value("document.querySelectorAll('.error').length") == 1
    assert browser.value("document.documentElement.scrollHeight <= window.innerHeight")


def test_figures_move(server: Server, browser: Browser) -> None:
    """They tell of other clients' requests too."""
    browser.open(server.url)
    browser.wait(f"{text_of('held')}.startsWith('0 of ')")
    body = {"prompt": "The", "n": 8, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
        client.stream("POST", "/v1/completions", json=body),
    ):
        browser.wait(f"{text_of('running')} === '8'")
        assert browser.value("document.querySelectorAll('#rows tr').length") == 8
        assert int(browser.value(text_of("held")).split()[0]) > 0
        assert browser.value("document.getElementById('used').offsetWidth") > 0
        browser.wait(f"Number({text_of('rate')}) > 0")
    browser.wait(f"{text_of('held')}.startsWith('0 of ')")
    assert browser.value(text_of("running")) == "0"


ANSWERS = {
    "cut": ("data: {frame}\n\n", 200, "the connection ended before the answer did"),
    "long": (
        "data: {frame}\n\ndata: {last}\n\ndata: [DONE]\n\n",
        200,
        "the answer was cut: no more",
    ),
    "proxy": ("<html>Bad Gateway</html>", 502, "the server answered 502 Bad Gateway"),
}
FRAME = '{"choices": [{"delta": {"content": "abc"}}]}'
LAST = '{"choices": [{"delta": {}, "finish_reason": "length"}]}'


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_not_whole(name: str, server: Server, browser: Browser) -> None:
    body, status, said = ANSWERS[name]
    body = body.replace("{frame}", FRAME).replace("{last}", LAST)
    browser.open(server.url)
    browser.value(
        f"window.fetch = async () => new Response({json.dumps(body)}, "
        f"{{status: {status}, statusText: 'Bad Gateway'}})"
    )
    browser.value(SEND.format(text="Hi"))
    box = "document.querySelector('.error, .note')"
    browser.wait(f"{box} !== null")
    assert said in browser.value(f"{box}.textContent")
    assert browser.value("talk.length") == (0 if name == "proxy" else 2)


def test_keys_of_a_keyboard(server: Server, browser: Browser) -> None:
    """Enter of an input method ends a word, and the text keeps the focus and its spaces."""
    browser.open(server.url)
    browser.value("document.getElementById('text').value = '  x = 1'")
    enter = "new KeyboardEvent('keydown', {key: 'Enter', cancelable: true, isComposing: COMPOSES})"
    press = f"document.getElementById('text').dispatchEvent({enter})"
    browser.value(press.replace("COMPOSES", "true"))
    assert browser.value("document.querySelectorAll('.user').length") == 0
    browser.value(press.replace("COMPOSES", "false"))
    assert browser.value("document.querySelector('.user').textContent") == "  x = 1"
    assert browser.value("document.activeElement.id") == "text"


def test_figures_of_a_server_that_is_gone(server: Server, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait(f"{text_of('running')} === '0'")
    browser.value("window.fetch = async () => { throw new Error('gone') }")
    browser.wait(f"{text_of('model')} === 'gone'")
    assert browser.value(text_of("running")) == browser.value(text_of("rate")) == "-"


OF_REPLICAS = """
const fetched = window.fetch;
window.fetch = async (path, ...more) => {
  const answer = await fetched(path, ...more);
  if (path !== "state") return answer;
  const state = { ...await answer.json(), num_shared_pages: null, rows: null };
  return new Response(JSON.stringify(state));
};
"""


def test_figures_that_replicas_lack_are_hidden(
    server: Server, browser: Browser, artifact: Path
) -> None:
    browser.open(server.url)
    browser.wait(f"{text_of('running')} === '0'")
    for name in ("ofrows", "sharedrow"):
        assert not browser.value(f"document.getElementById('{name}').hidden")
    browser.value(OF_REPLICAS)
    browser.wait("document.getElementById('ofrows').hidden")
    assert browser.value("document.getElementById('sharedrow').hidden")
    assert browser.value(text_of("held")).startswith("0 of ")
    assert browser.value(text_of("model")) == artifact.name, "the page shows no error"


def test_it_fits_a_narrow_window(server: Server, browser: Browser) -> None:
    browser.resize(360, 640)
    browser.open(server.url)
    assert browser.value("document.documentElement.scrollWidth") <= 360


def test_it_asks_for_the_key(artifact: Path, tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "keys").write_text("mine")
    arguments = ("--threads", 1, "--api-key-file", tmp_path / "keys")
    with serving(tmp_path / "log", artifact, *arguments) as server:
        browser.open(server.url)
        for key in ("ключ", "another", "mine"):
            browser.wait("!document.getElementById('unlock').hidden")
            browser.value(f"document.getElementById('key').value = {key!r}")
            browser.value("document.querySelector('#unlock button').click()")
        browser.wait(f"{text_of('model')} === {artifact.name!r}")
        browser.wait(f"{text_of('running')} === '0'")
        assert browser.value("document.getElementById('unlock').hidden")
