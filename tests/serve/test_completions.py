"""/v1/completions: the engine's own answers, in OpenAI's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvgraph import Engine, SamplingParams
from tests.serve.running import Server, answered, refusal, serving

PROMPT = "The import statement combines two operations; it searches for the named module, then"
GREEDY = {"temperature": 0, "max_tokens": 12}


def expected(engine: Engine, prompt: Any, **fields: Any) -> tuple[str, str]:
    done = engine.generate([prompt], SamplingParams(**fields))[0]
    return done.text, done.finish_reason


def texts(frames: list[dict[str, Any]]) -> dict[int, str]:
    """Of each choice, what its frames say together."""
    found: dict[int, str] = {}
    for frame in frames:
        for choice in frame["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def test_an_answer_is_the_engines_own(server: Server, engine: Engine) -> None:
    answer = server.complete(PROMPT, max_tokens=12, model="any name")
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == expected(engine, PROMPT, max_tokens=12)
    assert (answer["object"], answer["model"]) == ("text_completion", "any name")
    count = len(engine.tokenize(PROMPT))
    assert answer["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": 12,
        "total_tokens": count + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    again = server.complete(PROMPT, max_tokens=12)
    assert again["choices"] == answer["choices"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (count - 1) // 16 * 16 > 0


@pytest.mark.parametrize(
    ("path", "kind"),
    [("completions", "prompt"), ("chat/completions", "prompt"), ("responses", "input")],
)
def test_salts_share_no_pages(server: Server, path: str, kind: str) -> None:
    text = f"{path}, salted: {PROMPT}"
    asked: dict[str, Any] = {"prompt" if path == "completions" else "input": text}
    if path == "chat/completions":
        asked = {"messages": [{"role": "user", "content": text}]}
    for salt, is_known in (("a", False), ("b", False), (None, False), ("a", True), ("b", True)):
        usage = answered(server.post(f"/v1/{path}", {**asked, "cache_salt": salt}))["usage"]
        assert (usage[f"{kind}_tokens_details"]["cached_tokens"] > 0) == is_known


def test_an_end_token_ends_it(server: Server, engine: Engine) -> None:
    token = engine.generate([PROMPT], SamplingParams(max_tokens=4))[0].token_ids[-1]
    choice = server.complete(PROMPT, stop_token_ids=[token])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == expected(
        engine, PROMPT, stop_token_ids=(token,)
    )
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_not_in_the_text(server: Server, engine: Engine, stream: bool) -> None:
    whole, _ = expected(engine, PROMPT, max_tokens=12)
    stop = whole[8:11]
    body = {"prompt": PROMPT, **GREEDY, "stop": [stop]}
    text, reason = expected(engine, PROMPT, max_tokens=12, stop=[stop])
    assert (text, reason) == (whole[: whole.index(stop)], "stop")
    if stream:
        frames = server.events("/v1/completions", body)
        assert (texts(frames), frames[-1]["choices"][0]["finish_reason"]) == ({0: text}, reason)
    else:
        choice = answered(server.post("/v1/completions", body))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, reason)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True},
        {"prompt": [PROMPT, "The"], "n": 2, "seed": 5, "temperature": 1},
        {"prompt": [0, 341, 1097], "echo": True, "max_tokens": 0},
    ],
)
def test_a_stream_is_the_whole_answer(server: Server, fields: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, **GREEDY, **fields}
    whole = answered(server.post("/v1/completions", body))
    *frames, last = server.events(
        "/v1/completions", {**body, "stream_options": {"include_usage": True}}
    )
    assert texts(frames) == {one["index"]: one["text"] for one in whole["choices"]}
    for choice in whole["choices"]:
        mine = [one for f in frames for one in f["choices"] if one["index"] == choice["index"]]
        assert [one["finish_reason"] for one in mine][-1] == choice["finish_reason"]
        assert not any(one["finish_reason"] for one in mine[:-1])
        for name in ("tokens", "text_offset") if choice["logprobs"] else ():
            together = [value for one in mine for value in one["logprobs"][name]]
            assert together == choice["logprobs"][name]
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    assert len({frame["id"] for frame in [*frames, last]}) == 1


@pytest.mark.parametrize("asks", [True, False, None])
@pytest.mark.parametrize("told", [True, False, None])
def test_frames_tell_the_usage_so_far(server: Server, told: bool | None, asks: bool | None) -> None:
    options = {"include_usage": asks, "continuous_usage_stats": told}
    body = {"prompt": [PROMPT, "The"], "n": 2, **GREEDY, "stream_options": options}
    frames = server.events("/v1/completions", body)
    usages = [frame["usage"] for frame in frames if frame["choices"] and "usage" in frame]
    assert len(usages) == (sum(bool(frame["choices"]) for frame in frames) if told else 0)
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    if told:
        assert counts[0] > 0
        assert usages[-1]["total_tokens"] == 48 + usages[0]["prompt_tokens"]
    assert [frame["usage"] for frame in frames if not frame["choices"]] == (
        [frames[-1]["usage"]] if asks else []
    )


def test_prompts_have_their_own_answers(server: Server, engine: Engine) -> None:
    prompts = ["The", PROMPT, "An import"]
    ids = [engine.tokenize(prompt) for prompt in prompts]
    own = [expected(engine, prompt, max_tokens=8)[0] for prompt in prompts]
    for given in (prompts, ids):
        answer = server.complete(given)
        assert [choice["text"] for choice in answer["choices"]] == own
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["usage"]["completion_tokens"] == 24
    assert server.complete(ids[1])["choices"][0]["text"] == own[1]


def test_n_choices_have_seeds_that_follow(server: Server, engine: Engine) -> None:
    answer = server.complete(PROMPT, n=3, seed=7, temperature=1, max_tokens=8)
    own = [
        expected(engine, PROMPT, seed=seed, temperature=1.0, max_tokens=8)[0] for seed in (7, 8, 9)
    ]
    assert [choice["text"] for choice in answer["choices"]] == own
    assert len(set(own)) == 3
    assert answer["usage"]["prompt_tokens"] == len(engine.tokenize(PROMPT))
    assert answer["usage"]["completion_tokens"] == 24


def test_choices_that_share_a_prompt_find_nothing_before_them(server: Server) -> None:
    usage = server.complete("Three times: " + PROMPT, n=3)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_repeats_its_own_prompt(server: Server, stream: bool) -> None:
    prompts = ["The cat", "An import"]
    body = {"prompt": prompts, "n": 2, "echo": True, **GREEDY}
    if stream:
        found = texts(server.events("/v1/completions", body))
    else:
        found = texts([answered(server.post("/v1/completions", body))])
    assert sorted(found) == [0, 1, 2, 3]
    for index, text in found.items():
        assert text.startswith(prompts[index // 2])


def test_logprobs_are_the_engines(server: Server, engine: Engine) -> None:
    choice = server.complete(PROMPT, logprobs=3)["choices"][0]
    done = engine.generate([PROMPT], SamplingParams(max_tokens=8, logprobs=3))[0]
    assert done.logprobs is not None
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([s.chosen.logprob for s in done.logprobs])
    assert "".join(logprobs["tokens"]) == choice["text"]
    for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True):
        assert token in top
        assert 1 <= len(top) <= 4
    assert_offsets(choice)


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("kind", ["text", "ids", "bytes"])
def test_echo_scores_the_prompt(server: Server, engine: Engine, kind: str, max_tokens: int) -> None:
    text = "Zoë imports £5 — naïvely" if kind == "bytes" else "The import statement is"
    ids = engine.tokenize(text)
    answer = server.complete(
        ids if kind == "ids" else text, echo=True, logprobs=1, max_tokens=max_tokens
    )
    choice = answer["choices"][0]
    assert choice["text"].startswith(text)  # and no <s>, which the tokenizer puts in front
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + max_tokens
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    done = engine.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    scores = [one.chosen.logprob for one in done.prompt_logprobs or () if one is not None]
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(scores)
    assert_offsets(choice)


def assert_offsets(choice: dict[str, Any]) -> None:
    """Each token that is text stands in the text where its offset says."""
    offsets, text = choice["logprobs"]["text_offset"], choice["text"]
    assert offsets == sorted(offsets)
    for token, at in zip(choice["logprobs"]["tokens"], offsets, strict=True):
        if not token.startswith("<") and "\N{REPLACEMENT CHARACTER}" not in token:
            assert text[at : at + len(token)] == token


def test_what_is_ignored_changes_nothing(server: Server) -> None:
    plain = server.complete(PROMPT)["choices"]
    extra = {"user": "me", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "n": 1}
    extra |= {"prompt_cache_options": {"mode": "explicit"}, "prediction": {"type": "content"}}
    extra |= {"audio": None, "functions": None, "moderation": None, "web_search_options": None}
    assert server.complete(PROMPT, **extra, best_of=1, logit_bias={}, top_k=-1)["choices"] == plain


def test_a_long_prompt_leaves_the_others_their_room(server: Server, engine: Engine) -> None:
    longest = engine.model.max_seq_len
    body = {"prompt": [[5] * (longest - 2), [5, 6]], "ignore_eos": True, "temperature": 0}
    choices = answered(server.post("/v1/completions", body))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert (
        choices[1]["text"]
        == server.complete([5, 6], ignore_eos=True, max_tokens=16)["choices"][0]["text"]
    )


def test_a_default_ends_where_the_pool_does(artifact: Path, tmp_path: Path) -> None:
    """Each prompt has its own room; a limit that is given is not cut."""
    with serving(tmp_path / "log", artifact, "--threads", 1, "--num-pages", 4) as server:
        longest = answered(server.client.get("/v1/models"))["data"][0]["max_model_len"]
        assert longest < 100
        body: dict[str, Any] = {"prompt": [[5] * (longest - 5), [5, 6]], "ignore_eos": True}
        answer = answered(server.post("/v1/completions", body))
        assert answer["usage"]["completion_tokens"] == 5 + 16
        sentence = refusal(server.post("/v1/completions", {**body, "max_tokens": 6}), 400)
        assert f"max_tokens: expected at most {longest} tokens of prompt and output" in sentence
        sentence = refusal(server.post("/v1/completions", {"prompt": [5] * longest}), 400)
        assert f"prompt: expected at most {longest} tokens of prompt and output" in sentence
        usage = server.chat("Hi", ignore_eos=True, max_tokens=None)["usage"]
        assert usage["total_tokens"] == longest


def test_offsets_behind_special_tokens_that_are_spelled_out(server: Server) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1}
    choice = server.complete("<s>x</s> The", **fields)["choices"][0]
    found = dict(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    assert found["x"] == choice["text"].index("x")
    assert found["</s>"] == choice["text"].index("</s>")


def test_offsets_behind_a_token_that_the_tokenizer_puts_in_front(server: Server) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0}
    logprobs = server.complete("<s>x</s>y", **fields)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<s>", "<s>", "x", "</s>", "y"]
    assert logprobs["text_offset"] == [0, 0, 3, 4, 8]
    bodies = [{"prompt": letter, "add_special_tokens": False} for letter in "<s>"]
    letters = [answered(server.post("/tokenize", body))["tokens"][0] for body in bodies]
    choice = server.complete([0, *letters], **fields)["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<s>", [0, 0, 1, 2])


OPEN = [0, 66, 174, 255, 249]
"""A letter, and three of the four bytes of a character; token 226 is the fourth."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "token", "count", "text", "offsets"),
    [
        (
            OPEN,
            226,
            2,
            "a\N{SLIGHTLY SMILING FACE}\N{REPLACEMENT CHARACTER}",
            [0, 0, 1, 1, 1, 1, 2],
        ),
        (OPEN[:4], 249, 1, "a\N{REPLACEMENT CHARACTER}", [0, 0, 1, 1, 2]),
        (OPEN, 67, 1, "a\N{REPLACEMENT CHARACTER}b", [0, 0, 1, 1, 1, 2]),
        (OPEN, 226, 0, "a\N{REPLACEMENT CHARACTER}", [0, 0, 1, 1, 1]),
    ],
)
def test_an_echo_that_ends_inside_a_character(
    server: Server,
    prompt: list[int],
    token: int,
    count: int,
    text: str,
    offsets: list[int],
    stream: bool,
) -> None:
    """What is generated may begin with it."""
    body = {"prompt": prompt, "logit_bias": {str(token): 100}, "max_tokens": count, "echo": True}
    body |= {"temperature": 0, "logprobs": 0, "n": 2}
    if stream:
        found = [c for f in server.events("/v1/completions", body) for c in f["choices"]]
    else:
        found = answered(server.post("/v1/completions", body))["choices"]
    for index in range(2):
        mine = [choice for choice in found if choice["index"] == index]
        assert "".join([choice["text"] for choice in mine]) == text
        assert [at for choice in mine for at in choice["logprobs"]["text_offset"]] == offsets


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_tokens_that_wait_for_a_stop_string(server: Server, stream: bool) -> None:
    body = {"prompt": "A", "guided_regex": "I see the cat on the mat", "temperature": 0}
    body |= {"max_tokens": 40, "logprobs": 0, "echo": True}

    def offsets(**fields: Any) -> list[int]:
        if not stream:
            (choice,) = answered(server.post("/v1/completions", body | fields))["choices"]
            return list(choice["logprobs"]["text_offset"])
        frames = server.events("/v1/completions", body | fields)
        return [
            at
            for frame in frames
            for choice in frame["choices"]
            for at in choice["logprobs"]["text_offset"]
        ]

    assert offsets(stop="the m!") == offsets()


def test_a_frame_holds_an_interval_of_tokens(
    artifact: Path, engine: Engine, tmp_path: Path
) -> None:
    """Or more, where the reader is slower; the last one may have fewer."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "ignore_eos": True}
    (done,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=12, ignore_eos=True))
    with serving(tmp_path / "log", artifact, "--stream-interval", 5) as server:
        pieces = server.events("/v1/completions", {**body, "ignore_eos": True, "stream": True})
        messages = server.events("/v1/chat/completions", {**chat, "stream": True})
    choices = [piece["choices"][0] for piece in pieces]
    sizes = [len(choice["logprobs"]["tokens"]) for choice in choices]
    assert sum(sizes) == 12
    assert all(size >= 5 for size in sizes[1:-1])
    assert len(sizes) <= 4
    assert "".join(choice["text"] for choice in choices) == done.text
    assert len(messages) <= 1 + 4  # the role has a frame of its own


def test_integers_of_a_client_that_has_none(server: Server) -> None:
    """In fields and lists of them; a text stays what it is."""
    for prompt, written in (([5, 60, 700], "[5.0, 60.0,\n700.00\n]"), ("of 1.0, 2", '"of 1.0, 2"')):
        whole = server.complete(prompt, max_tokens=3, logprobs=1, stop_token_ids=[2047])
        body = f"""{{"prompt": {written}, "max_tokens" : 3.0 , "temperature": 0.0, "logprobs": 1.0,
        "stop_token_ids": [2047.0], "top_k": -1.0, "metadata": {{"a": 1.0}}}}"""
        assert json.loads(body)["prompt"] == prompt
        answer = answered(server.client.post("/v1/completions", content=body))
        assert answer["choices"] == whole["choices"]
        assert answer["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
