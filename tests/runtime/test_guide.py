"""Guided text is what its grammar describes, whatever the logits are; free rows do not change."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine, MissingDependencyError, SamplingParams, TextContext
from kvgraph.errors import RequestError
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.edits import LogitEdits
from kvgraph.runtime.guide import Guides, set_masks
from kvgraph.runtime.sessions.base import Session
from tests.runtime.test_faults import OPTIONS, Recalling, assert_whole

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
NAME = r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\.){0,6}'
"""Six characters, some of which JSON escapes."""
SHAPE = rf'\{{"name":"{NAME}","age":\d{{1,3}},"colours":\[("(red|green)",?){{0,3}}\]\}}'
PROMPT = list(range(66, 86))  # letters


class Noise(Session):
    """Logits are random numbers; `steps` counts."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        self.rng = np.random.default_rng(0)
        self.steps = 0

    def _run(self, arrays: list[Any]) -> Any:
        self.steps += 1
        size = len(arrays[2]), self.artifact.manifest.model.vocab_size
        return 2 * self.rng.standard_normal(size, np.float32)


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture(scope="module")
def noisy(artifact: Artifact) -> Engine:
    return Engine(artifact, session=Noise(artifact), num_pages=2000, max_batch_size=64)


@pytest.fixture
def engine(artifact: Artifact) -> Engine:
    return Engine(artifact, session=Recalling(artifact), num_pages=200)


def guided(max_new_tokens: int = 200, **fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, **({"temperature": 1.0} | fields))


# -- JSON


def random_schema(random: Random, depth: int = 3) -> dict[str, Any]:
    """A schema that bounds every length."""
    kinds = ["string", "integer", "boolean", "enum", "null"]
    kind = random.choice(kinds + ["object", "array"] * 3 * (depth > 0))
    if kind == "object":
        names = random.sample(["a", "id", "long name", 'q"', "ü"], random.randint(0, 3))
        properties = {name: random_schema(random, depth - 1) for name in names}
        closed = {"required": names, "additionalProperties": False}
        return {"type": "object", "properties": properties, **closed}
    if kind == "array":
        least = random.randint(0, 2)
        items = random_schema(random, depth - 1)
        bounds = {"minItems": least, "maxItems": least + random.randint(0, 2)}
        return {"type": "array", "items": items, **bounds}
    if kind == "string":
        least = random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 4)}
    if kind == "integer":
        least = random.randint(-2000, 2000)
        return {"type": "integer", "minimum": least, "maximum": least + random.randint(0, 300)}
    if kind == "enum":
        return {"enum": random.sample(["red", "re", 17, 175, None, True, "\n"], 3)}
    return {"type": kind}


def fits(schema: dict[str, Any], value: Any) -> bool:
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    if schema["type"] == "object":
        parts = schema["properties"]
        is_one = isinstance(value, dict) and value.keys() == parts.keys()
        return is_one and all(fits(parts[name], value[name]) for name in parts)
    if schema["type"] == "array":
        is_one = isinstance(value, list) and all(fits(schema["items"], one) for one in value)
        return is_one and schema["minItems"] <= len(value) <= schema["maxItems"]
    if schema["type"] == "string":
        is_one = isinstance(value, str)
        return is_one and schema["minLength"] <= len(value) <= schema["maxLength"]
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return value is None if schema["type"] == "null" else isinstance(value, bool)


def test_texts_of_a_thousand_random_schemas_are_valid(noisy: Engine) -> None:
    random = Random(0)
    schemas = [random_schema(random) for _ in range(1000)]
    params = [guided(900, guided_json=schema) for schema in schemas]
    done = noisy.generate([[5, 6]] * len(schemas), params)
    for schema, completion in zip(schemas, done, strict=True):
        assert completion.finish_reason == "stop", (schema, completion)
        value = json.loads(completion.text)
        assert fits(schema, value), (schema, completion.text)
        assert completion.text == compact(completion.text)


def compact(text: str) -> str:
    """`text` without the whitespace that is not in strings."""
    return re.sub(r'("(?:[^"\\]|\\.)*")|\s+', r"\1", text)


@pytest.mark.parametrize("schema", [True, {}, "{}", '{"type": "object"}'])
def test_any_object(noisy: Engine, schema: Any) -> None:
    for done in noisy.generate([PROMPT] * 8, guided(40, guided_json=schema)):
        assert done.text.startswith("{")
        if done.finish_reason == "stop":
            assert isinstance(json.loads(done.text), dict)


# -- other grammars, and what ends a text


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"guided_regex": "(yes|no), [0-9]{2,4}"}, r"(yes|no), \d{2,4}"),
        ({"guided_grammar": 'start: "x" NUM NUM? NUM?\nNUM: /[0-9]{2}[a-z]/'}, r"x(\d{2}[a-z])+"),
        ({"guided_grammar": 'root ::= "hello" ("a" | "b")'}, "hello[ab]"),
        ({"guided_json": PERSON}, SHAPE),
        ({"guided_json": json.dumps(PERSON), "temperature": 0}, SHAPE),
    ],
)
def test_the_text_is_what_the_grammar_describes(
    noisy: Engine, fields: dict[str, Any], shape: str
) -> None:
    for done in noisy.generate([PROMPT] * 8, guided(**fields)):
        assert done.finish_reason == "stop"
        assert re.fullmatch(shape, done.text, re.DOTALL)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"guided_regex": "a{1,30}", "ignore_eos": True}, "a{30}"),
        ({"guided_regex": "a{1,30}", "min_new_tokens": 9}, "a{9,30}"),
        ({"guided_regex": "a{3}", "min_new_tokens": 9}, "a{3}"),  # nothing else may come
        ({"guided_regex": "(ab?){1,60}", "stop_token_ids": [7], "ignore_eos": True}, "(ab?){1,60}"),
        ({"guided_regex": "a{3}c", "stop_token_ids": [66]}, ""),  # the grammar wants 66, an "a"
        ({"guided_regex": "xyz, a{1,9}", "stop": ["z"]}, "xy"),
        ({"guided_json": PERSON, "stop": ['"age"']}, rf'\{{"name":"{NAME}",'),
    ],
)
def test_ends(noisy: Engine, fields: dict[str, Any], shape: str) -> None:
    for done in noisy.generate([PROMPT] * 8, guided(**fields)):
        assert done.finish_reason == "stop"
        assert re.fullmatch(shape, done.text, re.DOTALL), done.text


def test_an_end_token_that_is_a_word_ends_no_text_early(artifact: Artifact) -> None:
    """As of a model whose end token the tokenizer does not mark as special."""
    model = replace(artifact.manifest.model, eos_token_ids=(66,))  # an "a"
    odd = replace(artifact, manifest=replace(artifact.manifest, model=model))
    with Engine(odd, session=Noise(odd), num_pages=200) as engine:
        for done in engine.generate([PROMPT] * 8, guided(guided_regex="[ab]{9,30}")):
            assert re.fullmatch("[ab]{9,30}", done.text)


def test_a_text_that_is_cut_ends_with_length(engine: Engine) -> None:
    """At every length, within a run of forced tokens too; tokens of a seed stay the same."""
    whole = engine.generate([PROMPT], guided(guided_json=PERSON, seed=4))[0]
    assert whole.finish_reason == "stop"
    for count in range(1, len(whole.token_ids)):
        done = engine.generate([PROMPT], guided(count, guided_json=PERSON, seed=4))[0]
        assert (done.token_ids, done.finish_reason) == (whole.token_ids[:count], "length")
        assert whole.text.startswith(done.text)
    assert_whole(engine)


# -- forced tokens


def test_forced_tokens_come_in_the_step_of_the_one_before(noisy: Engine) -> None:
    session: Any = noisy.session
    before = session.steps
    regex = "a long text that is forced, and behind it [ab]"
    noisy.submit(PROMPT, guided(guided_regex=regex), request_id="one")
    first = noisy.step()
    assert len(first) > 8
    assert "".join(token.text for token in first) == regex[:-5]
    assert not any(token.finish_reason for token in first)
    rest = []
    while noisy.busy:
        rest += noisy.step()
    assert session.steps - before == 1 + len(rest)
    assert rest[-1].finish_reason == "stop"
    assert len(noisy.generate([PROMPT], guided(guided_regex="forced"))[0].token_ids) > 1


def test_forced_tokens_are_cached(engine: Engine) -> None:
    """Their pages join the prefix cache once they are computed, and not before."""
    params = guided(guided_regex="a long text that is forced, [ab]{40}")
    done = engine.generate([PROMPT], params)[0]
    tokens = PROMPT + done.token_ids
    fresh = Engine(engine.artifact, session=Recalling(engine.artifact), num_pages=200)
    free = SamplingParams(max_new_tokens=8)
    assert (
        engine.generate([tokens], free)[0].token_ids == fresh.generate([tokens], free)[0].token_ids
    )
    assert engine.generate([tokens], free)[0].cached_tokens > len(PROMPT)


def test_each_token_has_its_log_probability(engine: Engine) -> None:
    done = engine.generate([PROMPT], guided(guided_json=PERSON, logprobs=2))[0]
    assert re.fullmatch(SHAPE, done.text, re.DOTALL)
    assert done.logprobs is not None
    assert len(done.logprobs) == len(done.token_ids)


@pytest.mark.parametrize("seed", range(4))
def test_log_probabilities_change_no_token(engine: Engine, seed: int) -> None:
    grammars: list[dict[str, Any]] = [
        {"guided_json": PERSON},
        {"guided_regex": "The answer is (yes|no), because [a-z ]{3,12}. So be it \U0001f600!"},
    ]
    for grammar in grammars:
        params = replace(guided(**grammar), temperature=9.0, seed=seed)
        for most in (200, 9):
            one = replace(params, max_new_tokens=most)
            plain = engine.generate([PROMPT], one)[0]
            asked = engine.generate([PROMPT], replace(one, logprobs=0))[0]
            assert asked.token_ids == plain.token_ids
            assert asked.text == plain.text


# -- beside others


def test_rows_without_a_guide_do_not_change(engine: Engine) -> None:
    free = SamplingParams(max_new_tokens=30, temperature=0.9, seed=1)
    greedy = SamplingParams(max_new_tokens=30)
    params = [free, guided(guided_json=PERSON), greedy, guided(guided_regex="ab{3,9}", seed=2)]
    prompts = [[i, *PROMPT] for i in range(4)]
    mixed = engine.generate(prompts, params)
    for i in (0, 2):
        alone = engine.generate([prompts[i]], params[i])[0]
        assert alone.token_ids == mixed[i].token_ids


@pytest.mark.parametrize("most", [{"max_batch_tokens": 8}, {"max_prefill_tokens": 2}])
def test_a_preempted_row_goes_on(artifact: Artifact, engine: Engine, most: dict[str, int]) -> None:
    """With chunks of forced tokens, and a pool that runs dry."""
    params = [guided(60, guided_json=PERSON, seed=i) for i in range(6)]
    prompts = [[i, *PROMPT] for i in range(6)]
    tight = Engine(artifact, session=Recalling(artifact), **OPTIONS | most)
    wanted = [done.token_ids for done in engine.generate(prompts, params)]
    assert [done.token_ids for done in tight.generate(prompts, params)] == wanted
    assert tight.scheduler.preemptions > 0
    assert_whole(tight)


def test_a_matcher_that_fails_ends_its_request_alone(engine: Engine) -> None:
    wanted = engine.generate([PROMPT], guided(guided_json=PERSON, seed=1))[0]
    for name in ("good", "bad"):
        engine.submit(PROMPT, guided(guided_json=PERSON, seed=1), request_id=name)
    said = engine.step()
    guide: Any = engine.scheduler.running[1].guide
    guide.matcher.consume_token(0)
    while engine.busy:
        said += engine.step()
    good, bad = ([token for token in said if token.request_id == name] for name in ("good", "bad"))
    assert [token.token_id for token in good] == wanted.token_ids
    assert bad[-1].error is not None
    assert bad[-1].error.startswith("request 'bad': expected a grammar that can be followed, got ")
    assert_whole(engine)


# -- the vocabulary


def test_tokens_that_the_tokenizer_lacks_are_not_allowed(artifact: Artifact) -> None:
    """And a model without end tokens has a text that ends where nothing can follow."""
    model = replace(artifact.manifest.model, vocab_size=2101, eos_token_ids=())
    tokenizer = Engine(artifact, session=Recalling(artifact), num_pages=8)._text.tokenizer
    guides = Guides(model, artifact.folder, tokenizer)
    params = SamplingParams(guided_regex="[^q]{2}")
    context = TextContext("one", PROMPT)
    edits = LogitEdits(params, context)
    grammar = params.grammar
    assert grammar is not None
    guide = guides.guide(grammar, params, context, (), edits)
    set_masks([guide])
    assert edits.mask is not None
    allowed = np.flatnonzero(np.unpackbits(edits.mask.view(np.uint8), bitorder="little"))
    assert 0 < len(allowed) < 2048
    assert allowed.max() < 2048
    a = int(tokenizer.token_to_id("a")) if tokenizer else 0
    assert guide.advance(a) == ([], False)
    assert guide.advance(a) == ([], True)


# -- what is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_json": {"type": "strin"}}, "guided_json: expected what llguidance takes, got one "
         "that it refuses (Invalid type: strin)"),
        ({"guided_regex": "(a"}, "guided_regex: expected what llguidance takes, got one that it "
         "refuses (at 1(8): invalid regex"),
        ({"guided_grammar": "start: x"}, "guided_grammar: expected what llguidance takes, got "),
        ({"guided_json": {"$ref": "#"}}, 'guided_json: expected a "$ref" that leads to a schema'),
        ({"guided_regex": ""}, "guided_regex: expected 1 to 65536 bytes, got 0"),
        ({"guided_regex": "a" * 65537}, "guided_regex: expected 1 to 65536 bytes, got 65537"),
        ({"guided_regex": 5}, "guided_regex: expected text, got int 5"),
        ({"guided_grammar": 'start: %json {"type": "integer"}'},
         "guided_grammar: expected no %json, got one; use guided_json for a schema"),
        ({"guided_regex": "a", "guided_json": True},
         "guided_json, guided_regex: expected at most one of them, got 2"),
        ({"guided_json": 5}, "guided_json: expected a JSON schema, as a dict or text, got int 5"),
        ({"guided_json": "[]"}, "guided_json: expected a JSON schema, an object, got list []"),
        ({"guided_json": "{"}, "guided_json: expected a JSON schema, got no JSON (Expecting "),
        ({"guided_json": {"enum": [{1}]}}, "guided_json: expected a JSON schema, got no JSON "
         "(Object of type set"),
        ({"guided_json": {"multipleOf": 1e6}},
         'guided_json: expected "multipleOf" with digits of at most 10000, got float 1000000.0'),
        ({"guided_json": {"allOf": [{"pattern": f"a{{{i}}}"} for i in range(5)]}}, "guided_json: "
         "expected at most 4 of pattern, format, multipleOf in a schema that combines others, "
         "got 5"),
        ({"guided_json": {"properties": {f"k{i}": {} for i in range(513)}}},
         "guided_json: expected at most 512 keys in an object, got 513"),
    ],
)  # fmt: skip
def test_bad_requests(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        engine.generate([PROMPT], SamplingParams(**fields))


@pytest.mark.parametrize("depth", [70, 5000, 100_000])
@pytest.mark.parametrize("form", ["dict", "text"])
def test_a_deep_schema_is_refused(depth: int, form: str) -> None:
    text = '{"items":' * depth + "{}" + "}" * depth
    schema: Any = text
    if form == "dict":
        schema = {}
        for _ in range(depth):
            schema = {"items": schema}
    with pytest.raises(RequestError, match="guided_json: expected "):
        SamplingParams(guided_json=schema)
    while isinstance(schema, dict) and schema:  # else its end is as deep
        schema = schema["items"]


def test_params_are_plain_values() -> None:
    params = SamplingParams(guided_json=PERSON)
    assert params.guided_json == json.dumps(PERSON, separators=(",", ":"))
    assert replace(params, seed=1).guided_json == params.guided_json
    assert hash(params) == hash(SamplingParams(guided_json=params.guided_json))


def test_without_llguidance(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(artifact, session=Recalling(artifact), num_pages=8)
    broken = "installed, .*cannot import name .*pip install --upgrade"
    for module, why in ((None, "not installed; pip install"), (ModuleType("llguidance"), broken)):
        monkeypatch.setitem(sys.modules, "llguidance", module)
        message = f"^llguidance: needed for guided_regex, {why} 'kvgraph\\[guide\\]'"
        with pytest.raises(MissingDependencyError, match=message):
            engine.submit(PROMPT, SamplingParams(guided_regex="a"))
        assert not engine.busy
