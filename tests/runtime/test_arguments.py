"""Types are checked where requests and settings enter: one sentence that names the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.runtime.artifact import Artifact

INDEX = "expected an integer >= {}, got {}"


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture(scope="module")
def engine(artifact: Artifact) -> Engine:
    return Engine(artifact, num_pages=8)


def refused(message: str) -> Any:
    return pytest.raises(RequestError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", None, INDEX.format(1, "NoneType None")),
        ("max_new_tokens", 2.0, INDEX.format(1, "float 2.0")),
        ("max_new_tokens", True, INDEX.format(1, "bool True")),
        ("top_k", 1.5, INDEX.format(0, "float 1.5")),
        ("top_k", "5", INDEX.format(0, "str '5'")),
        ("top_k", np.bool_(True), INDEX.format(0, "bool np.True_")),
        ("temperature", "hot", "expected a number, got str 'hot'"),
        ("temperature", None, "expected a number, got NoneType None"),
        ("temperature", True, "expected a number, got bool True"),
        ("temperature", 1j, "expected a number, got complex 1j"),
        ("temperature", np.float32("nan"), "expected >= 0 and finite, got nan"),
        ("temperature", 10**400, "expected a number, got int " + "1" + "0" * 36 + "..."),
        ("top_p", [0.9], "expected a number, got list [0.9]"),
        ("seed", 1.0, f"expected an integer >= {-(2**63)} or None, got float 1.0"),
        ("seed", "1", f"expected an integer >= {-(2**63)} or None, got str '1'"),
        ("seed", False, f"expected an integer >= {-(2**63)} or None, got bool False"),
        ("stop_token_ids", ("x",), INDEX.format(0, "str 'x'")),
        ("stop_token_ids", "x", "expected integers >= 0, got str 'x'"),
        ("stop_token_ids", 5, "expected integers >= 0, got int 5"),
        ("stop_token_ids", (1.0,), INDEX.format(0, "float 1.0")),
        ("stop_token_ids", (-1,), "expected >= 0, got -1"),
        ("stop_token_ids", range(1025), "expected at most 1024, got 1025"),
        ("ignore_eos", "no", "expected True or False, got str 'no'"),
        ("ignore_eos", None, "expected True or False, got NoneType None"),
        ("min_p", "0.1", "expected a number, got str '0.1'"),
        ("repetition_penalty", None, "expected a number, got NoneType None"),
        ("presence_penalty", True, "expected a number, got bool True"),
        ("frequency_penalty", [1], "expected a number, got list [1]"),
        ("min_new_tokens", 1.5, INDEX.format(0, "float 1.5")),
        ("stop", 5, "expected text, or a list of it, got int 5"),
        ("stop", {"a"}, "expected text, or a list of it, got set {'a'}"),
        ("stop", "", "expected text that is not empty, got str ''"),
        ("stop", ["a", ""], "expected text that is not empty, got str ''"),
        ("stop", ["a", 5], "expected text that is not empty, got int 5"),
        ("stop", ["a", "b" * 4096], "expected at most 4096 characters together, got 4097"),
        ("stop", ["a"] * 17, "expected at most 16, got 17"),
        ("include_stop_str_in_output", 1, "expected True or False, got int 1"),
        ("logprobs", "5", "expected an integer >= 0 or None, got str '5'"),
        ("logprobs", 21, "expected at most 20 or None, got 21"),
        ("n", 0, "expected >= 1, got 0"),
        ("n", 129, "expected at most 128, got 129"),
        ("n", 2.0, INDEX.format(1, "float 2.0")),
        ("prompt_logprobs", True, "expected an integer >= 0 or None, got bool True"),
        ("prompt_logprobs", -1, "expected >= 0 or None, got -1"),
        ("logit_bias", [(1, 2.0)], "expected token ids with numbers, got list [(1, 2.0)]"),
        ("logit_bias", {"1": 2.0}, INDEX.format(0, "str '1'")),
    ],
)
def test_sampling(field: str, value: Any, message: str) -> None:
    with refused(f"{field}: {message}"):
        SamplingParams(**{field: value})


def test_a_bias_that_is_no_number() -> None:
    with refused("logit_bias[7]: expected a number, got str 'much'"):
        SamplingParams(logit_bias={7: "much"})  # type: ignore[dict-item]


def test_numpy_scalars_are_numbers(engine: Engine) -> None:
    plain = SamplingParams(3, 0.5, 7, 0.5, 9, (5, 6), True)
    given = SamplingParams(
        np.int64(3),  # type: ignore[arg-type]
        np.float32(0.5),  # type: ignore[arg-type]
        np.uint8(7),  # type: ignore[arg-type]
        np.float64(0.5),
        np.array(9),  # type: ignore[arg-type]
        [np.int32(5), 6],  # type: ignore[arg-type]
        np.bool_(True),  # type: ignore[arg-type]
    )
    assert given == plain
    assert type(given.max_new_tokens) is int
    assert type(given.temperature) is float
    prompts: list[Any] = [[5, 6], np.array([5, 6]), (np.int64(5), 6), iter([5, 6])]
    assert len({tuple(done.token_ids) for done in engine.generate(prompts, plain)}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": None}, "prompt: expected text or token ids, got NoneType None"),
        ({"prompt": 5}, "prompt: expected text or token ids, got int 5"),
        ({"prompt": b"5"}, "prompt: expected text or token ids, got bytes b'5'"),
        (
            {"prompt": bytearray(b"5")},
            "prompt: expected text or token ids, got bytearray bytearray(b'5')",
        ),
        ({"prompt": {5, 6}}, "prompt: expected text or token ids, got set {5, 6}"),
        ({"prompt": {5: 6}}, "prompt: expected text or token ids, got dict {5: 6}"),
        ({"prompt": [5, "6"]}, "prompt: expected text or token ids, got str '6' at position 1"),
        ({"prompt": [5, 6.0]}, "prompt: expected text or token ids, got float 6.0 at position 1"),
        ({"prompt": [True]}, "prompt: expected text or token ids, got bool True at position 0"),
        ({"prompt": np.array(5)}, "prompt: expected text or token ids, got ndarray array(5)"),
        ({"sampling": {"top_k": 1}}, "sampling: expected SamplingParams, got dict {'top_k': 1}"),
        (
            {"sampling": SamplingParams(n=2)},
            "n: expected 1 of a single request, got 2; use Engine.generate, or one request for "
            "each of `SamplingParams.each()`",
        ),
        ({"request_id": 5}, "request_id: expected text, got int 5"),
        ({"request_id": b"5"}, "request_id: expected text, got bytes b'5'"),
        ({"request_id": ["5"]}, "request_id: expected text, got list ['5']"),
        ({"cache_salt": "s"}, "cache_salt of 'request-0': expected bytes, got str 's'"),
        ({"cache_salt": None}, "cache_salt of 'request-0': expected bytes, got NoneType None"),
    ],
)
def test_submit(artifact: Artifact, arguments: dict[str, Any], message: str) -> None:
    engine = Engine(artifact, num_pages=8)
    with refused(message):
        engine.submit(**({"prompt": [5]} | arguments))
    assert not engine.busy
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ("The", None, "prompts: expected a list, got one text; use [text]"),
        (5, None, "prompts: expected a list, got int 5"),
        (None, None, "prompts: expected a list, got NoneType None"),
        ([[5], 6], None, "prompts[1]: prompt: expected text or token ids, got int 6"),
        ([[5], [7.5]], None, "prompts[1]: prompt: expected text or token ids, got float 7.5 at "
         "position 0"),
        ([[5], [6]], [SamplingParams()], "sampling: expected 2, one for each prompt, got 1"),
        ([[5], [6]], [SamplingParams(), 1], "prompts[1]: sampling: expected SamplingParams, got "
         "int 1"),
        ([[5]], 1, "sampling: expected SamplingParams, got int 1"),
    ],
)  # fmt: skip
def test_generate(engine: Engine, prompts: Any, sampling: Any, message: str) -> None:
    with refused(message):
        engine.generate(prompts, sampling)
    assert not engine.busy


def test_a_bad_prompt_in_a_batch_is_named_by_its_index(engine: Engine) -> None:
    for bad, why in (
        ([], "expected a prompt, got an empty one"),
        ([5, -1], r"expected token ids in \[0, 2048\), got -1"),
        ([5] * 2048, "expected a prompt of at most 2047 tokens .*"),
        ([5] * 900, "expected at most 8 pages from the pool, .*"),
    ):
        with pytest.raises(RequestError, match=rf"^prompts\[2\]: request 'request-\d+': {why}$"):
            engine.generate([[5], "The", bad, [6]])
    assert not engine.busy


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_pages", 2.5, "expected an integer >= 1 or None, got float 2.5"),
        ("num_pages", "8", "expected an integer >= 1 or None, got str '8'"),
        ("num_pages", 1 << 31, "expected at most 2147483646 or None, got 2147483648"),
        ("max_batch_size", True, "expected an integer >= 1, got bool True"),
        ("max_batch_size", None, "expected an integer >= 1, got NoneType None"),
        ("max_batch_tokens", 2.0, "expected an integer >= 1 or None, got float 2.0"),
        ("num_threads", "2", "expected an integer >= 0 or None, got str '2'"),
        ("total_num_host_pages", -1, "expected >= 0 or None, got -1"),
        ("enable_prefix_caching", "no", "expected True or False, got str 'no'"),
        ("cache_memory", "much", "expected a size such as 80GiB or 512MB, got 'much'"),
        ("cache_memory", 1e9, "expected a size such as 80GiB or 512MB, got 1000000000.0"),
        ("host_memory", None, "expected a size such as 80GiB or 512MB, got None"),
        ("disk_bytes", -1, "expected a size such as 80GiB or 512MB, got -1"),
        ("disk", 5, "expected a folder, got int 5"),
        ("disk", "", "expected a folder, got an empty name"),
        ("remote", 5, "expected a URL, got int 5"),
        ("prefixes[0]", [5], "expected a file of kvgraph prefill, got int 5"),
        ("host_memory", "", "expected a size such as 80GiB or 512MB, got ''"),
        ("host_memory", "9" * 400, f"expected a size such as 80GiB or 512MB, got {'9' * 400!r}"),
        ("max_batch_size", 1 << 30, "expected at most 1048576, got 1073741824"),
        ("prefixes", "a.kvp", "expected a list, got one file; use [file]"),
    ],
)
def test_options(artifact: Artifact, option: str, value: Any, message: str) -> None:
    with refused(f"{option}: {message}"):
        Engine(artifact, **{option.partition("[")[0]: value})


def test_sizes_as_text_and_numpy_integers(artifact: Artifact) -> None:
    engine = Engine(artifact, cache_memory="1 MiB", host_memory="64KiB", max_batch_size=4)
    assert engine.kv.total_num_blocks() == (1 << 20) // 32768  # type: ignore[attr-defined]
    assert engine.kv.get_num_host_pages() == 2  # type: ignore[attr-defined]
    engine.close()
    count: Any = np.int64(8)
    engine = Engine(artifact, num_pages=count, max_batch_size=count, max_batch_tokens=count)
    assert len(engine.generate([[5] * 20])[0].token_ids) > 0


def test_cancel_and_tokenize(engine: Engine) -> None:
    with refused("request_id: expected text, got list ['x']"):
        engine.cancel(["x"])  # type: ignore[arg-type]
    with refused("prompt: expected text, got int 5"):
        engine.tokenize(5)  # type: ignore[arg-type]
