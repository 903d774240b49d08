"""The page at /, in headless Chromium."""

from __future__ import annotations

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


def test_it_asks_for_the_key(artifact: Path, tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "keys").write_text("mine")
    arguments = ("--threads", 1, "--api-key-file", tmp_path / "keys")
    with serving(tmp_path / "log", artifact, *arguments) as server:
        browser.open(server.url)
        for key in ("another", "mine"):
            browser.wait("!document.getElementById('unlock').hidden")
            browser.value(f"document.getElementById('key').value = {key!r}")
            browser.value("document.querySelector('#unlock button').click()")
        browser.wait(f"{text_of('model')} === {artifact.name!r}")
        browser.wait(f"{text_of('running')} === '0'")
        assert browser.value("document.getElementById('unlock').hidden")
