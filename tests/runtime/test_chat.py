"""Chats of an engine: the template of the artifact makes the prompt."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import kvgraph
from kvgraph import Engine, SamplingParams
from kvgraph.errors import ArtifactError, KVGraphError, RequestError
from kvgraph.runtime.artifact import Artifact, verify
from kvgraph.runtime.chat import Prompts, prompts_of
from tests.runtime.scripted import assert_empty, greedy, scripted
from tests.support.artifacts import TINY_LLAMA, Compiled, rehash

BOS, EOS = 0, 1
CHAT = [
    {"role": "system", "content": "Answer from the language reference."},
    {"role": "user", "content": "What is a class?"},
    {"role": "assistant", "content": " A class definition."},
    {"role": "user", "content": "And a function?"},
]
TEXT = (
    "<s>Answer from the language reference.\n\nQuestion: What is a class?\n\n"
    "Answer: A class definition.</s>\n\nQuestion: And a function?\n\nAnswer:"
)


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture(scope="module")
def engine(artifact: Artifact) -> Engine:
    return Engine(artifact, num_pages=200)


def test_token_ids_are_those_of_transformers(engine: Engine) -> None:
    theirs = AutoTokenizer.from_pretrained(TINY_LLAMA)
    assert theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == TEXT
    for prompt in (True, False):
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt)["input_ids"]
        assert engine.apply_chat_template(CHAT, add_generation_prompt=prompt) == expected


def test_the_template_alone_writes_the_first_token(engine: Engine) -> None:
    """A prompt of text gets it from the tokenizer."""
    assert engine.tokenize(TEXT)[:2] == [BOS, BOS]
    tokens = engine.apply_chat_template(CHAT)
    assert (tokens[0], tokens.count(BOS)) == (BOS, 1)


def test_a_developer_says_what_a_system_does(engine: Engine) -> None:
    chat = [CHAT[0] | {"role": "developer"}, *CHAT[1:]]
    assert engine.apply_chat_template(chat) == engine.apply_chat_template(CHAT)
    assert engine.chat(chat, greedy(4)).token_ids == engine.chat(CHAT, greedy(4)).token_ids


def test_a_call_and_its_result_are_rendered(engine: Engine) -> None:
    """The call without content, as a server answers it, and as a guided text is."""
    function = {"name": "find", "arguments": '{"of": "a class"}'}
    calls = [{"id": "a", "type": "function", "function": function}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "a", "content": "A definition."}
    tool = {"type": "function", "function": {"name": "find"}}
    shown = '<s>Functions:\n{"type": "function", "function": {"name": "find"}}\n\n'
    asked = "Question: What is a class?\n\nAnswer:"
    call = '{"name":"find","arguments":{"of":"a class"}}</s>\n\n'
    render = engine._templates.render
    assert render([CHAT[1]], tools=[tool]) == shown + asked
    text = render([CHAT[1], called, result], tools=[tool])
    assert text == f"{shown}{asked}{call}Result: A definition.\n\nAnswer:"
    assert render([CHAT[1], called]) == f"<s>{asked}{call}Answer:"


def test_chat_is_generate_behind_the_template(engine: Engine) -> None:
    prompt = engine.apply_chat_template(CHAT)
    done = engine.chat(CHAT, greedy(20))
    assert len(done.token_ids) == 20
    assert done.token_ids == engine.generate([prompt], greedy(20))[0].token_ids
    assert "".join(engine.stream(prompt, greedy(20))) == done.text
    assert_empty(engine)


def test_a_longer_chat_begins_with_the_shorter_and_its_answer(engine: Engine) -> None:
    """So the pages of one turn serve the next."""
    render = engine._templates.render
    longer = [*CHAT, {"role": "assistant", "content": " A name. "}, CHAT[1]]
    assert render(longer).startswith(f"{TEXT} A name. </s>")


def test_an_answer_ends_at_the_end_of_a_turn(artifact: Artifact, engine: Engine) -> None:
    prompt = engine.apply_chat_template(CHAT)
    answer = engine.tokenize(" A function", special_tokens=False)
    done = scripted(artifact, [*prompt, *answer, EOS, 5, 5]).chat(CHAT)
    assert (done.text, done.finish_reason) == (" A function", "stop")


def test_a_chat_beyond_the_context_is_refused(engine: Engine) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(RequestError, match="expected a prompt of at most 2047 tokens"):
        engine.chat(long, SamplingParams())
    with pytest.raises(RequestError, match="messages: the chat template refused them: "):
        engine.chat([{"role": "robot", "content": "x"}])
    assert_empty(engine)


def test_an_artifact_without_a_template(compiled: Compiled) -> None:
    engine = Engine(compiled("llama"), num_pages=16)
    with pytest.raises(
        ArtifactError, match=r"expected a chat template in chat_template\.jinja or "
    ):
        engine.chat(CHAT)
    with pytest.raises(ArtifactError, match="for a text prompt, got none; pass token"):
        engine.chat(CHAT, chat_template="{{ messages[0].content }}")


def test_text_alone_needs_no_jinja(compiled: Compiled) -> None:
    """It costs a start nothing."""
    code = (
        "import sys, kvgraph; e = kvgraph.Engine(sys.argv[1], num_pages=16); e.generate(['a']); "
        "assert 'jinja2' not in sys.modules; e.chat([{'role': 'user', 'content': 'a'}]); "
        "assert 'jinja2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(compiled("tiny-llama"))], check=True)


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        (None, {}),
        ({"repetition_penalty": 1.05, "temperature": 0.7}, {"repetition_penalty": 1.05}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": 20.0}, {"temperature": 1.0, "top_k": 20}),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 1.0, "min_p": None},
            {"temperature": 0.7, "top_k": 20},
        ),
    ],
)
def test_how_a_model_is_sampled(
    fields: dict[str, object] | None, given: dict[str, float], tmp_path: Path
) -> None:
    if fields is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert Prompts(tmp_path).default_sampling_params() == SamplingParams(**given)


def test_files_that_the_manifest_does_not_list(compiled: Compiled, tmp_path: Path) -> None:
    """They are not part of the artifact: no compile wrote them, and no check hashed them."""
    folder = Path(shutil.copytree(compiled("llama"), tmp_path / "artifact"))
    rehash(folder, without="generation_config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY_LLAMA / name, folder / name)
    (folder / "special_tokens_map.json").write_text("damaged")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "more.jinja").write_text("of another artifact")
    verify(folder)
    with kvgraph.Engine(folder, num_pages=8) as engine:
        assert engine.tokenizer is None
        assert engine.default_sampling_params() == SamplingParams()
        got = "got one that its manifest does not list; pass token ids"
        with pytest.raises(
            ArtifactError, match=f"expected tokenizer.json for a text prompt, {got}"
        ):
            engine.generate(["The"])
        for template in (None, "more"):
            with pytest.raises(KVGraphError, match=r"expected a .*template.*none"):
                engine.render_chat(CHAT, chat_template=template)
        assert len(engine.generate([[5]])[0].token_ids)
    found = prompts_of(folder)
    assert found.missing_chat_file == "tokenizer.json"
    assert found.suggested_fields() == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"do_sample": true, "top_p": 2}', "top_p: expected in (0, 1], got 2.0"),
        ('{"repetition_penalty": "x"}', "repetition_penalty: expected a number, got str 'x'"),
        ("{", "expected JSON, got a damaged file"),
        ("[]", "expected fields, got list"),
    ],
)
def test_what_no_request_can_have(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ArtifactError, match=f"^{re.escape(f'{path}: {said}')}"):
        Prompts(tmp_path).default_sampling_params()
