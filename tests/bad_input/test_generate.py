"""Params, options and prompts that an artifact does not take."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.contract.params import LAYOUT_FIELDS, KVCacheParams, KVCacheQuantization
from kvgraph.errors import BindingError, ParamsError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.runtime.artifact import Artifact
from tests.bad_input.damage import PRECOMPILED, edit_manifest, rehashed, retokenize, sentence
from tests.support.artifacts import Compiled
from tests.support.command_line import run

DIFFERENT: dict[str, Any] = {
    "dtype": "bfloat16",
    "n_kv_heads": 2,
    "head_dim": 32,
    "num_layers": 3,
    "page_size": 128,
    "is_mla": True,
    "quantization": KVCacheQuantization("int8"),
}
"""Layout fields that a buffer's type shows."""


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_buffer_of_another_type_is_not_allocated(loaded: Artifact, field: str) -> None:
    params = loaded.params()
    assert isinstance(params, KVCacheParams)
    other = replace(params, **{field: DIFFERENT[field]})
    symbol = other.get_symbolic_inputs()[0].kv_blocks
    with pytest.raises(BindingError) as caught:
        loaded.session().allocate(symbol, {"num_page_slots": 9})
    mine, theirs = (
        f"kv_blocks {s.dtype} {list(s.shape)} on cpu:0 (buffer)"
        for s in (params.get_symbolic_inputs()[0].kv_blocks, symbol)
    )
    assert str(caught.value) == f"kv_blocks: expected {mine} from the artifact, got {theirs}"


OTHER_LAYOUTS = DIFFERENT | {"window_size": 64, "v_head_dim": 8, "cache_strategy": "continuous"}


@pytest.mark.parametrize("field", OTHER_LAYOUTS)
def test_require_layout_names_the_field_and_both_values(loaded: Artifact, field: str) -> None:
    params = loaded.params()
    assert isinstance(params, KVCacheParams)
    params.require_layout(loaded.manifest.layout, source="the artifact")
    changes = {field: OTHER_LAYOUTS[field]}
    if field == "head_dim":
        changes["v_head_dim"] = params.v_head_dim
    other = replace(params, **changes)
    expected, got = loaded.manifest.layout[field], other.layout_dict()[field]
    message = re.escape(f"{field}: expected {expected!r} from the artifact, got {got!r}")
    with pytest.raises(ParamsError, match=f"^{message}$"):
        other.require_layout(loaded.manifest.layout, source="the artifact")
    if field != "cache_strategy":  # a paged manager takes paged params
        with pytest.raises(ParamsError, match=f"^{message}$"):
            PagedKVCacheManager(other, loaded.session(), 8, max_batch_size=1)
    assert {*OTHER_LAYOUTS, "layout", "n_shards"} == set(LAYOUT_FIELDS)


def test_shards_of_an_artifact_for_one_device(loaded: Artifact) -> None:
    devices = [kvgraph.Device("cpu:0"), kvgraph.Device("cpu:1")]
    with pytest.raises(ParamsError, match="n_shards: expected 1 from the layout, got 2"):
        loaded.params(devices)


# -- generate


LONG = "The import statement. " * 1000


def test_more_threads_than_the_machine_has(loaded: Artifact) -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(kvgraph.RequestError, match=f"expected 0 to {cores} .*, got 5000"):
        loaded.session(num_threads=5000)


@pytest.mark.parametrize("prompt", [b"abc", [1.5], [None], "\udcff"])
def test_prompts_of_another_kind(loaded: Artifact, prompt: Any) -> None:
    engine = kvgraph.Engine(loaded, num_pages=8)
    with pytest.raises(kvgraph.RequestError, match="prompt: expected text"):
        engine.submit(prompt)
    assert not engine.busy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "request 'request-0': expected a prompt, got an empty one"),
        (
            [LONG],
            r"request 'request-0': expected a prompt of at most 2047 tokens \(the model's "
            r"max_seq_len is 2048\), got \d{4,}",
        ),
        (
            ["The import statement " * 10, "--num-pages", 1],
            r"request 'request-0': expected at most 1 pages from the pool, got \d+ tokens "
            r"\(prompt and output\) that need \d+",
        ),
        (["The", "--num-pages", 0], "num_pages: expected >= 1 or None, got 0"),
        (["The", "--num-pages", 1 << 40], "num_pages: expected at most 2147483646 or None, got .*"),
        (["The", "--disk", ""], "disk: expected a folder, got an empty name"),
        (["The", "--host-memory", ""], "host_memory: expected a size such as .*, got ''"),
        (["The", "--num-pages", 8, "--disk-bytes", "1GiB"], "disk_bytes: expected a folder, .*"),
        (["The", "--num-pages", 1 << 30], "kv_blocks: expected .* [GT]iB of host memory for .*"),
        (
            ["The", "--session", "tensorrt"],
            r"session: expected one of \['onnxruntime', 'reference'\] for an artifact of backend "
            "'onnx', got 'tensorrt'",
        ),
        (
            ["The", "--session", "torch"],
            r"session: expected one of \['onnxruntime', 'reference'\] .*got 'torch'",
        ),
        (["The", "--session", ""], r"session: expected one of .* of backend 'onnx', got ''"),
        (["The", "--max-new-tokens", 0], "max_new_tokens: expected >= 1, got 0"),
        (["The", "--temperature", -1], r"temperature: expected >= 0 and finite, got -1.0"),
        (["The", "--temperature", "nan"], r"temperature: expected >= 0 and finite, got nan"),
        (["The", "--top-k", -2], "top_k: expected >= 0, got -2"),
        (["The", "--top-p", 0], r"top_p: expected in \(0, 1\], got 0.0"),
        (["The", "--top-p", 1.5], r"top_p: expected in \(0, 1\], got 1.5"),
        (["The", "--seed", -(1 << 64)], "seed: expected >= -9223372036854775808 or None, got .*"),
    ],
)
def test_generate(compiled: Compiled, arguments: Sequence[Any], message: str) -> None:
    for options in ([], ["--json"]):
        text = sentence(run("generate", compiled("tiny-llama"), *arguments, *options))
        assert re.fullmatch(message, text), text


@pytest.mark.parametrize("option", ["--top-k", "--seed", "--max-new-tokens", "--num-pages"])
def test_a_value_that_is_no_number(compiled: Compiled, option: str) -> None:
    outcome = run("generate", compiled("tiny-llama"), "The", option, "many")
    assert (outcome.code, outcome.out) == (2, "")
    assert option in outcome.err


def test_text_without_a_tokenizer(artifact: Path) -> None:
    """Token ids still work, and have no text."""
    (artifact / "tokenizer.json").unlink()
    edit_manifest(artifact, lambda fields: fields["files"].pop("tokenizer.json"))
    assert sentence(run("generate", artifact, "The")) == (
        f"{artifact}: expected tokenizer.json for a text prompt, got none; pass token ids"
    )
    completion = kvgraph.Engine(artifact, num_pages=8).generate([[5, 6, 7]])[0]
    assert completion.token_ids
    assert completion.text == ""


def test_a_damaged_tokenizer_in_an_artifact(artifact: Path) -> None:
    path = artifact / "tokenizer.json"
    path.write_text("{}")
    entry = {"size": 2, "chunks": [hashlib.sha256(b"{}").hexdigest()]}
    edit_manifest(artifact, lambda fields: fields["files"].update({path.name: entry}))
    text = sentence(run("generate", artifact, "The"))
    assert text.startswith(f"{path}: expected a tokenizer, got a damaged one (")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": PRECOMPILED}, r"expected a tokenizer, got a damaged one \(Precompiled: "),
        (
            {"post_processor": {"type": "TemplateProcessing", "special_tokens": {}, "pair": [],
                                "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}]}},
            r"expected a tokenizer that encodes the text, got one that fails \(no entry found",
        ),
        (
            {"model": {"type": "WordLevel", "unk_token": "[U]", "vocab": {"a": 0}}},
            r"expected a tokenizer that encodes the text, got one that fails \(WordLevel error",
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_of_an_artifact_that_fails(
    artifact: Path, changes: dict[str, Any], message: str
) -> None:
    path = artifact / "tokenizer.json"
    retokenize(path, **changes)
    edit_manifest(artifact, lambda fields: fields["files"].update({path.name: rehashed(path)}))
    text = sentence(run("generate", artifact, "The"))
    assert re.match(f"{path}: {message}", text), text
